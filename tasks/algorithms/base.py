"""What an algorithm declares and computes. The training loop knows no algorithm by name.

Legend: B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from models.transitions import expand

if TYPE_CHECKING:
    from torch import Tensor

    from models.adapters import Trainable
    from models.meter import Meter
    from models.policies.base import Conditioning
    from models.transitions import Gaussian, Grid, Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTimes:
    """Noise levels at which a forward-process algorithm looks at each sample."""

    count: int = 4
    """Levels per sample and epoch."""
    kind: Literal["stratified", "grid", "logit_normal"] = "stratified"
    """One draw per equal part of the range; the sampler's own levels in a drawn order; sigmoid of a normal draw."""
    low: float = 0.02
    """Smallest level, for 'stratified'."""
    high: float = 0.98
    """Largest level, for 'stratified'."""
    shared: bool = False
    """All samples of a group see the same levels and noise (algorithms that compare them do)."""
    constant_noise: bool = False
    """The noise does not change from level to level."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ValueError: one cannot work.
        """
        if self.kind not in ("stratified", "grid", "logit_normal"):
            raise ValueError(f"times.kind is {self.kind!r}; it must be 'stratified', 'grid' or 'logit_normal'.")
        if self.count < 1 or not 0 < self.low < self.high < 1:
            raise ValueError("times.count must be at least 1, and 0 < times.low < times.high < 1.")


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

    data: Literal["transitions", "forward"] = "transitions"
    """Stored stochastic steps with log-probs, or final latents noised anew."""
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
    behavior: bool = False
    """Velocities of the policy the rollouts were made with."""
    decay: BehaviorDecay | None = None
    """Rollouts are made with a policy that follows the trained one slowly; None: with the trained one."""
    old_means: bool = False
    """Stored means of the behavior policy's steps."""
    densities: bool = False
    """Log-probs that are those of the step's Gaussian, with its scale."""
    advantages: bool = True
    """Rewards enter the loss."""
    teacher: str | None = None
    """Folder of another model of the family whose velocities are needed."""
    zero_advantages: bool = False
    """Rows with advantage 0 still contribute (a KL term does); otherwise they cost no forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows, steps and samples freely mixed."""

    latents: Tensor
    """(B, ...) float32 state the policy is asked about."""
    grid: Grid
    """Noise levels of each row."""
    advantages: Tensor
    """(B,) float32."""
    conditioning: Conditioning
    """B rows."""
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
    """(B,) int64 denoising step, or number of the noise level; on the CPU."""
    keys: tuple[tuple[int, int], ...]
    """(sample, position) of every row, to find what was computed for it before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch(Batch):
    """Stored stochastic steps."""

    next_latents: Tensor
    """(B, ...) float32 state after the step."""
    old_log_probs: Tensor
    """(B,) float32 behavior log-probs."""
    mean_std: Tensor
    """(B,) mean noise std over all rows of the epoch that are trained; steps with more rows count more."""
    old_means: Tensor | None = None
    """(B, ...) float32 means of the behavior policy's steps, if stored."""
    unconditional: Tensor | None = None
    """(B, ...) float32 predictions for the negative prompt of the policy as it is now, if they are known."""
    own: Tensor | None = None
    """(B,) bool: old log-probs and means are those of the policy as it is now; None: of no row."""

    def anchored(self, step: Gaussian, log_probs: Tensor) -> TransitionBatch:
        """Return the batch with the policy's own log-probs and means as the old ones, where those are its own.

        Before the first update they are equal but for the rounding between two forwards, of other sizes or in other
        dtypes, which no ratio should be made of: it is exactly 1 there.

        Args:
            step: the policy's distribution of the next latents.
            log_probs: (B,) log-probs under it.
        """
        if self.own is None:
            return self
        means, mean = self.old_means, step.mean.detach()
        return replace(
            self,
            old_log_probs=torch.where(self.own, log_probs.detach(), self.old_log_probs),
            old_means=None if means is None else torch.where(expand(self.own, means), mean, means),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(Batch):
    """Final latents noised to a level: latents = (1 - t) clean + t noise with t = grid.sigma."""

    clean: Tensor
    """(B, ...) float32 final latents of the rollout."""
    noise: Tensor
    """(B, ...) float32 standard normal noise."""

    @property
    def target(self) -> Tensor:
        """The velocity that leads back to the sample, noise - clean."""
        return self.noise - self.clean


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
    """What an algorithm may ask for."""

    trainable: Trainable
    """The policy being trained."""
    kernel: Kernel
    """The rollout's stochastic step."""
    behavior: list[Tensor] = field(default_factory=list)
    """Trained parameters of the policy the rollouts were made with."""
    average: list[Tensor] | None = None
    """Moving average of the trained parameters, if one is kept."""
    on_policy: bool = False
    """True while the trained policy still is the behavior policy."""
    meter: Meter | None = None
    """Counts backward passes, where somebody wants to know."""
    remembered: dict[tuple[int, int], Tensor] | None = None
    """Reference velocities by row, where an epoch passes over its rows more than once; None: not kept."""

    def velocity(self, batch: Batch) -> Tensor:
        """Return (B, ...) velocities of the policy, with gradient."""
        conditioning = batch.conditioning
        if isinstance(batch, TransitionBatch) and batch.unconditional is not None:
            conditioning = replace(conditioning, unconditional=batch.unconditional)
        return self.trainable.policy.velocity(batch.latents, batch.grid.sigma, conditioning)

    def _computed(self, batch: Batch) -> Tensor:
        """Return velocities of whatever the parameters are now, nothing of which is known."""
        return self.trainable.policy.velocity(batch.latents, batch.grid.sigma, batch.conditioning)

    def reference_velocity(self, batch: Batch) -> Tensor:
        """Return (B, ...) velocities of the base model, without gradient; computed once per row and epoch."""
        known = self.remembered
        if known is not None and all(key in known for key in batch.keys):
            return torch.stack([known[key] for key in batch.keys]).to(batch.latents.device)
        velocity = self.trainable.reference_velocity(batch.latents, batch.grid.sigma, batch.conditioning)
        if known is not None:
            known.update(zip(batch.keys, velocity.cpu(), strict=True))
        return velocity

    def average_velocity(self, batch: Batch) -> Tensor:
        """Return (B, ...) velocities of the moving average as it is now, without gradient.

        Raises:
            RuntimeError: none is kept.
        """
        if self.average is None:
            raise RuntimeError("optimize.ema must be set for a comparison with the moving average")
        with torch.no_grad(), self.trainable.holding(self.average):
            return self._computed(batch)

    def behavior_velocity(self, batch: Batch, velocity: Tensor) -> Tensor:
        """Return (B, ...) velocities of the behavior policy; before the first update they are the policy's own."""
        if self.on_policy:
            return velocity.detach()
        with torch.no_grad(), self.trainable.holding(self.behavior):
            return self._computed(batch)

    def teacher_velocity(self, batch: Batch) -> Tensor:
        """Return (B, ...) velocities of the teacher, without gradient."""
        return self.trainable.teacher_velocity(batch.latents, batch.grid.sigma, batch.conditioning)

    def step(self, batch: Batch, velocity: Tensor) -> Gaussian:
        """Return the distribution of the next latents under a velocity."""
        return self.kernel.step(batch.latents, velocity, batch.grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """A loss per row, averaged by the loop over all rows of an update."""

    loss: Tensor
    """(B,) with gradient."""
    metrics: Mapping[str, Tensor]
    """(B,) figures per row without gradient; the loop reports their means."""


class Algorithm(Protocol):
    """One training objective."""

    @property
    def requires(self) -> Requirements:
        """What it needs."""
        ...

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        """Return the loss of every row."""
        ...
