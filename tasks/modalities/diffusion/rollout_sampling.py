"""Rollouts by denoising: stochastic chains, or branches of a trunk, with their log-probs.

Legend: B rows of a batch, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowmill.models.maths.branching import Branches, branch
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Rollout, Sampler, sample
from flowmill.models.maths.schedules import DrawnPerSample, Plan, Steps
from flowmill.models.maths.transitions import Kernel
from flowmill.models.policies.diffusion import DiffusionPolicy, TrainableDenoiser
from flowmill.models.policies.nan_checks import finite, noise_levels
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.components import make_kernel, make_plan, make_solver
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.modalities.diffusion.final_samples import Finals
from flowmill.tasks.modalities.diffusion.lockstep import InStep
from flowmill.tasks.modalities.diffusion.velocities import SamplingModels
from flowmill.tasks.modalities.samplers import SampleRequest, SamplingContext
from flowmill.tasks.runs.seeds import derive, generator


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBatch:
    """A batch of chains to sample."""

    jobs: Sequence[SampleRequest]
    padded: Sequence[SampleRequest]
    """B jobs, filled up with copies."""
    seeds: Sequence[int]
    """Seeds of the initial noise, [B]."""
    plans: Sequence[Steps]
    """[B]"""
    policy: DiffusionPolicy
    velocities: TrainableDenoiser | InStep
    sigmas: Tensor
    """(T + 1,)"""
    conditioning: Conditioning
    """B rows."""


class RolloutSampler:
    """Makes the samples of an epoch with the rollout policy."""

    def __init__(self, making: SamplingContext) -> None:
        self._making, self._config, self._epoch = making, making.config, making.epoch
        self._models = SamplingModels(making, Weights.BEHAVIOR)
        self._means = making.context.plan.requires.old_means
        """Whether the algorithm compares step means with those of the behavior policy."""

    def load(self) -> None:
        """Load the policy, and the base model if a KL to it is needed."""
        self._models.load(reference=self._with_kl)

    def rest(self) -> None:
        """Take part in collective calls of ranks that still sample."""
        self._models.rest()

    def make(self, jobs: Sequence[SampleRequest]) -> list[Sample]:
        """Sample a chain per job, or all branches of its trunk."""
        branching = self._plan.draw(self._config.rollout.steps, 0, self._epoch).branches > 0
        return self._branch(jobs) if branching else self._sample(self._batch(jobs))

    @property
    def _with_kl(self) -> bool:
        return bool(self._config.advantage.kl_coef > 0)

    @cached_property
    def _kernel(self) -> Kernel:
        return make_kernel(self._config)

    @cached_property
    def _plan(self) -> Plan:
        return make_plan(self._config)

    def _sample(self, batch: ChainBatch) -> list[Sample]:
        latents = self._start(batch.policy, batch.padded, batch.seeds)
        latents = batch.policy.started(latents, batch.sigmas, batch.conditioning)
        rollout = sample(
            batch.velocities,
            batch.conditioning,
            latents,
            batch.sigmas,
            sampler=self._sampler(batch.policy, batch.velocities),
            plans=batch.plans,
            noise=lambda step: self._noise(batch.padded, step, latents),
        )
        return self.finished(batch, rollout)

    def _batch(self, jobs: Sequence[SampleRequest]) -> ChainBatch:
        """Return a batch; padding to a fixed size makes the same kernels run for every shard."""
        padded = list(jobs) + [jobs[-1]] * (self._config.execution.rollout_batch_size - len(jobs))
        policy, velocities = self._models.policy_and_velocities(reference=self._with_kl)
        steps = self._config.rollout.steps
        return ChainBatch(
            jobs=jobs,
            padded=padded,
            seeds=[self._seed("initial", job, 0) for job in padded],
            plans=[self._plan.draw(steps, self._seed("plan", job, 0), self._epoch) for job in padded],
            policy=policy,
            velocities=velocities,
            sigmas=noise_levels(policy, steps),
            conditioning=self._models.conditioning([job.prompt for job in padded]),
        )

    def finished(self, batch: ChainBatch, rollout: Rollout) -> list[Sample]:
        """Return the samples of a batch: decoded, and checked to be finite."""
        finals = Finals.of(batch.policy, rollout.final, self._config, batch.conditioning)
        finite(rollout.log_probs, "log-probs")
        sigmas = batch.sigmas.tolist()
        return [
            Sample(
                **job.columns(self._making),
                **finals.sample(row),
                **_chain(rollout, row, batch.plans[row], means=self._means),
                seed=batch.seeds[row],
                sigmas=sigmas,
            )
            for row, job in enumerate(batch.jobs)
        ]

    def _sampler(self, policy: DiffusionPolicy, velocities: TrainableDenoiser | InStep) -> Sampler:
        rollout = self._config.rollout
        return Sampler(
            kernel=self._kernel,
            solver=make_solver(rollout.solver, "rollout.solver"),
            storage_dtype=getattr(torch, rollout.latents_dtype),
            reference=velocities.reference_velocity if self._with_kl else None,
            unconditional=rollout.unconditional,
        )

    def _branch(self, jobs: Sequence[SampleRequest]) -> list[Sample]:
        """Sample trunks and all their branches; one stored sample per branch, ordered by (trunk, step, number)."""
        policy, velocities = self._models.policy_and_velocities()
        seeds = [self._seed("initial", job, 0) for job in jobs]
        sigmas = noise_levels(policy, self._config.rollout.steps)
        latents = self._start(policy, jobs, seeds)
        plan = self._plan.draw(self._config.rollout.steps, 0, self._epoch)
        conditioning = self._models.conditioning([job.prompt for job in jobs])
        latents = policy.started(latents, sigmas, conditioning)
        branches = branch(
            velocities,
            conditioning,
            latents,
            sigmas,
            sampler=self._sampler(policy, velocities),
            plan=plan,
            noise=lambda step, number: self._noise(jobs, step, latents, number),
            max_rows=self._config.execution.rollout_batch_size,
        )
        finals = Finals.of(
            policy, branches.final, self._config, conditioning.rows(branches.trunk.to(branches.final.device))
        )
        finite(branches.log_probs, "log-probs")
        trunks = [(job.columns(self._making), seed) for job, seed in zip(jobs, seeds, strict=True)]
        levels = sigmas.tolist()
        # Trunk by trunk: training draws rows by their number, which must not depend on batches and shards.
        return [
            Sample(**_of_branch(branches, row, *trunks[trunk], means=self._means), **finals.sample(row), sigmas=levels)
            for trunk, row in sorted((trunk, row) for row, trunk in enumerate(branches.trunk.tolist()))
        ]

    def _start(self, policy: DiffusionPolicy, jobs: Sequence[SampleRequest], seeds: Sequence[int]) -> Tensor:
        """Return (B, ...) initial noise cos(a) z + sin(a) n, a = own_noise pi / 2; n is a sample's own."""
        latents, share = policy.initial_latents([generator(seed) for seed in seeds]), self._config.rollout.own_noise
        if not share:
            return latents
        own = policy.initial_latents([generator(self._seed("own noise", job, 0)) for job in jobs])
        return math.cos(math.pi / 2 * share) * latents + math.sin(math.pi / 2 * share) * own

    def _seed(self, purpose: str, job: SampleRequest, step: int, branch_number: int = 0) -> int:
        per_group = not isinstance(self._plan, DrawnPerSample)
        shared = per_group if purpose == "plan" else purpose == "initial" and self._config.rollout.same_noise
        replica = 0 if shared else job.replica
        parts = (self._config.run.seed, purpose, self._epoch, job.prompt.id, replica, step)
        return derive(*parts, branch_number) if branch_number else derive(*parts)

    def _noise(self, jobs: Sequence[SampleRequest], step: int, like: Tensor, branch_number: int = 0) -> Tensor:
        """Return (B, ...) standard normal noise of one step, drawn on the CPU."""
        seeds = [self._seed("noise", job, step, branch_number) for job in jobs]
        return torch.stack([torch.randn(like.shape[1:], generator=generator(seed)) for seed in seeds])


