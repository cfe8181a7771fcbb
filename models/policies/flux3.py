"""FLUX.3 (Flux3ModularPipeline): layers of Qwen3-VL encode text, guidance takes two forwards. With ``references`` it
edits or combines images, whose latents are tokens with blocks of their own.

Text is padded to a multiple of 80 tokens, which the transformer attends to. Their number changes its output, so rows
are computed one by one. The pipeline's first block rewrites the prompt with a language model; it is left out, as
training chooses the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from flowmill.configs.option_types import Area
from flowmill.models.image_files import within
from flowmill.models.policies.diffusion import PipelineCall
from flowmill.models.policies.modular import ModularPolicy
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import Modules, Rows, padded_text, thousandths
from flowmill.models.policies.pipeline_configs import SHIFT_ALONE, Fields, check_velocities
from flowmill.models.policies.reference_images import (
    check_references,
    check_shape,
    grids_of,
    padded,
    room_of,
    tokens_of,
)
from flowmill.models.policies.tokenization import Reader, as_message

#: Tokens of the smallest image, to which smaller ones are padded.
_LEAST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Flux3Options:
    """Options of the family."""

    max_sequence_length: PositiveInt = 480
    """Maximum text tokens, and the stored length of all rows of text; the pipeline itself reads 8192."""
    references: NonNegativeInt = 0
    """Maximum number of images per prompt, which the model edits or combines; 0: text to image."""
    reference_area: Area = 1024 * 1024
    """Images of more pixels are scaled down to this area, keeping their aspect ratio."""


class Flux3(ModularPolicy):
    """Adapter for Flux3ModularPipeline; latents are packed, (B, tokens, 128)."""

    pipeline_name = "Flux3ModularPipeline"
    blocks_name = "Flux3AutoBlocks"
    left_out = ("prompt_upsampler",)
    family = "flux3"
    options_type = Flux3Options
    options: Flux3Options
    text_parts = ("text_encoder", "tokenizer")
    readers = (Reader(tokenizer="tokenizer", written=as_message()),)
    schedulers: ClassVar[Mapping[str, Fields]] = {"FlowMatchEulerDiscreteScheduler": SHIFT_ALONE}
    one_by_one = True
    blocks = ("mode_blocks.image", "mode_blocks.image_cond", "txt_mode_blocks", "single_transformer_blocks")
    # Attention and feed-forward of every block.
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.linear_in", "ff.linear_out")

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        super()._check_scheduler(folder, index)
        check_velocities(folder, "flow_map")

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        """Return the tokenizer as a processor, which the blocks expect."""
        from flowmill.models.policies.dummy_components import TextProcessor

        return {"tokenizer": TextProcessor.load(folder / "tokenizer")} if Part.TEXT in parts else {}

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``text_length`` (1,) int64, its tokens, padding included, and the
        images' tokens from ``padded``; raise ConfigError if a prompt comes with more images than ``references``, or one
        is too narrow."""
        step, pipeline, most = self.step("text_encoder"), self.pipeline, self.options.max_sequence_length
        options = {"device": self.settings.device, "max_sequence_length": most, "pad_multiple": step.pad_multiple}
        embeds = step._get_qwen3_vl_prompt_embeds(pipeline.text_encoder, pipeline.tokenizer, prompt, **options)
        return {**padded_text(embeds, most), **(self._encode_images(prompt, images) if self.options.references else {})}

    def _encode_images(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        from diffusers import Flux2Pipeline

        most, area, tokens, grids = self.options.references, self.options.reference_area, [], []
        check_references(len(images), most, prompt)
        # The pipeline pads one image to whole tokens, and crops several.
        mode = "fill" if len(images) == 1 else "crop"
        for pixels in images:
            picture = within(Image.fromarray(pixels), area)
            check_shape(picture, prompt, least=self.token_width())
            unit, _ = self.pipeline.image_processor.preprocess(picture, resize_mode=mode)
            grids.append((unit.shape[-2] // self.token_width(), unit.shape[-1] // self.token_width()))
            tokens.append(self.encode_normalized(unit.to(self.settings.device), Flux2Pipeline._patchify_latents))
        room = room_of(area, self.token_width(), round_up=self.token_width())
        return padded(tokens, grids, most=most, room=max(room, _LEAST))

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, tokens, 128) packed float32 noise."""
        from diffusers.utils.torch_utils import randn_tensor

        shape = (len(generators), self.pipeline.transformer.config.in_channels, *self.grid())
        device = self.settings.device
        latents: Tensor = randn_tensor(shape, generator=list(generators), device=device, dtype=torch.float32)
        return latents.flatten(2).transpose(1, 2)

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        length, grids, references = int(rows["text_length"]), grids_of(rows), {}
        if grids:
            ids = [self.table(latents.device, self._image_ids, *grid, -n) for n, grid in enumerate(grids, 1)]
            references["image_cond_hidden_states"] = tokens_of(rows).to(latents.dtype)
            references["image_cond_ids"] = torch.cat(ids)
        return modules["transformer"](
            hidden_states=latents,
            encoder_hidden_states=rows["prompt_embeds"][:, :length],
            timestep=thousandths(sigma).to(latents.dtype),
            img_ids=self.table(latents.device, self._image_ids, *self.grid()),
            txt_ids=self.table(latents.device, self._text_ids, length),
            return_dict=False,
            **references,
        )[0]

    def decoded(self, latents: Tensor) -> Tensor:
        return self.decode_normalized(latents, self.grid(), self.step("decode")._unpatchify_latents)

    def encoded(self, media: Tensor) -> Tensor:
        from diffusers import Flux2Pipeline

        return self.encode_normalized(media, Flux2Pipeline._patchify_latents)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it keeps larger images as they are."""
        call, area = super().pipeline_call(steps, negative_prompt), self.options.reference_area
        if not self.options.references:
            return call
        note = f"The run scaled images to start from down to {area} pixels where they had more; do so before the call."
        return replace(call, image_area=area, differences=(*call.differences, note))

    def _image_ids(self, height: int, width: int, place: int = 0) -> Tensor:
        from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids

        step = self.step("denoise", "text2image", "prepare_latents")
        return _prepare_image_ids(height, width, step.image_rope_scale, place)

    def _text_ids(self, length: int) -> Tensor:
        return self.step("denoise", "text2image", "prepare_rope_inputs")._prepare_text_ids(torch.empty(1, length))
