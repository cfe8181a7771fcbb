"""Rollouts: K samples per prompt, sharded by group, stored with the log-probs that made them.

Legend: B rows of a batch, K samples per group, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.branching import Branches, branch
from models.policies.base import Conditioning, Part
from models.sampling import Rollout, Sampler, sample
from models.schedules import DrawnPerSample, Plan, Steps
from models.transitions import Kernel
from storage.layout import ArtifactRef
from storage.records import ShardRecord
from storage.trajectories.base import Sample, TrajectoryStore
from tasks.behind import ShardWriter
from tasks.chain import Node, policy_of
from tasks.components import (
    call_options,
    make_algorithm,
    make_kernel,
    make_plan,
    make_solver,
    media_format,
    media_options,
    open_trajectory_store,
)
from tasks.finals import Finals
from tasks.prompts import SOURCE, StoredPrompt
from tasks.seeds import derive, epoch_prompts, generator, mixed_prompts
from tasks.sources import Weights
from tasks.stage import Output, Shard, Stage

if TYPE_CHECKING:
    from torch import Tensor


class RolloutStage(Stage):
    """Generates the trajectories of one epoch with the policy of the epoch before, or an older one."""

    name = "rollout"
    kind = "trajectories"
    parts = frozenset({Part.DENOISER, Part.VAE})
    separable = True
    _planned: tuple[ArtifactRef, list[Shard]] | None = None
    saves_memory = ("Lower execution.rollout_batch_size, or execution.decode_batch_size if it failed while decoding.",)

    def options(self) -> Mapping[str, Any]:
        """Everything that changes samples; shard and batch sizes do not."""
        rollout = self.config.rollout.model_dump(mode="json", exclude={"groups_per_shard", "media", "unconditional"})
        rollout["media"] = media_options(self.config)
        about: dict[str, Any] = {"seed": self.config.run.seed, "epoch": self.epoch}
        if self.config.prompts.sources:
            about["mixture"] = {source.name: source.weight for source in self.config.prompts.sources}
        if self._with_means:
            about["means"] = True
        if self.config.rollout.unconditional:
            about["unconditional"] = True
        if self.config.advantage.kl_coef > 0:
            about["reference_kl"] = True
        return {"rollout": rollout, "model": call_options(self.config), **about}

    def upstream(self) -> tuple[Node, ...]:
        """The policy, the prompts."""
        return (policy_of(self.config, self.epoch), Node(0, "preprocess"))

    def load(self) -> None:
        """The policy, and the base model where a KL to it is wanted."""
        trainable = self.host.assemble(self.inputs()[0], Weights.BEHAVIOR)
        if self.config.advantage.kl_coef > 0:
            self.host.give_reference(trainable)

    def rest(self) -> None:
        """Take part in what other ranks still sample."""
        self.host.rest()

    def shards(self) -> list[Shard]:
        """Ranges of groups: those of committed shards, and what is missing between them, which stays the plan."""
        if self._planned is None or self._planned[0] != self.ref:
            records = self.context.store.records(self.ref)
            planned = cover(self.config.rollout.prompts_per_epoch, self.config.rollout.groups_per_shard, records)
            self._planned = (self.ref, planned)
        return self._planned[1]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Sample the groups of one shard."""
        self.host.use_threads()
        jobs = [
            _Job(prompt, replica) for prompt in self.groups[shard.start : shard.stop] for replica in range(self._size)
        ]
        batch = self.config.execution.rollout_batch_size
        branching = self._plan.draw(self.config.rollout.steps, 0, self.epoch).branches > 0
        form = media_format(self.config)
        recent = self.context.recent.begin(self.ref, shard.name, exact=form.lossless)
        with ShardWriter(self.trajectory_store.writer(folder, form), recent) as writer:
            for start in range(0, len(jobs), batch):
                part = jobs[start : start + batch]
                writer.add(self._branch(part) if branching else self._sample(part, pad_to=batch))
                self.context.reporter.progress(
                    self.name,
                    self.epoch,
                    shard.start * self._size + min(start + batch, len(jobs)),
                    len(self.groups) * self._size,
                )
            return Output(rows=writer.rows, summary={"groups": shard.stop - shard.start}, written=writer.end())

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Count groups and samples."""
        return {"groups": len(self.groups), "samples": sum(record.rows for record in records)}

    @cached_property
    def groups(self) -> list[StoredPrompt]:
        """The prompts of this epoch, one group each."""
        prompts, sources = self.context.prompts["train"], self.config.prompts.sources
        size, drawn = self.config.rollout.prompts_per_epoch, {"seed": self.config.run.seed, "epoch": self.epoch}
        if not sources:
            return [prompts[index] for index in epoch_prompts(len(prompts), size, **drawn)]
        lists = [[prompt for prompt in prompts if prompt.metadata[SOURCE] == source.name] for source in sources]
        chosen = mixed_prompts(list(map(len, lists)), [source.weight for source in sources], size, **drawn)
        return [lists[source][index] for source, index in chosen]

    @cached_property
    def trajectory_store(self) -> TrajectoryStore:
        """The format of the shards."""
        return open_trajectory_store(self.config.rollout.store)

    @cached_property
    def _with_means(self) -> bool:
        """Whether the algorithm compares step means with those of the behavior policy."""
        return make_algorithm(self.config).requires.old_means

    @property
    def _size(self) -> int:
        return int(self.config.rollout.group_size)

    @cached_property
    def _kernel(self) -> Kernel:
        return make_kernel(self.config)

    @cached_property
    def _plan(self) -> Plan:
        return make_plan(self.config)

    def _sample(self, jobs: Sequence[_Job], *, pad_to: int) -> list[Sample]:
        """Sample one batch; it is padded to one size so that the same kernels run whatever the shard."""
        padded = list(jobs) + [jobs[-1]] * (pad_to - len(jobs))
        ref = self.inputs()[0]
        trainable = self.host.trainable(ref, Weights.BEHAVIOR)
        policy, with_kl = trainable.policy, self.config.advantage.kl_coef > 0
        if with_kl:
            self.host.give_reference(trainable)
        velocities = self.host.velocities(trainable)
        seeds = [self._seed("initial", job, 0) for job in padded]
        sigmas = policy.sigmas(self.config.rollout.steps)
        plans = [self._plan.draw(self.config.rollout.steps, self._seed("plan", job, 0), self.epoch) for job in padded]
        latents = policy.initial_latents([generator(seed) for seed in seeds])
        rollout = sample(
            velocities,
            self.host.conditioning([job.prompt for job in padded]),
            latents,
            sigmas,
            sampler=self._sampler(velocities.reference_velocity if with_kl else None),
            plans=plans,
            noise=lambda step: self._noise(padded, step, latents),
        )
        finals = Finals.of(policy, rollout.final, self.config)
        about: dict[str, Any] = {"epoch": self.epoch, "policy": str(ref), "sigmas": sigmas.tolist()}
        return [
            _stored(job, finals.sample(row), rollout, row, plans[row], means=self._with_means, seed=seeds[row], **about)
            for row, job in enumerate(jobs)
        ]

    def _sampler(self, reference: Callable[[Tensor, Tensor, Conditioning], Tensor] | None) -> Sampler:
        rollout = self.config.rollout
        return Sampler(
            kernel=self._kernel,
            solver=make_solver(rollout.solver, "rollout.solver"),
            storage_dtype=getattr(torch, rollout.latents_dtype),
            reference=reference,
            unconditional=rollout.unconditional,
        )

    def _branch(self, jobs: Sequence[_Job]) -> list[Sample]:
        """Sample trunks and all their branches; one stored sample per branch."""
        ref = self.inputs()[0]
        trainable = self.host.trainable(ref, Weights.BEHAVIOR)
        policy = trainable.policy
        seeds = [self._seed("initial", job, 0) for job in jobs]
        sigmas = policy.sigmas(self.config.rollout.steps)
        latents = policy.initial_latents([generator(seed) for seed in seeds])
        plan = self._plan.draw(self.config.rollout.steps, 0, self.epoch)
        made = branch(
            self.host.velocities(trainable),
            self.host.conditioning([job.prompt for job in jobs]),
            latents,
            sigmas,
            sampler=self._sampler(None),
            plan=plan,
            noise=lambda step, number: self._noise(jobs, step, latents, number),
            max_rows=self.config.execution.rollout_batch_size,
        )
        finals = Finals.of(policy, made.final, self.config)
        about: dict[str, Any] = {"epoch": self.epoch, "policy": str(ref), "sigmas": sigmas.tolist()}
        about["means"] = self._with_means
        return [_stored_branch(jobs, made, row, finals.sample(row), seeds, **about) for row in range(len(made.final))]

    def _seed(self, purpose: str, job: _Job, step: int, branch_number: int = 0) -> int:
        per_group = not isinstance(self._plan, DrawnPerSample)
        shared = per_group if purpose == "plan" else purpose == "initial" and self.config.rollout.same_noise
        replica = 0 if shared else job.replica
        parts = (self.config.run.seed, purpose, self.epoch, job.prompt.id, replica, step)
        return derive(*parts, branch_number) if branch_number else derive(*parts)

    def _noise(self, jobs: Sequence[_Job], step: int, like: Tensor, branch_number: int = 0) -> Tensor:
        seeds = [self._seed("noise", job, step, branch_number) for job in jobs]
        return torch.stack([torch.randn(like.shape[1:], generator=generator(seed)) for seed in seeds])


class _Job:
    """One sample to make."""

    __slots__ = ("prompt", "replica")

    def __init__(self, prompt: StoredPrompt, replica: int) -> None:
        self.prompt = prompt
        self.replica = replica


def _stored(
    job: _Job, final: Mapping[str, Any], rollout: Rollout, row: int, plan: Steps, *, means: bool, **about: Any
) -> Sample:
    return Sample(
        sample_id=f"e{about['epoch']:05d}-{job.prompt.id}-{job.replica:04d}",
        prompt_id=job.prompt.id,
        group_id=job.prompt.id,
        prompt=job.prompt.text,
        metadata=job.prompt.metadata,
        replica=job.replica,
        **final,
        steps=plan.trained,
        states=plan.states,
        log_probs=rollout.log_probs[row].cpu().numpy(),
        latents=None if rollout.states is None else rollout.states[row, : len(plan.states)].cpu().numpy(),
        means=rollout.means[row].cpu().numpy() if means else None,
        unconditional=rollout.unconditional[row].cpu().numpy() if rollout.unconditional.numel() else None,
        reference_kl=rollout.reference_kl[row].cpu().numpy(),
        **about,
    )


def _stored_branch(
    jobs: Sequence[_Job],
    made: Branches,
    row: int,
    final: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    means: bool,
    **about: Any,
) -> Sample:
    trunk, step, number = (int(value[row]) for value in (made.trunk, made.step, made.number))
    job = jobs[trunk]
    return Sample(
        sample_id=f"e{about['epoch']:05d}-{job.prompt.id}-{job.replica:04d}-s{step:03d}-b{number:03d}",
        prompt_id=job.prompt.id,
        group_id=f"{job.prompt.id}-s{step:03d}",
        prompt=job.prompt.text,
        metadata=job.prompt.metadata,
        replica=job.replica,
        seed=seeds[trunk],
        **final,
        steps=(step,),
        states=(step, step + 1),
        log_probs=made.log_probs[row : row + 1].cpu().numpy(),
        latents=torch.stack([made.before[row], made.after[row]]).cpu().numpy(),
        means=made.means[row : row + 1].cpu().numpy() if means else None,
        unconditional=None if made.unconditional is None else made.unconditional[row : row + 1].cpu().numpy(),
        **about,
    )


def cover(total: int, size: int, records: Sequence[ShardRecord]) -> list[Shard]:
    """Return shards that cover ``total`` items: committed ranges as they are, the gaps cut at multiples of ``size``.

    The shard size is not part of a fingerprint, so an artifact begun with one size may be finished with another.
    """
    committed = sorted(tuple(int(part) for part in record.shard.split("-")) for record in records)
    shards, position = [], 0
    for start, stop in [*committed, (total, total)]:
        while position < start:
            cut = min(start, (position // size + 1) * size)
            shards.append(Shard(f"{position:06d}-{cut:06d}", position, cut))
            position = cut
        if stop > start >= position:
            shards.append(Shard(f"{start:06d}-{stop:06d}", start, stop))
            position = stop
    return shards
