"""Qwen-Image 2.1 (QwenImage21Pipeline): text and image in one causal sequence, with text modulated at noise level 0.

With ``references`` it edits or combines images: each stands in the text, as vision tokens for the encoder and as
latents for the transformer, four for each vision token. The generated image follows its text, so padding would shift
it: rows are computed one by one, without padding. The pipeline caches the text's keys and values after the first step,
which rounds differently; here every call computes them, as training requires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.option_types import Area
from flowmill.models.policies.diffusion import PipelineCall
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import Modules, PipelinePolicy, Rows, padded_text
from flowmill.models.policies.reference_images import (
    check_references,
    check_shape,
    grids_of,
    padded,
    room_of,
    tokens_of,
)

#: Sides of images are rounded to multiples of 32 pixels, so that each may grow by half of that.
_ROUNDING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImage21Options:
    """Options of the family."""

    max_sequence_length: PositiveInt = 512
    """Maximum tokens of text, and the stored length of all rows of it; an image has one for 32 x 32 of its pixels."""
    references: NonNegativeInt = 0
    """Maximum number of images per prompt, which the model edits or combines; 0: text to image."""
    reference_area: Area = 1024 * 1024
    """Pixels to which each image is scaled, keeping its aspect ratio."""


class QwenImage21(PipelinePolicy):
    """Adapter for QwenImage21Pipeline; latents are packed, (B, tokens, 64)."""

    pipeline_name = "QwenImage21Pipeline"
    family = "qwen_image21"
    options_type = QwenImage21Options
    options: QwenImage21Options
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
        from flowmill.models.policies.dummy_components import TextImageProcessor, Unread

        return {"processor": TextImageProcessor.load(folder / "processor") if Part.TEXT in parts else Unread()}

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``text_length`` (1,) int64, the tokens it has; with images, the tokens
        of ``padded`` and ``image_place_1`` to ``image_place_R``, (1,) int64 each, where they begin in the text. Raises
        ConfigError if a prompt has more tokens than ``max_sequence_length``, as the pipeline does not truncate, comes
        with more images than ``references``, or one is too narrow."""
        pictures, most = [Image.fromarray(pixels).convert("RGBA") for pixels in images], self.options.references
        sizes, seen = [self._size(picture, prompt) for picture in pictures], None
        if most:
            check_references(len(pictures), most, prompt)
            scale = self.pipeline.image_processor.resize
            seen = [scale(picture, *size) for picture, size in zip(pictures, sizes, strict=True)]
        embeds, _, marked = self.pipeline.encode_prompt([prompt], image=seen, device=self.settings.device)
        tokens, longest = embeds.shape[1], self.options.max_sequence_length
        if tokens > longest:
            raise ConfigError(
                f"model.options.max_sequence_length is {longest}, but prompt {prompt!r} has {tokens} tokens, those of "
                "its template and images among them, and the pipeline reads all. Raise it, or shorten the prompt."
            )
        text = padded_text(embeds, longest)
        if not most:
            return text
        unit, area = self.token_width(), self.options.reference_area
        latents = [self._latents_of(picture, *size) for picture, size in zip(pictures, sizes, strict=True)]
        grids = [(height // unit, width // unit) for height, width in sizes]
        positions, before = marked[0].nonzero()[:, 0], [math.prod(grid) // 4 for grid in grids]
        begins = [int(positions[number]) for number in accumulate([0, *before[:-1]])] + [0] * (most - len(grids))
        places = {f"image_place_{n}": torch.tensor([at], device=embeds.device) for n, at in enumerate(begins, 1)}
        return {**text, **places, **padded(latents, grids, most=most, room=room_of(area, unit, round_up=_ROUNDING))}

    def _size(self, picture: Image.Image, prompt: str) -> tuple[int, int]:
        """Return height and width of an image scaled to the area, as the pipeline rounds them."""
        from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions

        check_shape(picture, prompt, least=1)
        width, height, _ = calculate_dimensions(self.options.reference_area, picture.width / picture.height)
        return height, width

    def _latents_of(self, picture: Image.Image, height: int, width: int) -> Tensor:
        """Return the (1, N, C) tokens of an image scaled to a size."""
        pipeline = self.pipeline
        unit = pipeline.image_processor.preprocess(picture, height, width).unsqueeze(2)
        latents = pipeline._encode_vae_image(unit.to(self.settings.device, pipeline.vae.dtype), None)
        return pipeline._pack_latents(latents, *latents[:, :, 0].shape)  # type: ignore[no-any-return]

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        length, tokens = int(rows["text_length"]), latents.shape[1]
        grids = grids_of(rows)
        at = torch.arange(length + tokens // 4, device=latents.device)
        # One image position in the text represents four image tokens.
        places = at >= length
        for number, grid in enumerate(grids, 1):
            begin = int(rows[f"image_place_{number}"])
            places = places | ((at >= begin) & (at < begin + math.prod(grid) // 4))
        predicted: Tensor = modules["transformer"](
            hidden_states=torch.cat([tokens_of(rows).to(latents.dtype), latents], dim=1) if grids else latents,
            # The pipeline rounds the timestep to the latents' dtype, coarsely in bfloat16.
            timestep=(sigma * 1000).to(latents.dtype) / 1000,
            encoder_hidden_states=rows["prompt_embeds"][:, :length],
            img_shapes=[[(1, *grid) for grid in (*grids, self.grid())]],
            img_mask=places[None],
            return_dict=False,
        )[0]
        return predicted[:, -tokens:]

    def decoded(self, latents: Tensor) -> Tensor:
        settings, vae = self.settings, self.pipeline.vae
        size = (settings.height, settings.width, self.pipeline.vae_scale_factor)
        spatial = self.pipeline._unpack_latents(latents, *size).to(vae.dtype)
        mean, std = self._moments(spatial)
        images: Tensor = vae.decode(spatial * std + mean, return_dict=False)[0]
        return images[:, :3, 0]

    def encoded(self, media: Tensor) -> Tensor:
        latents = self.likeliest(torch.cat([media, torch.ones_like(media[:, :1])], dim=1)[:, :, None])
        mean, std = self._moments(latents)
        spatial = (latents - mean) / std
        return self.pipeline._pack_latents(spatial, *spatial[:, :, 0].shape)  # type: ignore[no-any-return]

    def _moments(self, like: Tensor) -> Tensor:
        config = self.pipeline.vae.config
        return self.table(like.device, _moments, *config.latents_mean, *config.latents_std).to(like)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it reads whole texts, its images have a fourth channel, and it scales images
        to squares of whole pixels."""
        call, area = super().pipeline_call(steps, negative_prompt), self.options.reference_area
        notes = ["Its images have a channel of transparency, which the run leaves away, as image.convert('RGB') does."]
        if self.options.references and math.isqrt(area) ** 2 != area:
            notes.append(
                f"The run scaled images to {area} pixels; {self.pipeline_name} takes squares of whole numbers."
            )
        return replace(call, differences=(*call.differences, *notes))

    def more_arguments(self, steps: int) -> dict[str, Any]:
        """Turn off the cache of the text's keys and values, and scale images as the policy does."""
        side = {"output_resolution": math.isqrt(self.options.reference_area)} if self.options.references else {}
        return {"use_kv_cache": False, **side}

    def token_width(self) -> int:
        return int(self.pipeline.vae_scale_factor)


def _moments(*values: float) -> Tensor:
    """Return means and stds of C channels, (2, 1, C, 1, 1, 1) float32, of C means and C stds."""
    return torch.tensor(values).view(2, 1, -1, 1, 1, 1)
