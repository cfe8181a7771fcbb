"""Wan 2.2 TI2V-5B image to video (WanImageToVideoPipeline with ``expand_timesteps``).

The first latent frame is that of the image and stays fixed: its tokens have time 0, all others the time of the step.
Chains hold only the other frames, so that noise, log-probs, KL and losses are means over the generated frames; the
first frame would only add terms that do not depend on the weights. It is prepended for model calls and decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from PIL import Image

from configs.errors import ConfigError
from configs.extras import require_extra
from models.maths.conditioning import Conditioning
from models.policies.clips import clip_noise, frames_at_ends
from models.policies.diffusion import DiffusionSettings, Images
from models.policies.parts import Part
from models.policies.pipeline import Rows
from models.policies.wan import ATTENTION_AND_FFN
from models.policies.wan_ti2v import Wan22TI2V

if TYPE_CHECKING:
    from torch import Tensor, nn


class Wan22TI2VImage(Wan22TI2V):
    """Adapter for WanImageToVideoPipeline with a time input per token; latents are (B, 48, f - 1, h, w)."""

    pipeline_name = "WanImageToVideoPipeline"
    # The published folder names the text-to-video pipeline.
    folders_of: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    family = "wan22_ti2v_i2v"
    text_parts = ("text_encoder", "tokenizer", "image_encoder", "image_processor")
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    lora_targets = ATTENTION_AND_FFN

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D) and ``condition`` (B, 48, 1, h, w), the image's latents.

        Raises:
            ConfigError: the package this pipeline cleans prompts with is not installed.
        """
        require_extra("video", "ftfy", label=f"model.policy '{self.family}'")
        started = [[Image.fromarray(pixels)] for (pixels,) in images or ()]
        return {**super().encode(prompts), "condition": frames_at_ends(self.pipeline, self.settings, started)}

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, 48, f - 1, h, w) float32 noise: drawn for all frames, as in the pipeline, without the first."""
        return clip_noise(self.pipeline, self.settings, generators)[:, :, 1:].contiguous()

    def finished(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Return (B, 48, f, h, w): the image's latents, followed by those of the generated frames."""
        first = conditioning.positive["condition"].to(latents.device, latents.dtype)
        return torch.cat([first, latents], dim=2)

    def decode_smoothly(self, latents: Tensor) -> Tensor:
        """Raise ConfigError: gradients are taken from latents alone, which lack the first frame."""
        raise ConfigError(
            f"model.policy '{self.family}': clips are decoded with the image they start from, which the decoding for "
            "reward gradients does not get. Choose an optimize.algorithm that needs no gradients."
        )

    @classmethod
    def check_size(cls, folder: Path | None, settings: DiffusionSettings, *, unit: int | None = None) -> None:
        """Check height, width and the number of frames, of which at least one must be generated.

        Raises:
            ConfigError: the model cannot make such clips.
        """
        super().check_size(folder, settings, unit=unit)
        if settings.frames == 1:
            raise ConfigError(
                f"model.frames is 1, but the first frame of model.policy '{cls.family}' is the image, and nothing is "
                "left to make. Set it to 5 or more."
            )

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        batch, _, moving, height, width = latents.shape
        tokens = ((height + 1) // 2) * ((width + 1) // 2)
        times = (sigma * 1000)[:, None].expand(-1, moving * tokens)
        predicted: Tensor = module(
            hidden_states=torch.cat([rows["condition"].to(latents.dtype), latents], dim=2),
            timestep=torch.cat([times.new_zeros(batch, tokens), times], dim=1),
            encoder_hidden_states=rows["prompt_embeds"],
            return_dict=False,
        )[0]
        return predicted[:, :, 1:]
