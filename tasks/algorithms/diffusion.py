"""Rows of diffusion policies, and what an algorithm may ask of such a policy.

Legend: B rows of a micro-batch, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from models.maths.transitions import expand
from tasks.algorithms.base import Batch, Models

if TYPE_CHECKING:
    from torch import Tensor

    from models.maths.conditioning import Conditioning
    from models.maths.transitions import Gaussian, Grid, Kernel
    from models.policies.diffusion import TrainableDenoiser


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """What rewards are told of B rows, where they are asked while training."""

    prompts: tuple[str, ...]
    """B prompts."""
    metadata: tuple[Mapping[str, Any], ...]
    """B mappings with the other columns of the prompt source."""
    samples: tuple[str, ...]
    """B sample ids, for messages."""
    draws: tuple[int, ...]
    """B numbers of the rows' own, of 63 bits, drawn from the run's seed: for what an algorithm chooses by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Prompts that B samples are scored for, each with a factor of its score."""

    prompts: Sequence[str]
    """B prompts."""
    factor: Tensor
    """(B,) float32."""


class AsksRewards(Protocol):
    """Asks a run's rewards what they say of latents."""

    def __call__(self, latents: Tensor, subjects: Subjects, questions: Sequence[Question]) -> Tensor:
        """Return (B,) float32 sums of the weighted rewards over all questions, with a gradient to (B, ...) latents."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionBatch(Batch):
    """States of denoising, steps and samples freely mixed."""

    latents: Tensor
    """(B, ...) float32 state the policy is asked about."""
    grid: Grid
    """Noise levels of each row."""
    conditioning: Conditioning
    """B rows."""
    subjects: Subjects | None = None
    """What rewards are told of the rows, if the algorithm asks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch(DiffusionBatch):
    """Stored states of rollouts, from which denoising goes on."""

    levels: Tensor
    """(B, K) float32 noise levels of the state, and of those that the next K - 1 steps of its schedule lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What belongs to each of M modalities of B rows."""

    advantages: Tensor
    """(B, M) float32."""
    old_log_probs: Tensor
    """(B, M) float32 behavior log-probs, each the mean over its modality's latents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch(DiffusionBatch):
    """Stored stochastic steps."""

    weighed: ClassVar[bool] = True

    next_latents: Tensor
    """(B, ...) float32 state after the step."""
    old_log_probs: Tensor
    """(B,) float32 behavior log-probs."""
    mean_std: Tensor
    """(B,) mean noise std over all rows of the epoch that are trained; steps with more rows count more."""
    mean_rectifier: Tensor
    """(B,) mean of ``transitions.rectifiers`` over the same rows."""
    old_means: Tensor | None = None
    """(B, ...) float32 means of the behavior policy's steps, if stored."""
    unconditional: Tensor | None = None
    """(B, ...) float32 predictions for the negative prompt of the policy as it is now, if they are known."""
    finals: Tensor | None = None
    """(B, ...) float32 clean latents that the rows' samples were decoded as, if the algorithm compares them."""
    sources: tuple[str, ...] | None = None
    """B names of sources of prompts, where each has a teacher of its own."""
    own: Tensor | None = None
    """(B,) bool: old log-probs and means are those of the policy as it is now; None: of no row."""
    routed: Routed | None = None
    """What belongs to each modality, where rewards name the one they judge."""

    def apart(self, step: Gaussian, sizes: Sequence[int]) -> list[tuple[TransitionBatch, Gaussian]]:
        """Return the rows of each modality and the policy's distribution of them, as if there were no other.

        Args:
            step: the policy's distribution of the next latents.
            sizes: how much of the first latent dim each modality takes.
        """
        if self.routed is None:
            return [(self, step)]
        cut = partial(torch.split, split_size_or_sections=list(sizes), dim=1)
        means = [None] * len(sizes) if self.old_means is None else cut(self.old_means)
        rows = zip(
            *(cut(self.latents), cut(self.next_latents), means),
            *(self.routed.advantages.unbind(1), self.routed.old_log_probs.unbind(1)),
            strict=True,
        )
        parts = [
            replace(
                self,
                latents=latents,
                next_latents=following,
                old_means=mean,
                advantages=advantages,
                old_log_probs=log_probs,
                routed=None,
            )
            for latents, following, mean, advantages, log_probs in rows
        ]
        return list(zip(parts, step.apart(sizes), strict=True))

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
class ForwardBatch(DiffusionBatch):
    """Final latents noised to a level: latents = (1 - t) clean + t noise with t = grid.sigma."""

    clean: Tensor
    """(B, ...) float32 clean latents, at level 0, that the rollout's samples were decoded as."""
    noise: Tensor
    """(B, ...) float32 standard normal noise."""
    gradients: Tensor | None = None
    """(B, ...) float32 gradients of the weighted rewards with respect to ``clean``, if the algorithm needs them."""

    @property
    def target(self) -> Tensor:
        """The velocity that leads back to the sample, noise - clean."""
        return self.noise - self.clean


