"""Rows of diffusion policies, and the calls to such a policy that an algorithm can make.

Legend: B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from flowmill.models.maths.transitions import Gaussian, Grid, Kernel, expand
from flowmill.tasks.algorithms.base import Batch, Models

if TYPE_CHECKING:
    from flowmill.models.maths.conditioning import Conditioning
    from flowmill.models.policies.diffusion import TrainableDenoiser


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """Inputs of rewards for B rows, besides the latents, if an algorithm calls rewards during training."""

    prompts: tuple[str, ...]
    """B prompts."""
    metadata: tuple[Mapping[str, Any], ...]
    """B mappings with the other columns of the prompt source."""
    samples: tuple[str, ...]
    """B sample ids, for messages."""
    draws: tuple[int, ...]
    """B random 63-bit numbers, one per row, drawn from the run's seed, for random choices of an algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Prompts to score B samples with, and a factor for each score."""

    prompts: Sequence[str]
    """B prompts."""
    factor: Tensor
    """(B,) float32."""


class RewardFunction(Protocol):
    """Computes a run's rewards of latents."""

    def __call__(self, latents: Tensor, subjects: Subjects, questions: Sequence[Question]) -> Tensor:
        """Return (B,) float32 sums of the weighted rewards over all questions, with a gradient to (B, ...) latents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionBatch(Batch):
    """States of denoising, from any mix of steps and samples."""

    latents: Tensor
    """(B, ...) float32 input state of the policy."""
    grid: Grid
    """Noise levels of each row."""
    conditioning: Conditioning
    """B rows."""
    subjects: Subjects | None = None
    """Inputs of rewards for the rows, if the algorithm calls rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch(DiffusionBatch):
    """Stored states of rollouts, from which denoising continues."""

    levels: Tensor
    """(B, K) float32 noise levels of the state and of the states after each of the next K - 1 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch(DiffusionBatch):
    """Stored stochastic steps."""

    weighed: ClassVar[bool] = True

    next_latents: Tensor
    """(B, ...) float32 state after the step."""
    old_log_probs: Tensor
    """(B,) float32 behavior log-probs."""
    mean_std: Tensor
    """(B,) mean noise std over all trained rows of the epoch; steps with more rows count more."""
    mean_rectifier: Tensor
    """(B,) mean of ``transitions.rectifiers`` over the same rows."""
    old_means: Tensor | None = None
    """(B, ...) float32 means of the behavior policy's steps, if stored."""
    unconditional: Tensor | None = None
    """(B, ...) float32 predictions of the current policy for the negative prompt; None if not stored."""
    finals: Tensor | None = None
    """(B, ...) float32 clean latents from which the rows' samples were decoded, if the algorithm compares them."""
    sources: tuple[str, ...] | None = None
    """B names of prompt sources, if each source has its own teacher."""
    own: Tensor | None = None
    """(B,) bool: old log-probs and means are those of the current policy; None: for no row."""

    def anchored(self, step: Gaussian, log_probs: Tensor) -> TransitionBatch:
        """Return the batch with old log-probs and means replaced by the policy's current ones in rows with ``own``.

        In these rows both differ only by the rounding of two forwards with different batch sizes or dtypes. After the
        replacement the ratio is exactly 1 there.

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
class ForwardBatch(DiffusionBatch):
    """Final latents noised to a level: latents = (1 - t) clean + t noise with t = grid.sigma."""

    clean: Tensor
    """(B, ...) float32 clean latents, at level 0, from which the rollout's samples were decoded."""
    noise: Tensor
    """(B, ...) float32 standard normal noise."""
    gradients: Tensor | None = None
    """(B, ...) float32 gradients of the weighted rewards with respect to ``clean``, if the algorithm needs them."""

    @property
    def target(self) -> Tensor:
        """The velocity towards the sample, noise - clean."""
        return self.noise - self.clean


