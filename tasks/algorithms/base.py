"""What an algorithm declares and computes. The training loop knows no algorithm by name.

Legend: B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from models.compute_meter import Meter
    from models.policies.trainable import Trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTimes:
    """Noise levels at which a forward-process algorithm looks at each sample."""

    count: int = 4
    """Levels per sample and epoch."""
    kind: Literal["stratified", "grid", "logit_normal", "power"] = "stratified"
    """One draw per equal part of the range; the sampler's own levels in a drawn order; sigmoid of a normal draw; one
    draw per equally likely part of the range where a level t is as likely as t^power."""
    low: float = 0.02
    """Smallest level, for 'stratified' and 'power'."""
    high: float = 0.98
    """Largest level, for 'stratified' and 'power'."""
    power: float = 1.0
    """How much likelier noisy levels are, for 'power'; 0 is 'stratified'."""
    shared: bool = False
    """All samples of a group see the same levels and noise (algorithms that compare them do)."""
    constant_noise: bool = False
    """The noise does not change from level to level."""

    def __post_init__(self) -> None:
        """Check the options."""
        if self.kind not in ("stratified", "grid", "logit_normal", "power"):
            raise ValueError(
                f"times.kind is {self.kind!r}; it must be 'stratified', 'grid', 'logit_normal' or 'power'."
            )
        if self.power < 0 or (self.power != 1 and self.kind != "power"):
            raise ValueError(
                f"times.power is {self.power} and times.kind {self.kind!r}; it must not be negative, and only acts on "
                "times.kind 'power'."
            )
        if self.count < 1 or not 0 < self.low < self.high < 1:
            raise ValueError("times.count must be at least 1, and 0 < times.low < times.high < 1.")

    @property
    def bounded(self) -> bool:
        """Whether levels are drawn between ``low`` and ``high``."""
        return self.kind in ("stratified", "power")

    def level(self, position: int, draw: float) -> float:
        """Return the level of one of ``count`` equally likely parts of the range, for a draw between 0 and 1."""
        if self.kind == "power":
            exponent = self.power + 1
            low, high = self.low**exponent, self.high**exponent
            return float((low + (high - low) * (position + draw) / self.count) ** (1 / exponent))
        return self.low + (self.high - self.low) * (position + draw) / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviorDecay:
    """How fast the policy that rolls out follows the one that is trained: behavior = d behavior + (1 - d) new.

    d = 0 before ``flat`` epochs, then min(start + rate (epoch - flat), maximum). DiffusionNFT's ``return_decay`` has
    the types 0 (none), 1 (rate 0.001, maximum 0.5) and 2 (flat 75, rate 0.0075, maximum 0.999), counted in its own
    steps, one per epoch; Flow-Factory's CRD has start 0.25, rate 0.005, maximum 0.999.
    """

    flat: int = 0
    rate: float = 0.0
    maximum: float = 0.0
    start: float = 0.0

    def __call__(self, epoch: int) -> float:
        """Return d after an epoch."""
        return 0.0 if epoch < self.flat else min(self.start + self.rate * (epoch - self.flat), self.maximum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What an algorithm needs from rollouts; ``flowmill check`` compares it with the config before any work."""

    kind: str = "diffusion"
    """The kind of policies it trains: a name of the table, or "package.module:Class"."""
    data: Literal["transitions", "forward", "states"] = "transitions"
    """Stored stochastic steps with log-probs, final latents noised anew, or stored states that denoising goes on
    from."""
    times: ForwardTimes | None = None
    """Noise levels, for forward data."""
    unit: Literal["row", "pair", "group"] = "row"
    """What must stay together in a batch: nothing, a group's best and worst sample, or a whole group."""
    min_group_size: int = 1
    """Samples per prompt."""
    reference: bool = False
    """Velocities of the base model."""
    average: bool = False
    """Velocities of the moving average of the weights."""
    guided: bool = True
    """All these velocities have the guidance of rollouts; otherwise none, whatever rollouts have."""
    behavior: bool = False
    """Velocities of the policy the rollouts were made with."""
    decay: BehaviorDecay | None = None
    """Rollouts are made with a policy that follows the trained one slowly; None: with the trained one."""
    old_means: bool = False
    """Stored means of the behavior policy's steps."""
    finals: bool = False
    """Final latents of every sample whose stored steps are trained."""
    same_noise: bool = False
    """Samples of a group that start from one initial noise."""
    densities: bool = False
    """Log-probs that are those of the step's Gaussian, with its scale."""
    advantages: bool = True
    """Rewards enter the loss."""
    gradients: bool = False
    """Stored gradients of the rewards with respect to final latents."""
    rewards: int = 0
    """About how many prompts the rewards themselves are asked of a sample at once, followed back through the decoder
    while training; 0: they are not."""
    calls: int = 1
    """Forwards with gradient that a row takes, one after the other; the state of a row has as many steps after it."""
    once: bool = False
    """Rows are trained on once: the loss has no optimum, so that every further pass moves as far again."""
    notes: tuple[str, ...] = ()
    """What a person should know who trains with it, a sentence or two each; ``flowmill check`` prints them."""
    per_token: bool = False
    """Advantages are of tokens, not of samples."""
    critic: bool = False
    """A critic is trained beside the policy; its values are what advantages are estimated from."""
    normalization: tuple[tuple[str, str], ...] = ()
    """Settings of ``advantage`` that belong to it, as (name, value); others would make it another algorithm."""
    teachers: tuple[tuple[str, str], ...] = ()
    """Folders of other models of the family whose velocities are needed, each with the name of the source of prompts
    that is its own; that of an only one is empty."""
    after: bool = False
    """It has ``after(batch, models)``, which gives (B,) figures of rows once an update is done."""
    routes: bool = False
    """Modalities may have advantages of their own, each of which trains its modality's log-prob."""
    zero_advantages: bool = False
    """Rows with advantage 0 still contribute (a KL term does); otherwise they cost no forward."""

    @property
    def ends(self) -> bool:
        """Whether training takes the end of a chain, or a prediction of it."""
        return self.data != "transitions" or self.finals


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows, parts of samples freely mixed; what else a row holds is its kind's."""

    weighed: ClassVar[bool] = False
    """``importance`` says something of such rows."""

    advantages: Tensor
    """(B,) float32."""
    weights: Tensor
    """(B,) float32: 1, or 0 for rows that only pad the batch to its fixed size."""
    units: Tensor
    """(B,) int64 number of the unit a row belongs to within the batch; padding rows share the last."""
    importance: Tensor
    """(B,) float32 truncated weight of the policy at the epoch's start against the behavior policy; 1 when fresh."""
    count: int
    """Rows that do not only pad; they come first."""
    age: Tensor
    """(B,) int64 epochs since the rollout; on the CPU, as only metrics ask."""
    step: Tensor
    """(B,) int64 which part of its sample a row is: a denoising step, the number of a noise level; on the CPU."""
    keys: tuple[tuple[int, int], ...]
    """(sample, position) of every row, to find what was computed for it before."""