@dataclass(slots=True, kw_only=True)
class DiffusionModels(Models):
    """Velocities of the policy, and of what it is compared with."""

    trainable: TrainableDenoiser
    """The policy being trained."""
    kernel: Kernel
    """The rollout's stochastic step."""
    rewards: AsksRewards | None = None
    """Asks the rewards, if the algorithm does."""

    def velocity(self, batch: DiffusionBatch) -> Tensor:
        """Return (B, ...) velocities of the policy, with gradient."""
        conditioning = batch.conditioning
        if isinstance(batch, TransitionBatch) and batch.unconditional is not None:
            conditioning = replace(conditioning, unconditional=batch.unconditional)
        return self.trainable.policy.velocity(batch.latents, batch.grid.sigma, conditioning)

    def modalities(self) -> Sequence[int]:
        """Return how much of the first latent dim each modality takes; nothing where samples have one."""
        return list(self.trainable.policy.modalities().values())

    def _computed(self, batch: DiffusionBatch) -> Tensor:
        """Return velocities of whatever the parameters are now, nothing of which is known."""
        return self.trainable.policy.velocity(batch.latents, batch.grid.sigma, batch.conditioning)

    def reference_velocity(self, batch: DiffusionBatch) -> Tensor:
        """Return (B, ...) velocities of the base model, without gradient; computed once per row and epoch."""
        known = self.remembered
        if known is not None and all(key in known for key in batch.keys):
            return torch.stack([known[key] for key in batch.keys]).to(batch.latents.device)
        velocity = self.trainable.reference_velocity(batch.latents, batch.grid.sigma, batch.conditioning)
        if known is not None:
            known.update(zip(batch.keys, velocity.cpu(), strict=True))
        return velocity

    def average_velocity(self, batch: DiffusionBatch) -> Tensor:
        """Return (B, ...) velocities of the moving average as it is now, without gradient.

        Raises:
            RuntimeError: none is kept.
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
        found = torch.zeros_like(batch.latents)
        for name in self.trainable.teachers:
            own = torch.tensor([number for number, source in enumerate(sources) if source == name], dtype=torch.int64)
            own = own.to(batch.latents.device)
            if self.trainable.sharded:
                # Ranks that compute in step ask every teacher, whatever rows they have.
                found[own] = self.trainable.teacher_velocity(*rows, name)[own].to(found.dtype)
            elif len(own):
                part = (batch.latents[own], batch.grid.sigma[own], batch.conditioning.rows(own))
                found[own] = self.trainable.teacher_velocity(*part, name).to(found.dtype)
        return found

    def asked(self, latents: Tensor, batch: DiffusionBatch, questions: Sequence[Question] | None = None) -> Tensor:
        """Return (B,) rewards of (B, ...) clean latents, with a gradient to them.

        Args:
            latents: what a row's denoising is taken to end in.
            batch: the rows.
            questions: what else than the rows' own prompts they are scored for.

        Raises:
            TypeError: the algorithm has not said in ``requires`` that it asks rewards.
        """
        subjects = batch.subjects
        if self.rewards is None or subjects is None:
            raise TypeError("this algorithm asks rewards while training, but has not said so in 'requires'")
        own = [Question(prompts=subjects.prompts, factor=torch.ones_like(batch.weights))]
        return self.rewards(latents, subjects, own if questions is None else questions)

    def step(self, batch: DiffusionBatch, velocity: Tensor) -> Gaussian:
        """Return the distribution of the next latents under a velocity."""
        return self.kernel.step(batch.latents, velocity, batch.grid)