def _chain(rollout: Rollout, row: int, plan: Steps, *, means: bool) -> dict[str, Any]:
    return {
        "steps": plan.trained,
        "states": plan.states,
        "log_probs": rollout.log_probs[row].cpu().numpy(),
        "latents": None if rollout.states is None else rollout.states[row, : len(plan.states)].cpu().numpy(),
        "means": rollout.means[row].cpu().numpy() if means else None,
        "unconditional": _array_or_none(rollout.unconditional[row]),
        "reference_kl": rollout.reference_kl[row].cpu().numpy(),
    }


def _of_branch(branches: Branches, row: int, columns: Mapping[str, Any], seed: int, *, means: bool) -> dict[str, Any]:
    """Return the fields of a branch, without its end; ``columns`` and ``seed`` are those of its trunk."""
    step, number = (int(value[row]) for value in (branches.step, branches.number))
    predicted = branches.unconditional
    return {
        **columns,
        "sample_id": f"{columns['sample_id']}-s{step:03d}-b{number:03d}",
        "group_id": f"{columns['group_id']}-s{step:03d}",
        "seed": seed,
        "steps": (step,),
        "states": (step, step + 1),
        "log_probs": branches.log_probs[row : row + 1].cpu().numpy(),
        "latents": torch.stack([branches.before[row], branches.after[row]]).cpu().numpy(),
        "means": branches.means[row : row + 1].cpu().numpy() if means else None,
        "unconditional": None if predicted is None else predicted[row : row + 1].cpu().numpy(),
    }


def _array_or_none(values: Tensor) -> np.ndarray | None:
    return values.cpu().numpy() if values.numel() else None
