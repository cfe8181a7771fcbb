"""The interface of algorithms: their requirements, inputs and losses. The training loop knows no algorithm by name.

Legend: B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from torch import Tensor

    from flowmill.models.policies.compute_meter import Meter
    from flowmill.models.policies.trainable import Trainable

#: Prefix of figures of rows of which the largest is reported; of others it is the mean.
LARGEST = "max/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTimes:
    """Noise levels at which a forward-process algorithm evaluates each sample."""

    count: PositiveInt = 4
    """Levels per sample and epoch."""
    kind: Literal["stratified", "grid", "logit_normal", "power", "timesteps"] = "stratified"
    """'stratified': one draw per equal part of the range; 'grid': the sampler's own levels in random order;
    'logit_normal': sigmoid of a normal draw; 'power': one draw per equally likely part of the range under a density
    proportional to t^power; 'timesteps': one of each equal part of the timesteps of the model's training (0 to 999 of
    Stable Diffusion), for families that were trained on such."""
    low: float = 0.02
    """Smallest level, for 'stratified' and 'power'."""
    high: float = 0.98
    """Largest level, for 'stratified' and 'power'."""
    power: NonNegativeFloat = 1.0
    """Exponent of the density for 'power': higher values draw noisy levels more often; 0 is 'stratified'."""
    shift: PositiveFloat = 1.0
    """Shift a of 'logit_normal': a level s becomes a s / (1 + (a - 1) s), as in the scheduler of a trainer that draws
    from shifted timesteps (diffusers' Stable Diffusion 3 trainer: 3)."""
    shared: bool = False
    """All samples of a group use the same levels and noise (required by algorithms that compare them)."""
    constant_noise: bool = False
    """All levels use the same noise."""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < 1:
            raise ValueError(f"low is {self.low} and high {self.high}; they must be 0 < low < high < 1.")

    def switched_off(self) -> str | None:
        """Return why an option does nothing with this kind, if so."""
        idle = {
            "power of times acts on the kind 'power'": self.power != 1 and self.kind != "power",
            "shift of times acts on the kind 'logit_normal'": self.shift != 1 and self.kind != "logit_normal",
            "low and high of times act on the kinds 'stratified' and 'power'": not self.bounded
            and (self.low, self.high) != (0.02, 0.98),
        }
        return next((f"{why}, and kind is {self.kind!r}" for why, does in idle.items() if does), None)

    @property
    def bounded(self) -> bool:
        """Whether levels are drawn between ``low`` and ``high``."""
        return self.kind in ("stratified", "power")

    def level(self, position: int, draw: float) -> float:
        """Return a level in one of ``count`` equally likely parts of the range, for a draw between 0 and 1."""
        if self.kind == "power":
            exponent = self.power + 1
            low, high = self.low**exponent, self.high**exponent
            return float((low + (high - low) * (position + draw) / self.count) ** (1 / exponent))
        return self.low + (self.high - self.low) * (position + draw) / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviorDecay:
    """Rate at which the rollout policy follows the trained policy: behavior = d behavior + (1 - d) new.

    d = 0 before ``flat`` epochs, then min(start + rate (epoch - flat), maximum). DiffusionNFT's ``return_decay`` has
    the types 0 (none), 1 (rate 0.001, maximum 0.5) and 2 (flat 75, rate 0.0075, maximum 0.999), counted in its own
    steps, one per epoch; Flow-Factory's CRD has start 0.25, rate 0.005, maximum 0.999.
    """

    flat: NonNegativeInt = 0
    rate: NonNegativeFloat = 0.0
    maximum: Annotated[float, Field(ge=0, le=1)] = 0.0
    start: NonNegativeFloat = 0.0

    def without_effect(self) -> str | None:
        """Return why d is 0 after every epoch though a field is set, if so."""
        rises = self.rate > 0 or self.start > 0
        if self.maximum == 0 and (rises or self.flat > 0):
            return "maximum of decay is 0, so that d always is; published values are 0.5 and 0.999, and {} is no decay"
        return "start and rate of decay are 0, and so is d" if self.maximum > 0 and not rises else None

    def __call__(self, epoch: int) -> float:
        """Return d after an epoch."""
        return 0.0 if epoch < self.flat else min(self.start + self.rate * (epoch - self.flat), self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Requirements of an algorithm on rollouts and models; ``flowmill check`` compares them with the config."""

    kind: str = "diffusion"
    """The kind of policies it trains: a name of the table, or "package.module:Class"."""
    data: Literal["transitions", "forward", "states"] = "transitions"
    """Stored stochastic steps with log-probs, final latents that are noised again, or stored states from which
    denoising continues."""
    times: ForwardTimes | None = None
    """Noise levels, for forward data."""
    unit: Literal["row", "pair", "group"] = "row"
    """The unit that must stay together in a batch: a row, a group's best and worst sample, or a whole group."""
    min_group_size: int = 1
    """Samples per prompt."""
    reference: bool = False
    """Velocities of the base model."""
    average: bool = False
    """Velocities of the moving average of the weights."""
    guided: bool = True
    """All these velocities use the guidance of rollouts; if False, they use no guidance."""
    behavior: bool = False
    """Velocities of the policy that drew the rollouts."""
    decay: BehaviorDecay | None = None
    """The rollout policy follows the trained one slowly, with this decay; None: it is the trained one."""
    old_means: bool = False
    """Stored means of the behavior policy's steps."""
    finals: bool = False
    """Final latents of each sample whose stored steps are trained."""
    same_noise: bool = False
    """Samples of a group start from the same initial noise."""
    densities: bool = False
    """Log-probs must be those of the step's Gaussian, with its scale."""
    advantages: bool = True
    """Rewards enter the loss."""
    desired: bool = False
    """Only samples with advantages above 0 are rows, also for a KL; for the unit 'row'."""
    gradients: bool = False
    """Stored gradients of the rewards with respect to final latents."""
    rewards: int = 0
    """Approximate number of prompts per sample that rewards score at once during training, with a gradient through the
    decoder; 0: training calls no rewards."""
    calls: int = 1
    """Consecutive forwards with gradient per row; the state of a row has at least as many steps after it."""
    once: bool = False
    """Each row is trained on once: the loss has no optimum, so every further pass moves the policy as far again."""
    mismatched: bool = False
    """Before the gradients of each update its rows are computed under the prompts of others, by a method
    ``mismatched_gain(batch, models)``, which returns (B,) gains; their mean, at least 0, is ``reference_point`` of the
    models."""
    notes: tuple[str, ...] = ()
    """Notes for users of the algorithm, a sentence or two each; ``flowmill check`` prints them."""
    per_token: bool = False
    """Advantages are per token, not per sample."""
    critic: bool = False
    """A critic is trained next to the policy; advantages are estimated from its values."""
    normalization: tuple[tuple[str, str], ...] = ()
    """Required settings of ``advantage``, as (name, value); other values would make it another algorithm."""
    teachers: tuple[tuple[str, str], ...] = ()
    """Required teachers, as (prompt source, folder of a model of the same family); the source of a single teacher is
    empty."""
    after: bool = False
    """It has a method ``after(batch, models)``, which returns (B,) figures of rows after an update."""
    approx_kl: bool = False
    """Its metrics have ``approx_kl``, an estimate of the KL of the behavior policy to the policy in the unit of the
    log-ratio, or a better one as ``kl_epoch``; ``optimize.stop_kl`` and the alert 'kl' read the latter."""
    zero_advantages: bool = False
    """Rows with advantage 0 contribute (to a KL term, for example); otherwise they are skipped."""

    @property
    def ends(self) -> bool:
        """Whether training uses the end of a chain, or a prediction of it."""
        return self.data != "transitions" or self.finals


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows, parts of samples in any mix; subclasses add the fields of their kind."""

    weighed: ClassVar[bool] = False
    """``importance`` is meaningful for these rows."""

    advantages: Tensor
    """(B,) float32."""
    weights: Tensor
    """(B,) float32: 1, or 0 for padding rows."""
    units: Tensor
    """(B,) int64 index of a row's unit within the batch; padding rows share the last one."""
    importance: Tensor
    """(B,) float32 truncated importance weight, policy at the epoch's start over behavior policy; 1 for fresh rows."""
    count: int
    """Number of rows without padding; they come first."""
    age: Tensor
    """(B,) int64 epochs since the rollout; on the CPU, for metrics only."""
    step: Tensor
    """(B,) int64 denoising step or noise level index of a row within its sample; on the CPU."""
    keys: tuple[tuple[int, int], ...]
    """(sample, position) of each row, the key of cached results."""


B = TypeVar("B", bound=Batch)


def expect(batch: Batch, kind: type[B]) -> B:
    """Return the batch as the kind an algorithm declared in ``requires.data``.

    Raises:
        TypeError: the batch is of another kind.
    """
    if not isinstance(batch, kind):
        raise TypeError(f"this algorithm needs a {kind.__name__}, but got a {type(batch).__name__}")
    return batch


@dataclass(slots=True, kw_only=True)
class Models:
    """The models of an algorithm; subclasses add the calls of their kind of policy."""

    trainable: Trainable
    """The policy being trained."""
    behavior: list[Tensor] = field(default_factory=list)
    """Trained parameters of the policy that drew the rollouts."""
    average: list[Tensor] | None = None
    """Moving average of the trained parameters, if there is one."""
    on_policy: bool = False
    """True while the trained policy is still the behavior policy."""
    frozen: bool = False
    """The policy does not change in this epoch; only the critic learns."""
    meter: Meter | None = None
    """Counts backward passes, if set."""
    reference_point: float = 0.0
    """Mean gain of the update's rows under the prompts of others, for algorithms that need it."""
    remembered: dict[tuple[int, int], Tensor] | None = None
    """Cached outputs of the frozen reference by row, if an epoch passes over rows more than once; None: no cache."""
    measures: bool = False
    """Losses are computed to see how far the policy moved: metrics also have ``kl_base``, its KL to the base model."""
    base: Callable[[], list[Tensor]] | None = None
    """Returns the weights that training started from, if no reference holds them; set only while ``measures``."""

    def recall(self, batch: Any) -> None:
        """Cache the frozen reference's outputs of rows, if the kind of policy caches such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """A loss per row, averaged by the loop over all rows of an update."""

    loss: Tensor
    """(B,) with gradient."""
    other_losses: Mapping[str, Tensor] = field(default_factory=dict)
    """(B,) losses of further trained models, by part; the parts share no parameters."""
    metrics: Mapping[str, Tensor]
    """(B,) figures per row without gradient; the loop reports their means, and with the prefix ``LARGEST`` the largest.

    ``gap`` is the distance between a row's behavior policy, as stored by the rollout, and the policy as computed now,
    in the unit of the quantity that the loss exponentiates or masks by. The algorithm's ``gap_limit`` is its limit, as
    a name and a value.
    """


class Algorithm(Protocol):
    """One training objective."""

    @property
    def requires(self) -> Requirements:
        """Its requirements on rollouts and models."""
        ...

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        """Return the loss of each row."""
        ...
