"""Deterministic evaluation: ODE sampling with fixed seeds, train and held-out prompts apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.policies.base import Part
from models.sampling import Sampler, ode_plan, sample
from models.transitions import ODE
from storage.trajectories.base import Sample
from tasks.behind import ShardWriter
from tasks.chain import Node, policy_after
from tasks.components import call_options, make_solver, media_format, media_options, open_trajectory_store
from tasks.context import RunContext
from tasks.finals import Finals
from tasks.prompts import StoredPrompt
from tasks.seeds import derive, generator
from tasks.sources import Weights
from tasks.stage import Output, Shard, Stage

if TYPE_CHECKING:
    import torch

SPLITS = ("heldout", "train")
CLIPS = "clips"
#: How many of each split are written as files of their own.
_CLIPS = 4


class EvaluateStage(Stage):
    """Images of the policy after an epoch; the same initial noise for every policy. Scoring them is judge's work."""

    name = "evaluate"
    kind = "evaluations"
    parts = frozenset({Part.DENOISER, Part.VAE})
    separable = True
    saves_memory = ("Lower execution.rollout_batch_size, or execution.decode_batch_size if it failed while decoding.",)
    # 2: images alone; scores are artifacts of their own.
    version = 2

    def __init__(self, context: RunContext, epoch: int, slot: str = "") -> None:
        """Bind to an epoch; ``slot`` is the name of an evaluation beside the run's own."""
        super().__init__(context, epoch)
        self.slot = slot

    def options(self) -> Mapping[str, Any]:
        """Samples, steps, seed, and how the model is called."""
        section = self.config.evaluate
        return {
            "samples": section.samples,
            "steps": self._steps,
            "solver": section.solver,
            "seed": section.seed,
            "model": call_options(self.config),
            "average": self.config.optimize.ema is not None,
            "store": self.config.rollout.store,
            "media": media_options(self.config),
        }

    def upstream(self) -> tuple[Node, ...]:
        """The policy, the prompts."""
        return (policy_after(self.epoch), Node(0, "preprocess"))

    def load(self) -> None:
        """The policy."""
        self.host.assemble(self.inputs()[0], Weights.AVERAGE)

    def rest(self) -> None:
        """Take part in what other ranks still sample."""
        self.host.rest()

    def shards(self) -> list[Shard]:
        """One per split that has prompts."""
        return [Shard(split) for split in SPLITS if self.context.prompts[split]]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Sample one split."""
        self.host.use_threads()
        prompts = self.context.prompts[shard.name]
        count = self.config.evaluate.samples
        jobs = [(prompts[i % len(prompts)], i // len(prompts)) for i in range(count)]
        size, clips = self.config.execution.rollout_batch_size, list[Sample]()
        form, store = media_format(self.config), open_trajectory_store(self.config.rollout.store)
        recent = self.context.recent.begin(self.ref, shard.name, exact=form.lossless)
        with ShardWriter(store.writer(folder, form), recent) as writer:
            for start in range(0, len(jobs), size):
                samples = self._sample_batch(shard.name, jobs[start : start + size], pad_to=size)
                writer.add(samples)
                clips += samples[: _CLIPS - len(clips)]
                self.context.reporter.progress(self.name, self.epoch, start + len(samples), len(jobs), shard.name)
            self._clips(folder, clips)
            return Output(rows=count, written=writer.end())

    @property
    def _steps(self) -> int:
        return int(self.config.evaluate.steps or self.config.rollout.steps)

    def _sample_batch(self, split: str, jobs: Sequence[tuple[StoredPrompt, int]], *, pad_to: int) -> list[Sample]:
        padded = [*jobs, *[jobs[-1]] * (pad_to - len(jobs))]
        ref = self.inputs()[0]
        trainable = self.host.trainable(ref, Weights.AVERAGE)
        policy = trainable.policy
        seeds = [derive(self.config.evaluate.seed, "evaluate", prompt.id, replica) for prompt, replica in padded]
        sigmas = policy.sigmas(self._steps)
        rollout = sample(
            self.host.velocities(trainable),
            self.host.conditioning([prompt for prompt, _ in padded]),
            policy.initial_latents([generator(seed) for seed in seeds]),
            sigmas,
            sampler=Sampler(kernel=ODE(), solver=make_solver(self.config.evaluate.solver, "evaluate.solver")),
            plans=[ode_plan()] * pad_to,
            noise=_no_noise,
        )
        finals = Finals.of(policy, rollout.final, self.config)
        return [
            Sample(
                sample_id=f"{split}-{prompt.id}-{replica:04d}",
                prompt_id=prompt.id,
                group_id=prompt.id,
                prompt=prompt.text,
                metadata=prompt.metadata,
                epoch=self.epoch,
                replica=replica,
                seed=seeds[row],
                policy=str(ref),
                sigmas=sigmas.tolist(),
                **finals.sample(row),
            )
            for row, (prompt, replica) in enumerate(jobs)
        ]

    def _clips(self, folder: Path, samples: Sequence[Sample]) -> None:
        """Write the first clips as files of their own, in a form every player takes."""
        form = replace(media_format(self.config), lossless=False)
        for number, made in enumerate(samples):
            if made.media is not None and made.media.ndim == 4:
                (folder / CLIPS).mkdir(exist_ok=True)
                (folder / CLIPS / f"{number:03d}.mp4").write_bytes(form.encode(made.media))


def _no_noise(step: int) -> torch.Tensor:
    raise AssertionError(f"the ODE asked for noise at step {step}")
