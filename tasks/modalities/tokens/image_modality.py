"""The kind of images from tokens: trained as texts, stored, scored and shown as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from configs.errors import ConfigError
from configs.rewards import RewardSection
from configs.schema import RunConfig
from models.devices import moved
from models.maths.generation import Completion
from models.policies.janus import Janus
from models.rewards.base import Batch as Scored
from models.rewards.base import Needs
from storage.trajectories.base import TrajectoryShard
from tasks.algorithms.base import Requirements
from tasks.inputs.components import decode_rows
from tasks.metrics.image_grids import write_grid
from tasks.modalities.forward_cost import Cost
from tasks.modalities.media import check_scored, decode_in_slices, trial_media
from tasks.modalities.modality import ExportRequest
from tasks.modalities.samplers import Sampler, SamplingContext
from tasks.modalities.tokens.checks import cost_of_tokens
from tasks.modalities.tokens.image_checks import check_image, check_image_tokens, with_guidance
from tasks.modalities.tokens.image_exporting import ImageTokenExport
from tasks.modalities.tokens.modality import Tokens
from tasks.modalities.tokens.text_sampling import TextSampler, evaluation_maker, rollout_maker


class ImageTokenSampler(TextSampler):
    """Draws the tokens of images with a policy; all have the same number."""

    def load(self) -> None:
        """Load the policy, and check the size of its images."""
        super().load()
        check_image(self._making.config, self._held().policy.model.config)

    def _contents(self, found: Sequence[Completion]) -> list[dict[str, Any]]:
        policy = cast(Janus, self._held().policy)
        ids = moved(torch.tensor([each.ids for each in found]), self._host.device)
        images = decode_in_slices(policy, policy.decode, ids, decode_rows(self._making.config)).numpy()
        return [{"media": image} for image in images]


class ImageTokens(Tokens):
    """Models that draw images token by token."""

    trained_as = "tokens"
    writes = False
    saves_memory = ("Lower execution.rollout_batch_size, or execution.decode_batch_size if it failed while decoding.",)

    def check(self, config: RunConfig, requires: Requirements) -> None:
        """Check the settings of tokens and of images."""
        check_image_tokens(config, requires)

    def cost(self, config: RunConfig, requires: Requirements, prompts: Mapping[str, int]) -> Cost:
        """Count rows."""
        return with_guidance(cost_of_tokens(config, requires, prompts), config)

    def rollout(self, making: SamplingContext) -> Sampler:
        """Return the sampler of images, with a seed per token."""
        return rollout_maker(making, ImageTokenSampler)

    def evaluation(self, making: SamplingContext) -> Sampler:
        """Return the sampler of the likeliest images, or of draws with fixed seeds."""
        return evaluation_maker(making, ImageTokenSampler)

    def check_scored(self, section: RewardSection, needs: Needs, config: RunConfig) -> None:
        """Check that the reward scores images."""
        if needs.media == "latents":
            raise ConfigError(
                f"rewards: '{section.slot}' scores latents, which images of tokens do not have. Choose one of images."
            )
        check_scored(section, needs, config)

    def trial(self, config: RunConfig) -> np.ndarray:
        """Return noise of the configured size."""
        return trial_media(config)

    def scored(self, shard: TrajectoryShard, needs: Needs, recent: Sequence[np.ndarray] | None) -> np.ndarray:
        """Return images."""
        return np.stack(recent or [shard.media(row) for row in range(shard.table.num_rows)])

    def show(self, folder: Path, batch: Scored, verdicts: Sequence[str], texts: Sequence[str] | None = None) -> None:
        """Draw the first images with prompt and verdict."""
        write_grid(folder, batch.media, batch.prompts, verdicts)

    def export(self, exporting: ExportRequest, folder: Path) -> None:
        """Write a model folder or an adapter."""
        ImageTokenExport(exporting).write(folder)
