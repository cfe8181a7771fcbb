"""Sampling with weights sharded over the ranks: all ranks run each forward together, each with its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowmill.models.maths.conditioning import Conditioning, Guided
from flowmill.models.policies.diffusion import DiffusionPolicy, TrainableDenoiser
from flowmill.tasks.runtime.ranks import Ranks


class Inputs(NamedTuple):
    """Inputs of a forward."""

    latents: Tensor
    """(B, ...) float32."""
    sigma: Tensor
    """(B,) float32."""
    conditioning: Conditioning
    """B rows."""


def idle_row(policy: DiffusionPolicy, conditioning: Conditioning) -> Inputs:
    """Return a dummy row to call the denoisers with.

    Args:
        policy: draws the noise.
        conditioning: one row, of any prompt.
    """
    latents = policy.initial_latents([torch.Generator().manual_seed(0)])
    return Inputs(latents, torch.full((1,), 0.5, device=latents.device), conditioning)


class InStep:
    """Velocities of sharded weights, for ranks that process different shards, in any number.

    Before each forward the ranks agree on the models that any of them needs. All ranks call these models; a rank that
    does not need one, or has no work left, calls it with a dummy row. So ranks can take different numbers of steps.
    """

    def __init__(self, trainable: TrainableDenoiser, ranks: Ranks, idle: Callable[[], Inputs]) -> None:
        """Bind to the weights.

        Args:
            trainable: the policy, sharded.
            ranks: all ranks that hold a part of it.
            idle: makes a dummy row; called at most once, when needed.
        """
        self._ranks = ranks
        self._make_idle = idle
        self._idle: Inputs | None = None
        self._calls: Mapping[str, Callable[[Tensor, Tensor, Conditioning], Any]] = {
            "policy": trainable.velocity,
            "guided": trainable.guided_velocity,
            "reference": trainable.reference_velocity,
        }

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the policy's (B, ...) velocities; see ``DiffusionPolicy.velocity``."""
        velocity: Tensor = self._call("policy", Inputs(latents, sigma, conditioning))
        return velocity

    def guided_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Guided:
        """Return the policy's velocities and predictions for the negative prompt; see its ``guided_velocity``."""
        guided: Guided = self._call("guided", Inputs(latents, sigma, conditioning))
        return guided

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the base model's (B, ...) velocities; see ``TrainableDenoiser.reference_velocity``."""
        velocity: Tensor = self._call("reference", Inputs(latents, sigma, conditioning))
        return velocity

    @torch.no_grad()
    def rest(self) -> None:
        """Take part in the forwards of other ranks until all are done."""
        while names := self._next_calls(None):
            for name in names:
                self._calls[name](*self._idle_row())

    def _call(self, name: str, inputs: Inputs) -> Any:
        results: dict[str, Any] = {}
        for other in self._next_calls(name):
            row = inputs if other == name else self._idle_row()
            results[other] = self._calls[other](*row)
        return results[name]

    def _next_calls(self, own: str | None) -> list[str]:
        """Return the models that any rank calls next; all ranks must call this together."""
        wishes = torch.tensor([name == own for name in self._calls], dtype=torch.uint8)
        return [name for name, some in zip(self._calls, self._ranks.largest(wishes).tolist(), strict=True) if some]

    def _idle_row(self) -> Inputs:
        if self._idle is None:
            self._idle = self._make_idle()
        return self._idle
