"""Qwen-Image 2.1 (QwenImage21Pipeline): text and image in one causal sequence, with text modulated at noise level 0.

The image follows its text, so padding would shift it: rows are computed one by one, without padding. The pipeline
caches the text's keys and values after the first step, which rounds differently; here every call computes them, as
training requires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from configs.errors import ConfigError
from models.policies.diffusion import PipelineCall
from models.policies.parts import Part
from models.policies.pipeline import Modules, PipelinePolicy, Rows, TextOptions, padded_text

if TYPE_CHECKING:
    from torch import Tensor


class QwenImage21(PipelinePolicy):
    """Adapter for QwenImage21Pipeline; latents are packed, (B, tokens, 64)."""

    pipeline_name = "QwenImage21Pipeline"
    family = "qwen_image21"
    options_type: ClassVar[type[Any]] = TextOptions
    text_parts = ("text_encoder", "processor")
    guidance_argument = "true_cfg_scale"
    missing_arguments = frozenset({"max_sequence_length"})
    takes_images = True
    one_by_one = True
    asks_layout = True
    size_unit = 32
    blocks = ("transformer_blocks",)
    # Attention and feed-forward of every block.
    lora_targets = tuple(
        "attn.to_q attn.to_k attn.to_v attn.to_out.0 img_mlp.proj img_mlp.gate_layer img_mlp.out".split()
    )

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        """Return the processor, or a stand-in if no text is read: creating the pipeline requires one."""
        from models.policies.dummy_components import TextProcessor, Unread

        return {"processor": TextProcessor.load(folder / "processor") if Part.TEXT in parts else Unread()}

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``text_length`` (1,) int64, the tokens it has. Raises ConfigError if a
        prompt has more tokens than ``max_sequence_length``; the pipeline does not truncate."""
        embeds, _, _ = self.pipeline.encode_prompt([prompt], device=self.settings.device)
        tokens, most = embeds.shape[1], self.options.max_sequence_length
        if tokens > most:
            raise ConfigError(
                f"model.options.max_sequence_length is {most}, but prompt {prompt!r} has {tokens} tokens, those of "
                "its template among them, and the pipeline reads all. Raise it, or shorten the prompt."
            )
        return padded_text(embeds, most)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        length, tokens = int(rows["text_length"]), latents.shape[1]
        # One image position in the text represents four image tokens.
        places = torch.arange(length + tokens // 4, device=latents.device) >= length
        predicted: Tensor = modules["transformer"](
            hidden_states=latents,
            # The pipeline rounds the timestep to the latents' dtype, coarsely in bfloat16.
            timestep=(sigma * 1000).to(latents.dtype) / 1000,
            encoder_hidden_states=rows["prompt_embeds"][:, :length],
            img_shapes=[[(1, *self.grid())]],
            img_mask=places[None],
            return_dict=False,
        )[0]
        return predicted[:, -tokens:]

    def decoded(self, latents: Tensor) -> Tensor:
        """Return decoded latents without the fourth channel, transparency."""
        settings, vae = self.settings, self.pipeline.vae
        size = (settings.height, settings.width, self.pipeline.vae_scale_factor)
        spatial = self.pipeline._unpack_latents(latents, *size).to(vae.dtype)
        mean, std = self._moments(spatial)
        images: Tensor = vae.decode(spatial * std + mean, return_dict=False)[0]
        return images[:, :3, 0]

    def encoded(self, media: Tensor) -> Tensor:
        """Return packed latents of opaque images."""
        latents = self.likeliest(torch.cat([media, torch.ones_like(media[:, :1])], dim=1)[:, :, None])
        mean, std = self._moments(latents)
        spatial = (latents - mean) / std
        return self.pipeline._pack_latents(spatial, *spatial[:, :, 0].shape)  # type: ignore[no-any-return]

    def _moments(self, like: Tensor) -> Tensor:
        config = self.pipeline.vae.config
        return self.table(like.device, _moments, *config.latents_mean, *config.latents_std).to(like)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it reads whole texts, and its images have a fourth channel."""
        call = super().pipeline_call(steps, negative_prompt)
        note = "Its images have a channel of transparency, which the run leaves away, as image.convert('RGB') does."
        return replace(call, differences=(*call.differences, note))

    def more_arguments(self, steps: int) -> dict[str, Any]:
        """Turn off the cache of the text's keys and values."""
        return {"use_kv_cache": False}

    def token_width(self) -> int:
        return int(self.pipeline.vae_scale_factor)


def _moments(*values: float) -> Tensor:
    """Return means and stds of C channels, (2, 1, C, 1, 1, 1) float32, of C means and C stds."""
    return torch.tensor(values).view(2, 1, -1, 1, 1, 1)