B = TypeVar("B", bound=Batch)


def expect(batch: Batch, kind: type[B]) -> B:
    """Return the batch as the kind an algorithm declared in ``requires.data``.

    Raises:
        TypeError: it is another.
    """
    if not isinstance(batch, kind):
        raise TypeError(f"this algorithm needs a {kind.__name__}, but got a {type(batch).__name__}")
    return batch


@dataclass(slots=True, kw_only=True)
class Models:
    """What an algorithm may ask for; what of the policy it may ask is its kind's."""

    trainable: Trainable
    """The policy being trained."""
    behavior: list[Tensor] = field(default_factory=list)
    """Trained parameters of the policy the rollouts were made with."""
    average: list[Tensor] | None = None
    """Moving average of the trained parameters, if one is kept."""
    on_policy: bool = False
    """True while the trained policy still is the behavior policy."""
    held: bool = False
    """The policy stays as it is in this epoch, while what is trained beside it learns."""
    meter: Meter | None = None
    """Counts backward passes, where somebody wants to know."""
    remembered: dict[tuple[int, int], Tensor] | None = None
    """What the frozen reference makes of rows, where an epoch passes over them more than once; None: not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """A loss per row, averaged by the loop over all rows of an update."""

    loss: Tensor
    """(B,) with gradient."""
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    """(B,) losses of what is trained beside the policy, by part: no parameter is in two of them."""
    metrics: Mapping[str, Tensor]
    """(B,) figures per row without gradient; the loop reports their means.

    ``gap`` is how far a row's behavior policy, as the rollout stored it, is from the policy as it is computed now, in
    the unit of what the loss exponentiates or masks by; ``gap_limit`` of such an algorithm names the option it is
    compared with.
    """


class Algorithm(Protocol):
    """One training objective."""

    @property
    def requires(self) -> Requirements:
        """What it needs."""
        ...

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        """Return the loss of every row."""
        ...
