"""Base classes of forward-process algorithms, which noise final latents again and need neither log-probs nor an SDE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.algorithms.base import BehaviorDecay, ForwardTimes, Requirements
from tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from tasks.algorithms.objectives import squared_error

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VelocityKL:
    """Options and methods of algorithms with optional KLs of velocities."""

    kl_coef: float = 0.0
    """Weight of mean (v - v_base)^2."""
    ema_kl_coef: float = 0.0
    """Weight of mean (v - v_average)^2, with the moving average of the weights (Flow-Factory's ``ema_kl_beta``)."""

    def check_kl(self) -> None:
        """Check the weights of the KLs.

        Raises:
            ValueError: one is negative.
        """
        for name, weight in (("kl_coef", self.kl_coef), ("ema_kl_coef", self.ema_kl_coef)):
            if weight < 0:
                raise ValueError(f"{name} is {weight}; it must not be negative.")

    def add_kl(
        self, batch: DiffusionBatch, models: DiffusionModels, velocity: Tensor, loss: Tensor, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Return the loss plus the weighted velocity KLs, and report them."""
        if self.kl_coef > 0:
            kl = squared_error(velocity, models.reference_velocity(batch))
            metrics["kl"] = kl.detach()
            loss = loss + self.kl_coef * kl
        if self.ema_kl_coef > 0:
            kl = squared_error(velocity, models.average_velocity(batch))
            metrics["ema_kl"] = kl.detach()
            loss = loss + self.ema_kl_coef * kl
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardProcess(VelocityKL):
    """Options and methods of algorithms on forward-process samples."""

    times: Mapping[str, Any] = field(default_factory=dict)
    """Noise levels, see ``base.ForwardTimes``: count, kind, low, high, power, shared."""
    guided: bool = True
    """Velocities in the loss use the guidance of rollouts; false: conditional velocities, at half the cost."""

    def levels(self, **forced: Any) -> ForwardTimes:
        """Return the noise levels; ``forced`` are values that the algorithm requires.

        Raises:
            ValueError: an option is unknown or invalid.
        """
        try:
            return ForwardTimes(**{**self.times, **forced})
        except TypeError as error:
            raise ValueError(f"times: {error}") from None

    def needs(self, *, levels: ForwardTimes, **further: Any) -> Requirements:
        """Return requirements on forward data; a KL needs the base model and also samples of advantage 0."""
        with_kl = self.kl_coef > 0 or self.ema_kl_coef > 0
        base: dict[str, Any] = {
            "data": "forward",
            "times": levels,
            "min_group_size": 2,
            "reference": self.kl_coef > 0,
            "average": self.ema_kl_coef > 0,
            "guided": self.guided,
            "zero_advantages": with_kl,
        }
        return Requirements(**{**base, **further})


def errors(batch: ForwardBatch, *velocities: Tensor) -> tuple[Tensor, ...]:
    """Return the flow-matching error of each velocity, (B,)."""
    return tuple(squared_error(velocity, batch.target) for velocity in velocities)


def decay_of(options: Mapping[str, Any]) -> BehaviorDecay:
    """Return a decay from its options.

    Raises:
        ValueError: an option is unknown.
    """
    try:
        return BehaviorDecay(**options)
    except TypeError as error:
        raise ValueError(f"decay: {error}") from None
