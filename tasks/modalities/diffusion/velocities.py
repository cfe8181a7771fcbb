"""Velocities while sampling: from this process's models, or from those of all ranks in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies.diffusion import DiffusionPolicy, TrainableDenoiser
from flowmill.tasks.inputs.prompts import StoredPrompt
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.modalities.diffusion.conditioning import conditioning_of
from flowmill.tasks.modalities.diffusion.lockstep import InStep, idle_row

if TYPE_CHECKING:
    from flowmill.tasks.modalities.samplers import SamplingContext


class SamplingModels:
    """A policy for sampling, with some of its weights."""

    def __init__(self, making: SamplingContext, weights: Weights) -> None:
        self._making, self._host, self._weights = making, making.host, weights

    def load(self, *, reference: bool = False) -> None:
        """Load the policy, and the base model if a KL to it is needed; all ranks must call this together."""
        trainable = self._host.assemble(self._making.policy, self._weights)
        if reference:
            self._host.give_reference(trainable)

    def policy_and_velocities(self, *, reference: bool = False) -> tuple[DiffusionPolicy, TrainableDenoiser | InStep]:
        """Return the policy, its velocity function, and with ``reference`` that of the base model."""
        trainable = self._trainable()
        if reference:
            self._host.give_reference(trainable)
        return trainable.policy, self._stepping if self._host.samples_in_step else trainable

    def conditioning(self, prompts: Sequence[StoredPrompt]) -> Conditioning:
        """Return one row per prompt."""
        return conditioning_of(self._making.context, self._host, prompts)

    def rest(self) -> None:
        """Take part in the forwards of other ranks until all are done."""
        if self._host.samples_in_step:
            self._stepping.rest()

    def _trainable(self) -> TrainableDenoiser:
        return cast(TrainableDenoiser, self._host.trainable(self._making.policy, self._weights))

    @cached_property
    def _stepping(self) -> InStep:
        trainable = self._trainable()
        prompt = next(prompt for prompts in self._making.context.prompts.values() for prompt in prompts)
        return InStep(trainable, self._host.ranks, lambda: idle_row(trainable.policy, self.conditioning([prompt])))
