"""Stable Diffusion 1.x and 2.x (StableDiffusionPipeline with DDIM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowmill.models.policies.ddim import UNetPolicy
from flowmill.models.policies.diffusion import Images
from flowmill.models.policies.pipeline import Rows
from flowmill.models.policies.pipeline_configs import Fields
from flowmill.models.policies.tokenization import CLIP_LIMIT, Reader


class SD15(UNetPolicy):
    """Adapter for StableDiffusionPipeline; latents are (B, 4, h, w)."""

    pipeline_name = "StableDiffusionPipeline"
    family = "sd15"
    text_parts = ("text_encoder", "tokenizer")
    unused_parts = ("image_encoder", "feature_extractor", "safety_checker")
    readers = (Reader(tokenizer="tokenizer", limit=CLIP_LIMIT),)
    # The safety checker is not loaded.
    settings_read = Fields(moot=frozenset({"requires_safety_checker"}))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, 77, D)."""
        embeds, _ = self.pipeline.encode_prompt(list(prompts), self.settings.device, 1, False)
        return {"prompt_embeds": embeds}

    def conditions(self, rows: Rows, noisy: Tensor) -> dict[str, Any]:
        return {"encoder_hidden_states": rows["prompt_embeds"]}
