"""Deterministic evaluation: ODE sampling with fixed seeds, train and held-out prompts apart, judges beside rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.registry import create
from configs.schema import RewardSection
from models.rewards.base import Scores, perfect_score, score
from models.sampling import Sampler, ode_plan, sample
from models.solvers import SOLVERS
from models.transitions import ODE
from storage.layout import ArtifactRef
from storage.records import ShardRecord
from storage.schema import EVALUATIONS, write_table
from storage.trajectories.base import Sample
from tasks.pictures import grid
from tasks.rollout import call_options, media_format, open_trajectory_store
from tasks.seeds import derive, generator
from tasks.sources import Weights
from tasks.stage import Output, Shard, Stage
from tasks.workspace import StoredPrompt

#: Clips of each split written as files of their own, in a form every player takes.
_CLIPS = 4


class EvaluateStage(Stage):
    """Images and scores of the policy after an epoch; the same initial noise for every policy."""

    name = "evaluate"
    kind = "evaluations"

    def options(self) -> Mapping[str, Any]:
        """Samples, steps, seed, how the model is called, and every reward and judge."""
        section = self.config.evaluate
        return {
            "samples": section.samples,
            "steps": self._steps,
            "solver": section.solver,
            "seed": section.seed,
            "images": section.images,
            "model": call_options(self.config),
            "rewards": [self._identity(reward) for reward in self._rewards],
            "average": self.config.optimize.ema is not None,
        }

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """The policy, the prompts."""
        return (self.workspace.policy_ref(self.epoch), self.workspace.run.require(0, "preprocess").ref)

    def shards(self) -> list[Shard]:
        """One per split that has prompts."""
        return [Shard(split) for split in ("heldout", "train") if self.workspace.prompts[split]]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Sample, score and draw one split."""
        self.workspace.use_threads()
        prompts = self.workspace.prompts[shard.name]
        count = self.config.evaluate.samples
        jobs = [(prompts[i % len(prompts)], i // len(prompts)) for i in range(count)]
        samples = self._sample(shard.name, jobs)
        open_trajectory_store(self.config.rollout.store).write(folder, samples, media_format(self.config))
        media = np.stack([made.media for made in samples if made.media is not None])
        scores = {reward.slot: self._score(reward, media, samples) for reward in self._rewards}
        _write_scores(folder / "scores.parquet", shard.name, samples, scores)
        self._draw(folder, samples, scores)
        return Output(rows=count, summary=self._figures(scores))

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Figures by split and reward."""
        return {record.shard: record.summary for record in records}

    @property
    def _steps(self) -> int:
        return int(self.config.evaluate.steps or self.config.rollout.steps)

    @property
    def _rewards(self) -> list[RewardSection]:
        return [*self.config.rewards, *self.config.evaluate.judges]

    def _sample(self, split: str, jobs: Sequence[tuple[StoredPrompt, int]]) -> list[Sample]:
        size, samples = self.config.execution.rollout_batch_size, []
        for start in range(0, len(jobs), size):
            samples += self._sample_batch(split, jobs[start : start + size], pad_to=size)
            self.workspace.reporter.progress(self.name, self.epoch, len(samples), len(jobs), split)
        return samples

    def _sample_batch(self, split: str, jobs: Sequence[tuple[StoredPrompt, int]], *, pad_to: int) -> list[Sample]:
        padded = [*jobs, *[jobs[-1]] * (pad_to - len(jobs))]
        ref = self.inputs()[0]
        policy = self.workspace.trainable(ref, Weights.AVERAGE).policy
        seeds = [derive(self.config.evaluate.seed, "evaluate", prompt.id, replica) for prompt, replica in padded]
        sigmas = policy.sigmas(self._steps)
        rollout = sample(
            policy,
            self.workspace.conditioning([prompt for prompt, _ in padded]),
            policy.initial_latents([generator(seed) for seed in seeds]),
            sigmas,
            sampler=Sampler(
                kernel=ODE(), solver=create(SOLVERS, self.config.evaluate.solver, {}, what="evaluate.solver")
            ),
            plans=[ode_plan()] * pad_to,
            noise=_no_noise,
        )
        images = policy.decode(rollout.final).cpu().numpy()
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
                media=images[row],
            )
            for row, (prompt, replica) in enumerate(jobs)
        ]

    def _identity(self, reward: RewardSection) -> dict[str, Any]:
        clips = {"frames": reward.frames} if self.config.model.frames > 1 else {}
        return {"name": reward.name, "options": reward.options, "slot": reward.slot, **clips}

    def _score(self, section: RewardSection, media: np.ndarray, samples: Sequence[Sample]) -> Scores:
        prompts, metadata = [made.prompt for made in samples], [made.metadata for made in samples]
        reward = self.workspace.reward(section)
        return score(reward, section.slot, media, prompts, metadata, frames=section.frames)

    def _figures(self, scores: Mapping[str, Scores]) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for reward in self._rewards:
            values = scores[reward.slot].values.astype(np.float64)
            perfect = perfect_score(self.workspace.reward(reward))
            figures[reward.slot] = {"mean": float(values.mean()), "exact": float((values >= perfect).mean())}
        return figures

    def _draw(self, folder: Path, samples: Sequence[Sample], scores: Mapping[str, Scores]) -> None:
        shown = samples[: self.config.evaluate.images]
        if not shown:
            return
        first = scores[self._rewards[0].slot]
        notes = first.notes if first.notes is not None else [""] * len(samples)
        captions = [(made.prompt, f"{notes[i]} {first.values[i]:.2f}".strip()) for i, made in enumerate(shown)]
        grid([made.media for made in shown if made.media is not None], captions).save(folder / "grid.png")
        media = media_format(self.config)
        for number, made in enumerate(shown[:_CLIPS]):
            if made.media is not None and made.media.ndim == 4:
                (folder / "clips").mkdir(exist_ok=True)
                (folder / "clips" / f"{number:03d}.mp4").write_bytes(replace(media, lossless=False).encode(made.media))


def _write_scores(path: Path, split: str, samples: Sequence[Sample], scores: Mapping[str, Scores]) -> None:
    rows = [(made, i, slot) for slot in scores for i, made in enumerate(samples)]
    notes = {slot: result.notes or [""] * len(samples) for slot, result in scores.items()}
    columns: dict[str, list[Any]] = {
        "sample_id": [made.sample_id for made, _, _ in rows],
        "split": [split] * len(rows),
        "prompt": [made.prompt for made, _, _ in rows],
        "replica": [made.replica for made, _, _ in rows],
        "reward": [slot for _, _, slot in rows],
        "score": [float(scores[slot].values[i]) for _, i, slot in rows],
        "note": [notes[slot][i] for _, i, slot in rows],
    }
    write_table(path, columns, EVALUATIONS)


def _no_noise(step: int) -> torch.Tensor:
    raise AssertionError(f"the ODE asked for noise at step {step}")
