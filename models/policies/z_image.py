"""Z-Image (ZImagePipeline): a single-stream transformer over lists of images and texts of different lengths.

The guidance scale is one more than in the pipeline, where 0 turns it off, so that 1 is off as in all other families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowmill.models.policies.diffusion import Images
from flowmill.models.policies.pipeline import Modules, PipelinePolicy, Rows, TextOptions
from flowmill.models.policies.tokenization import Reader, as_message


class ZImage(PipelinePolicy):
    """Adapter for ZImagePipeline; latents are (B, 16, h, w)."""

    pipeline_name = "ZImagePipeline"
    family = "z_image"
    options_type = TextOptions
    options: TextOptions
    text_parts = ("text_encoder", "tokenizer")
    readers = (Reader(tokenizer="tokenizer", written=as_message(enable_thinking=True)),)
    blocks = ("noise_refiner", "context_refiner", "layers")
    # Flow-Factory's targets for Z-Image: attention and feed-forwards.
    lora_targets = (
        *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D), padded with zeros, and ``length`` (B,) int64."""
        limit = self.options.max_sequence_length
        rows, _ = self.pipeline.encode_prompt(
            list(prompts), self.settings.device, do_classifier_free_guidance=False, max_sequence_length=limit
        )
        lengths = torch.tensor([len(row) for row in rows], device=rows[0].device, dtype=torch.int64)
        padded = [F.pad(row, (0, 0, 0, limit - len(row))) for row in rows]
        return {"prompt_embeds": torch.stack(padded), "length": lengths}

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the transformer; its time argument runs from 0 (noise) to 1, and it predicts x0 - eps."""
        texts = [row[:length] for row, length in zip(rows["prompt_embeds"], rows["length"].tolist(), strict=True)]
        images = list(latents.unsqueeze(2).unbind(0))
        predicted = modules["transformer"](images, (1000 - sigma * 1000) / 1000, texts, return_dict=False)[0]
        return -torch.stack([image.float() for image in predicted]).squeeze(2)

    def guide(self, negative: Tensor, positive: Tensor, sigma: Tensor, latents: Tensor) -> Tensor:
        """Return positive + (scale - 1) (positive - negative); the pipeline's guidance scale is scale - 1."""
        return positive + (self.settings.guidance_scale - 1) * (positive - negative)

    def more_arguments(self, steps: int) -> dict[str, Any]:
        return {self.guidance_argument: max(0.0, self.settings.guidance_scale - 1)}