@dataclass(slots=True, kw_only=True)
class DiffusionModels(Models):
    """Velocities of the policy and of the models it is compared with."""

    trainable: TrainableDenoiser
    """The policy being trained."""
    kernel: Kernel
    """The rollout's stochastic step."""
    rewards: RewardFunction | None = None
    """Computes rewards, if the algorithm calls them."""

    def velocity(self, batch: DiffusionBatch) -> Tensor:
        """Return (B, ...) velocities of the policy, with gradient."""
        conditioning = batch.conditioning
        if isinstance(batch, TransitionBatch) and batch.unconditional is not None:
            conditioning = replace(conditioning, unconditional=batch.unconditional)
        return self.trainable.policy.velocity(batch.latents, batch.grid.sigma, conditioning)

    def _computed(self, batch: DiffusionBatch) -> Tensor:
        """Return velocities of the current parameters, without cached predictions."""
        return self.trainable.policy.velocity(batch.latents, batch.grid.sigma, batch.conditioning)

    def reference_velocity(self, batch: DiffusionBatch) -> Tensor:
        """Return (B, ...) velocities of the base model, without gradient; computed once per row and epoch."""
        if self.base is not None:
            with torch.no_grad(), self.trainable.holding(self.base()):
                return self._computed(batch)
        cache = self.remembered
        if cache is not None and all(key in cache for key in batch.keys):
            return torch.stack([cache[key] for key in batch.keys]).to(batch.latents.device)
        velocity = self.trainable.reference_velocity(batch.latents, batch.grid.sigma, batch.conditioning)
        if cache is not None:
            cache.update(zip(batch.keys, velocity.cpu(), strict=True))
        return velocity

    def recall(self, batch: DiffusionBatch) -> None:
        """Cache the rows' velocities of the base model."""
        self.reference_velocity(batch)

    def average_velocity(self, batch: DiffusionBatch) -> Tensor:
        """Return (B, ...) velocities of the current moving average, without gradient.

        Raises:
            RuntimeError: there is no moving average.
        """
        if self.average is None:
            raise RuntimeError("optimize.ema must be set for a comparison with the moving average")
        with torch.no_grad(), self.trainable.holding(self.average):
            return self._computed(batch)

    def behavior_velocity(self, batch: DiffusionBatch, velocity: Tensor) -> Tensor:
        """Return (B, ...) velocities of the behavior policy; before the first update they are the policy's own."""
        if self.on_policy:
            return velocity.detach()
        with torch.no_grad(), self.trainable.holding(self.behavior):
            return self._computed(batch)

    def teacher_velocity(self, batch: DiffusionBatch) -> Tensor:
        """Return (B, ...) velocities of the teacher of each row's prompt, without gradient."""
        rows = (batch.latents, batch.grid.sigma, batch.conditioning)
        sources = batch.sources if isinstance(batch, TransitionBatch) else None
        if sources is None:
            return self.trainable.teacher_velocity(*rows)
        velocities = torch.zeros_like(batch.latents)
        for name in self.trainable.teachers:
            own = torch.tensor([number for number, source in enumerate(sources) if source == name], dtype=torch.int64)
            own = own.to(batch.latents.device)
            if self.trainable.sharded:
                # Ranks in lockstep call every teacher, even without rows for it.
                velocities[own] = self.trainable.teacher_velocity(*rows, name)[own].to(velocities.dtype)
            elif len(own):
                part = (batch.latents[own], batch.grid.sigma[own], batch.conditioning.rows(own))
                velocities[own] = self.trainable.teacher_velocity(*part, name).to(velocities.dtype)
        return velocities

    def rewards_of(self, latents: Tensor, batch: DiffusionBatch, questions: Sequence[Question] | None = None) -> Tensor:
        """Return (B,) rewards of (B, ...) clean latents, with a gradient to them.

        Args:
            latents: predicted end of each row's denoising.
            batch: the rows.
            questions: the prompts to score with; None: the rows' own prompts.

        Raises:
            TypeError: the algorithm does not declare in ``requires`` that it calls rewards.
        """
        subjects = batch.subjects
        if self.rewards is None or subjects is None:
            raise TypeError("this algorithm calls rewards during training, but does not declare it in 'requires'")
        own = [Question(prompts=subjects.prompts, factor=torch.ones_like(batch.weights))]
        return self.rewards(latents, subjects, own if questions is None else questions)

    def step(self, batch: DiffusionBatch, velocity: Tensor) -> Gaussian:
        """Return the distribution of the next latents under a velocity."""
        return self.kernel.step(batch.latents, velocity, batch.grid)
