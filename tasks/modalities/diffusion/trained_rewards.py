"""Calls a run's rewards on latents during training, for scores and gradients.

A reward is a function of one sample, so training needs only its value and its gradient with respect to the latents.
Both are computed together, some rows at a time. The rewards' activations are freed before the policy's backward pass,
and no reward forward is repeated.

Legend: B rows, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.parts import Part
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.differentiable import Differentiable
from flowmill.models.rewards.errors import Origin
from flowmill.models.rewards.factory import needs_of
from flowmill.models.rewards.invocation import declared_needs
from flowmill.tasks.algorithms.diffusion import Question, Subjects
from flowmill.tasks.inputs.components import decode_rows
from flowmill.tasks.inputs.prompts import SOURCE
from flowmill.tasks.modalities.diffusion.reward_gradients import by_frames, check_slopes

if TYPE_CHECKING:
    from flowmill.models.policies.diffusion import DiffusionPolicy
    from flowmill.tasks.runtime.host import ModelHost


def decoded_parts(config: RunConfig) -> frozenset[Part]:
    """Return the model parts that calling a run's rewards needs: the decoder, if one of them reads images."""
    media = {needs_of(section.name, section.options).media for section in config.rewards}
    return frozenset() if media <= {"latents"} else frozenset({Part.VAE})


def rows_at_once(config: RunConfig) -> int:
    """Return the number of rows that are decoded, scored and backpropagated at a time."""
    sizes = [section.batch_size or needs_of(section.name, section.options).batch_size for section in config.rewards]
    return min([decode_rows(config), config.execution.micro_batch_size, *(size for size in sizes if size)])


class TrainingRewards:
    """The rewards of a run, in the training process."""

    def __init__(self, config: RunConfig, host: ModelHost) -> None:
        """Bind to the rewards of a config, each with its weight; they are created on first use."""
        self._config, self._host = config, host
        self._rows = rows_at_once(config)

    def __call__(self, latents: Tensor, subjects: Subjects, questions: Sequence[Question]) -> Tensor:
        """Return (B,) float32 sums of the weighted rewards over all questions, with a gradient to (B, ...) latents."""
        values, slopes = [], []
        for start in range(0, len(latents), self._rows):
            rows = range(start, min(start + self._rows, len(latents)))
            sums, slope = self._followed(latents.detach()[rows.start : rows.stop], subjects, questions, rows)
            values.append(sums)
            slopes.append(slope)
        # This term is 0 and has the gradient of the rewards.
        moved = torch.cat(slopes) * (latents - latents.detach())
        return torch.cat(values) + moved.flatten(1).sum(1)

    def _followed(
        self, finals: Tensor, subjects: Subjects, questions: Sequence[Question], rows: range
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of some rows, and their gradients."""
        with torch.enable_grad():
            latents = finals.float().requires_grad_(True)
            images = None
            if decoded_parts(self._config):
                images = cast("DiffusionPolicy", self._host.decoding()).decode_smoothly(latents)
            total = latents.new_zeros(len(rows))
            for section in self._config.rewards:
                for question in questions:
                    total = total + section.weight * self._scored(section, latents, images, subjects, question, rows)
            # The sum does not depend on latents if no reward scores these rows.
            slopes = torch.zeros_like(latents)
            if total.requires_grad:
                (slopes,) = torch.autograd.grad(total.sum(), latents)
        origin = Origin(samples=[subjects.samples[row] for row in rows])
        prompts = [questions[0].prompts[row] for row in rows]
        check_slopes(slopes, ", ".join(section.slot for section in self._config.rewards), origin, prompts)
        return total.detach(), slopes

    def _scored(
        self,
        section: RewardSection,
        latents: Tensor,
        images: Tensor | None,
        subjects: Subjects,
        question: Question,
        rows: range,
    ) -> Tensor:
        """Return the scores of one reward, times the question's factor; 0 for rows it does not score."""
        places = [
            place
            for place, row in enumerate(rows)
            if not section.sources or subjects.metadata[row].get(SOURCE) in section.sources
        ]
        scores = latents.new_zeros(len(rows))
        if not places or section.weight == 0:
            return scores
        reward = self._host.rewards.of(section)
        media = latents if declared_needs(reward).media == "latents" else images
        assert media is not None
        numbers = [rows[place] for place in places]
        batch = Batch(
            media=latents.detach()[places].cpu().numpy(),
            prompts=[question.prompts[row] for row in numbers],
            metadata=[subjects.metadata[row] for row in numbers],
            origin=Origin(samples=[subjects.samples[row] for row in numbers]),
        )
        with self._host.rewards.at_work(reward):
            values = by_frames(cast(Differentiable, reward), section, media[places], batch)
        factor = question.factor[rows.start : rows.stop][places]
        return scores.index_put(
            (torch.tensor(places, device=scores.device),), factor * values.float().to(scores.device)
        )
