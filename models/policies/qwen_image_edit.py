"""Qwen-Image-Edit, and its versions 2509 and 2511, which edit images of any shape or combine several.

The text encoder also reads the images; their latents are appended tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from pydantic import PositiveInt
from torch import Tensor

from flowmill.configs.option_types import Area
from flowmill.models.policies.diffusion import PipelineCall
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import Rows
from flowmill.models.policies.qwen_image import QwenImage
from flowmill.models.policies.reference_images import (
    check_references,
    check_shape,
    grids_of,
    padded,
    room_of,
    tokens_of,
)

#: Pixels to which the pipeline always scales the image to edit.
_PIPELINE_AREA = 1024 * 1024
#: Sides are rounded to multiples of 32 pixels, so that each may grow by half of that.
_ROUNDING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageEditOptions:
    """Options of the family."""

    max_sequence_length: PositiveInt = 2048
    """Tokens of text and image together; every prompt is padded to this length and masked."""
    condition_area: Area = _PIPELINE_AREA
    """Pixels to which the image to edit is scaled, with the aspect ratio of the generated image."""


class QwenImageEdit(QwenImage):
    """Adapter for QwenImageEditPipeline."""

    pipeline_name = "QwenImageEditPipeline"
    family = "qwen_image_edit"
    options_type: ClassVar[type[Any]] = QwenImageEditOptions
    options: QwenImageEditOptions
    text_parts = ("text_encoder", "tokenizer", "processor")
    missing_arguments = frozenset({"max_sequence_length"})
    takes_images = True
    image_remedy = ("image", ", or lower model.options.condition_area")
    # Prompts that are too long are refused.
    readers = ()
    encoding_parts = frozenset({Part.TEXT, Part.VAE})

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        """Return the processor if transformers cannot load it: its video processor, unused here, needs torchvision."""
        from transformers.utils import is_torchvision_available

        if Part.TEXT not in parts or is_torchvision_available():
            return {}
        from flowmill.models.policies.dummy_components import TextImageProcessor

        return {"processor": TextImageProcessor.load(folder / "processor")}

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D), ``mask`` (1, L) and ``image_latents`` (1, tokens, 64); raise ConfigError
        if text and image have more tokens than ``max_sequence_length``."""
        (pixels,), (width, height) = images, self._condition_size()
        image = self.pipeline.image_processor.resize(Image.fromarray(pixels), height, width)
        text, (tokens, _) = self.masked_text(prompt, image=image), self.tokens_of_image(image, height, width)
        return {**text, "image_latents": tokens}

    def tokens_of_image(self, image: Image.Image, height: int, width: int) -> tuple[Tensor, tuple[int, int]]:
        """Return the (1, N, 64) tokens of an image scaled to a size, and their rows and columns."""
        pipeline = self.pipeline
        unit = pipeline.image_processor.preprocess(image, height, width).unsqueeze(2)
        latents = pipeline._encode_vae_image(unit.to(self.settings.device, pipeline.vae.dtype), None)
        _, channels, _, rows, columns = latents.shape
        return pipeline._pack_latents(latents, 1, channels, rows, columns), (rows // 2, columns // 2)

    def extra_tokens(self, rows: Rows) -> Tensor | None:
        return rows["image_latents"]

    def shapes(self, rows: Rows) -> list[tuple[int, int, int]]:
        unit = self.token_width()
        width, height = self._condition_size()
        return [*super().shapes(rows), (1, height // unit, width // unit)]

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it sets the padding of text, and scales the image to a megapixel."""
        call, area = super().pipeline_call(steps, negative_prompt), self.options.condition_area
        note = f"The run scaled the image to edit to {area} pixels; {self.pipeline_name} always scales it to"
        differences = () if area == _PIPELINE_AREA else (f"{note} {_PIPELINE_AREA}.",)
        return replace(call, image_size=self._condition_size(), differences=differences)

    @classmethod
    def condition_size(cls, options: QwenImageEditOptions, ratio: float) -> tuple[int, int]:
        """Return width and height of the image to edit, as the pipeline rounds them. ``ratio``: width by height."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        width, height, _ = calculate_dimensions(options.condition_area, ratio)
        return width, height

    def _condition_size(self) -> tuple[int, int]:
        return self.condition_size(self.options, self.settings.width / self.settings.height)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageEditPlusOptions:
    """Options of the family."""

    max_sequence_length: PositiveInt = 2048
    """Tokens of text and images together; every prompt is padded to this length and masked."""
    references: PositiveInt = 1
    """Maximum number of images per prompt; for fewer images, tokens are padded in the cache only."""
    reference_area: Area = 1024 * 1024
    """Pixels to which each image is scaled, keeping its aspect ratio."""


class QwenImageEditPlus(QwenImageEdit):
    """Adapter for QwenImageEditPlusPipeline; rows are computed one by one, as their images differ in size."""

    pipeline_name = "QwenImageEditPlusPipeline"
    family = "qwen_image_edit_plus"
    options_type = QwenImageEditPlusOptions
    options: QwenImageEditPlusOptions  # type: ignore[assignment]
    image_remedy = QwenImage.image_remedy
    one_by_one = True

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D), ``mask`` (1, L), ``image_latents`` and their grids, see ``padded``; raise
        ConfigError if text and images have more tokens than ``max_sequence_length``, a prompt comes with more images
        than ``references``, or one is too narrow."""
        most, area = self.options.references, self.options.reference_area
        check_references(len(images), most, prompt)
        pictures = [Image.fromarray(pixels) for pixels in images]
        for picture in pictures:
            check_shape(picture, prompt, least=1)
        scale, seen_area = self.pipeline.image_processor.resize, _plus().CONDITION_IMAGE_SIZE
        text = self.masked_text(prompt, image=[scale(each, *_size(each, seen_area)) for each in pictures])
        tokens, grids = zip(*(self.tokens_of_image(each, *_size(each, area)) for each in pictures), strict=True)
        return {**text, **padded(tokens, grids, most=most, room=room_of(area, self.token_width(), round_up=_ROUNDING))}

    def extra_tokens(self, rows: Rows) -> Tensor | None:
        return tokens_of(rows)

    def shapes(self, rows: Rows) -> list[tuple[int, int, int]]:
        return [*QwenImage.shapes(self, rows), *((1, height, width) for height, width in grids_of(rows))]

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it sets the padding of text, and scales images to a megapixel."""
        call, area = QwenImage.pipeline_call(self, steps, negative_prompt), self.options.reference_area
        always = _plus().VAE_IMAGE_SIZE
        note = f"The run scaled images to {area} pixels; {self.pipeline_name} always scales them to {always}."
        return replace(call, differences=() if area == always else (note,))


def _size(picture: Image.Image, area: int) -> tuple[int, int]:
    """Return height and width of an image scaled to an area, as the pipeline of several images rounds them."""
    width, height = _plus().calculate_dimensions(area, picture.width / picture.height)
    return height, width


def _plus() -> Any:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

    return pipeline_qwenimage_edit_plus
