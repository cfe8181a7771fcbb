"""FLUX.2 dev (Flux2Pipeline, embedded guidance) and FLUX.2 klein (Flux2KleinPipeline, two forwards)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.option_types import Area
from flowmill.models.image_files import within
from flowmill.models.policies.diffusion import DiffusionSettings, Images, PipelineCall
from flowmill.models.policies.flux1 import Flux1
from flowmill.models.policies.pipeline import JOINT_ATTENTION, Rows, joined
from flowmill.models.policies.pipeline_configs import Fields
from flowmill.models.policies.reference_images import (
    check_references,
    check_shape,
    grids_of,
    padded,
    room_of,
    tokens_of,
)
from flowmill.models.policies.tokenization import Reader, as_message

#: Pixels to which the pipeline scales larger images down, and the minimum of their sides.
_PIPELINE_AREA, _SMALLEST = 1024 * 1024, 64


def _conversation(tokenizer: Any, text: str) -> Any:
    from diffusers.pipelines.flux2.pipeline_flux2 import SYSTEM_MESSAGE, format_input

    messages = format_input(prompts=[text], system_message=SYSTEM_MESSAGE)
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=True, return_dict=True)
    return list(tokens["input_ids"][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Flux2Options:
    """Options of both families."""

    max_sequence_length: PositiveInt = 512
    """Text tokens; prompts are padded to this length, so that rows of different prompts can be joined."""
    references: NonNegativeInt = 0
    """Maximum number of images per prompt, which the model edits or combines; 0: text to image."""
    reference_area: Area = _PIPELINE_AREA
    """Images of more pixels are scaled down to this area, keeping their aspect ratio."""


class Flux2(Flux1):
    """Adapter for Flux2Pipeline; latents are packed, (B, tokens, 128). With reference images, rows are computed one by
    one, as their images differ in size."""

    pipeline_name = "Flux2Pipeline"
    family = "flux2"
    options_type = Flux2Options
    options: Flux2Options
    text_parts = ("text_encoder", "tokenizer")
    readers = (Reader(tokenizer="tokenizer", written=_conversation),)
    unused_parts = ()
    # Flow-Factory's targets for FLUX.2: attention and feed-forwards of both streams, and the fused input projection of
    # the single-stream blocks. Its "attn.to_out.0" does not reach their output projection, which is "attn.to_out".
    lora_targets = (
        *JOINT_ATTENTION,
        *"ff.linear_in ff.linear_out ff_context.linear_in ff_context.linear_out attn.to_qkv_mlp_proj".split(),
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D), ``text_ids`` (B, L, 4) int64, and the images' tokens from ``padded``;
        raise ConfigError if a prompt comes with more images than ``references``, or one is too small or narrow."""
        embeds, ids = self.pipeline.encode_prompt(
            list(prompts), device=self.settings.device, max_sequence_length=self.options.max_sequence_length
        )
        embedded = {"prompt_embeds": embeds, "text_ids": ids.long()}
        if not self.options.references:
            return embedded
        rows = [self._encode_images(prompt, started) for prompt, started in zip(prompts, images or (), strict=True)]
        return {**embedded, **joined(rows)}

    def shift_mu(self, steps: int) -> float:
        """Return FLUX.2's empirical shift, which also depends on the number of steps."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return float(compute_empirical_mu(image_seq_len=self.image_tokens(), num_steps=steps))

    @property
    def one_by_one(self) -> bool:  # type: ignore[override]
        """True with reference images."""
        return self.options.references > 0

    def text_inputs(self, rows: Rows) -> dict[str, Tensor]:
        return {"txt_ids": rows["text_ids"]}

    def tokens(self, latents: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, N, 128) of the image and of one row's references, and their positions (B, N, 4)."""
        ids = self.table(latents.device, self._ids, *self.grid()).expand(len(latents), -1, -1)
        if not self.options.references:
            return latents, ids
        shapes = [torch.empty(1, 1, height, width) for height, width in grids_of(rows)]
        further = self.pipeline._prepare_image_ids(shapes).to(latents.device)
        return torch.cat([latents, tokens_of(rows).to(latents.dtype)], dim=1), torch.cat([ids, further], dim=1)

    def decoded(self, latents: Tensor) -> Tensor:
        # ``_unpack_latents_with_ids`` for tokens in the order of their ids, without a device read per token.
        return self.decode_normalized(latents, self.grid(), self.pipeline._unpatchify_latents)

    def encoded(self, media: Tensor) -> Tensor:
        return self.encode_normalized(media, self.pipeline._patchify_latents)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it scales larger images down to a megapixel."""
        call, area = super().pipeline_call(steps, negative_prompt), self.options.reference_area
        if not self.options.references or area == _PIPELINE_AREA:
            return call
        note = f"The run scaled images to start from down to {area} pixels where they had more; do so before the call."
        return replace(call, image_area=area, differences=(*call.differences, note))

    def _encode_images(self, prompt: str, started: Sequence[np.ndarray]) -> dict[str, Tensor]:
        pipeline, options, unit = self.pipeline, self.options, self.pipeline.vae_scale_factor * 2
        check_references(len(started), options.references, prompt)
        tokens, grids = [], []
        for pixels in started:
            picture = within(Image.fromarray(pixels), options.reference_area)
            check_shape(picture, prompt, least=_SMALLEST)
            width, height = picture.width // unit * unit, picture.height // unit * unit
            image = pipeline.image_processor.preprocess(picture, height=height, width=width, resize_mode="crop")
            latents = pipeline._encode_vae_image(image.to(self.settings.device, pipeline.vae.dtype), None)
            tokens.append(pipeline._pack_latents(latents))
            grids.append((height // unit, width // unit))
        return padded(tokens, grids, most=options.references, room=room_of(options.reference_area, unit))

    def _ids(self, height: int, width: int) -> Tensor:
        return self.pipeline._prepare_latent_ids(torch.zeros(1, 1, height, width))


class Flux2Klein(Flux2):
    """Adapter for Flux2KleinPipeline."""

    pipeline_name = "Flux2KleinPipeline"
    family = "flux2_klein"
    readers = (Reader(tokenizer="tokenizer", written=as_message(enable_thinking=False)),)
    # Guidance of a distilled model is refused below.
    settings_read = Fields(followed=frozenset({"is_distilled"}))

    @classmethod
    def check_folder(cls, folder: Path, settings: DiffusionSettings) -> dict[str, Any]:
        index = super().check_folder(folder, settings)
        if index.get("is_distilled") and settings.guidance_scale > 1:
            raise ConfigError(
                f"model.guidance_scale is {settings.guidance_scale:g}, but '{folder}' is distilled (is_distilled in "
                "its model_index.json), and its pipeline leaves guidance out. Set it to 1."
            )
        return index

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; its negative prompt is always empty."""
        call = super().pipeline_call(steps, None)
        if not negative_prompt:
            return call
        note = f"The run used the negative prompt {negative_prompt!r}; {self.pipeline_name} always uses an empty one."
        return replace(call, differences=(*call.differences, note))
