"""Evaluation sampling by denoising: the ODE from the same noise for every policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowmill.configs.model import ModelSection
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.transitions import ODE
from flowmill.models.policies.diffusion import DiffusionPolicy, TrainableDenoiser
from flowmill.models.policies.nan_checks import noise_levels
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.components import make_solver
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.modalities.diffusion.final_samples import Finals
from flowmill.tasks.modalities.diffusion.lockstep import InStep
from flowmill.tasks.modalities.diffusion.velocities import SamplingModels
from flowmill.tasks.modalities.samplers import SampleRequest, SamplingContext
from flowmill.tasks.runs.seeds import derive, generator

if TYPE_CHECKING:
    import torch


class EvaluationSampler:
    """Makes samples with fixed seeds, using the average of the weights if there is one."""

    def __init__(self, making: SamplingContext) -> None:
        self._making, self._config = making, making.config
        self._models = SamplingModels(making, Weights.AVERAGE)

    def load(self) -> None:
        """Load the policy."""
        self._models.load()

    def rest(self) -> None:
        """Take part in collective calls of ranks that still sample."""
        self._models.rest()

    def make(self, jobs: Sequence[SampleRequest]) -> list[Sample]:
        """Sample one batch; padding to a fixed size makes the same kernels run for every shard."""
        policy, velocities = self._models.policy_and_velocities()
        with policy.sized(**sizes_of(self._making.context.plan.evaluated.config.model)):
            return self._sampled(jobs, policy, velocities)

    def _sampled(
        self, jobs: Sequence[SampleRequest], policy: DiffusionPolicy, velocities: TrainableDenoiser | InStep
    ) -> list[Sample]:
        section, size = self._config.evaluate, self._config.execution.rollout_batch_size
        padded = [*jobs, *[jobs[-1]] * (size - len(jobs))]
        seeds = [derive(section.seed, "evaluate", job.prompt.id, job.replica) for job in padded]
        sigmas = noise_levels(policy, section.steps or self._config.rollout.steps)
        conditioning = self._models.conditioning([job.prompt for job in padded])
        rollout = sample(
            velocities,
            conditioning,
            policy.started(policy.initial_latents([generator(seed) for seed in seeds]), sigmas, conditioning),
            sigmas,
            sampler=Sampler(kernel=ODE(), solver=make_solver(section.solver, "evaluate.solver")),
            plans=[ode_plan()] * size,
            noise=no_noise,
        )
        finals = Finals.of(policy, rollout.final, self._config, conditioning)
        return [
            Sample(**job.columns(self._making), **finals.sample(row), seed=seeds[row], sigmas=sigmas.tolist())
            for row, job in enumerate(jobs)
        ]


def sizes_of(model: ModelSection) -> dict[str, int]:
    """Return the size of images or clips, as ``DiffusionPolicy.sized`` takes it."""
    return {"height": model.height, "width": model.width, "frames": model.frames}


def no_noise(step: int) -> torch.Tensor:
    """Never called: no step is stochastic."""
    raise AssertionError(f"the ODE asked for noise at step {step}")
