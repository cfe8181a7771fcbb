"""Base classes of forward-process algorithms, which noise final latents again and need neither log-probs nor an SDE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, NonNegativeFloat

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import build
from flowmill.tasks.algorithms.base import BehaviorDecay, ForwardTimes, Requirements
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch
from flowmill.tasks.algorithms.objectives import prediction_weight, squared_error

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
#: The prediction whose squared error is a loss: of flow matching, the noise (DDPM, arXiv 2006.11239, eq. 14), v of
#: variance-preserving diffusion (arXiv 2202.00512), or the clean latents; see ``objectives.prediction_weight``.
Prediction: TypeAlias = Literal["velocity", "epsilon", "v_prediction", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VelocityKL:
    """Options and methods of algorithms with optional KLs of velocities."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of mean (v - v_base)^2."""
    ema_kl_coef: NonNegativeFloat = 0.0
    """Weight of mean (v - v_average)^2, with the moving average of the weights (Flow-Factory's ``ema_kl_beta``)."""

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

    def __post_init__(self) -> None:
        self.levels()

    def levels(self, **forced: Any) -> ForwardTimes:
        """Return the noise levels; ``forced`` are values that the algorithm requires.

        Raises:
            ValueError: an option is unknown or invalid.
        """
        return _component(ForwardTimes, "times", {**self.times, **forced})

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


def errors(batch: ForwardBatch, *velocities: Tensor, prediction: Prediction = "velocity") -> tuple[Tensor, ...]:
    """Return the flow-matching error of each velocity, or that of another prediction, (B,)."""
    weight = prediction_weight(prediction, batch.grid.sigma)
    return tuple(squared_error(velocity, batch.target) * weight for velocity in velocities)


def decay_of(options: Mapping[str, Any]) -> BehaviorDecay:
    """Return a decay from its options.

    Raises:
        ValueError: an option is unknown or invalid.
    """
    return _component(BehaviorDecay, "decay", options)


#: Options of a ``BehaviorDecay``.
Decay: TypeAlias = Annotated[Mapping[str, Any], AfterValidator(decay_of)]


def _component(kind: type[T], option: str, values: Mapping[str, Any]) -> T:
    try:
        component: T = build(kind, option, values, label="option")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return component
