"""Wan 2.1 and 2.2 image to video (WanImageToVideoPipeline): the first frame is given as further latent channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image

from configs.extras import require_extra
from models.policies.base import Part
from models.policies.clips import clip_noise, first_frames
from models.policies.diffusion import Images
from models.policies.pipeline import Rows
from models.policies.wan import ATTENTION_AND_FFN, Wan

if TYPE_CHECKING:
    from torch import Tensor, nn


class Wan21ImageToVideo(Wan):
    """Adapter for WanImageToVideoPipeline; Wan 2.1 sees the image through CLIP too."""

    pipeline_name = "WanImageToVideoPipeline"
    family = "wan21_i2v"
    text_parts = ("text_encoder", "tokenizer", "image_encoder", "image_processor")
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    lora_targets = ATTENTION_AND_FFN

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds``, ``condition`` (B, 20, f, h, w) and for Wan 2.1 ``image_embeds`` (B, N, D).

        Raises:
            ConfigError: the package this pipeline cleans prompts with is not installed.
        """
        require_extra("video", "ftfy", what=f"model.policy '{self.family}'")
        pipeline, device = self.pipeline, self.settings.device
        started = [Image.fromarray(pixels) for (pixels,) in images or ()]
        found = {**super().encode(prompts), "condition": first_frames(pipeline, self.settings, started)}
        if self._sees_image:
            found["image_embeds"] = torch.cat([pipeline.encode_image(image, device) for image in started])
        return found

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, 16, f, h, w) float32 noise."""
        return clip_noise(self.pipeline, self.settings, generators)

    @property
    def _sees_image(self) -> bool:
        return getattr(self.pipeline.transformer.config, "image_dim", None) is not None

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        seen = rows.get("image_embeds")
        return module(  # type: ignore[no-any-return]
            hidden_states=torch.cat([latents, rows["condition"].to(latents.dtype)], dim=1),
            timestep=sigma * 1000,
            encoder_hidden_states=rows["prompt_embeds"],
            encoder_hidden_states_image=seen,
            return_dict=False,
        )[0]


class Wan22ImageToVideo(Wan21ImageToVideo):
    """Wan 2.2: two transformers, which see the image as latents only."""

    family = "wan22_i2v"
