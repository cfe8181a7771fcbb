"""Qwen-Image-Edit-2509 and -2511 (QwenImageEditPlusPipeline): edits images of any shape, or combines several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image

from configs.errors import ConfigError
from models.policies.diffusion import Images, PipelineCall
from models.policies.pipeline import Modules, Rows
from models.policies.qwen_image import QwenImage
from models.policies.qwen_image_edit import QwenImageEdit
from models.policies.reference_images import (
    check_references,
    check_shape,
    grids_of,
    padded,
    room_of,
    row_by_row,
    tokens_of,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

#: Sides are rounded to multiples of 32 pixels, so that each may grow by half of that.
_ROUNDING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageEditPlusOptions:
    """Options of the family."""

    max_sequence_length: int = 2048
    """Tokens of text and images together; every prompt is padded to this length and masked."""
    references: int = 1
    """Maximum number of images per prompt; for fewer images, tokens are padded in the cache only."""
    reference_area: int = 1024 * 1024
    """Pixels to which each image is scaled, keeping its aspect ratio."""


class QwenImageEditPlus(QwenImageEdit):
    """Adapter for QwenImageEditPlusPipeline; rows are computed one by one, as their images differ in size."""

    pipeline_name = "QwenImageEditPlusPipeline"
    family = "qwen_image_edit_plus"
    options_type = QwenImageEditPlusOptions
    options: QwenImageEditPlusOptions  # type: ignore[assignment]

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D), ``mask`` (B, L), ``image_latents`` and their grids, see ``padded``.

        Raises:
            ConfigError: text and images have more tokens than ``max_sequence_length``, a prompt comes with more images
                than ``references``, or one is too narrow.
        """
        rows = [self._encode_row(prompt, started) for prompt, started in zip(prompts, images or (), strict=True)]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        """Call the transformer for each row; its time argument runs from 0 to 1."""
        return row_by_row(partial(super().call, modules), latents, sigma, rows)

    def extra_tokens(self, rows: Rows) -> Tensor | None:
        """Return the tokens of one row's images."""
        return tokens_of(rows)

    def shapes(self, rows: Rows) -> list[tuple[int, int, int]]:
        """Return the grids of the generated image and of one row's images."""
        return [*QwenImage.shapes(self, rows), *((1, height, width) for height, width in grids_of(rows))]

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it sets the padding of text, and scales images to a megapixel."""
        call = QwenImage.pipeline_call(self, steps, negative_prompt)
        arguments = {name: value for name, value in call.arguments.items() if name != "max_sequence_length"}
        area, always = self.options.reference_area, _module().VAE_IMAGE_SIZE
        differences: tuple[str, ...] = ()
        if area != always:
            differences = (
                f"The run scaled images to {area} pixels; {self.pipeline_name} always scales them to {always}.",
            )
        return replace(call, arguments=arguments, differences=differences)

    def _encode_row(self, prompt: str, started: Sequence[np.ndarray]) -> dict[str, Tensor]:
        options, pipeline = self.options, self.pipeline
        check_references(len(started), options.references, prompt)
        pictures = [Image.fromarray(pixels) for pixels in started]
        for picture in pictures:
            check_shape(picture, prompt, least=1)
        seen = [self._scaled(picture, _module().CONDITION_IMAGE_SIZE) for picture in pictures]
        embeds, mask = pipeline.encode_prompt([prompt], image=seen, device=self.settings.device)
        mask = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        missing = options.max_sequence_length - embeds.shape[1]
        if missing < 0:
            raise ConfigError(
                f"model.options.max_sequence_length is {options.max_sequence_length}, but text and images of prompt "
                f"{prompt!r} have {embeds.shape[1]} tokens. Raise it."
            )
        tokens, grids = zip(*map(self._tokens, pictures), strict=True)
        unit = pipeline.vae_scale_factor * 2
        room = room_of(options.reference_area, unit, round_up=_ROUNDING)
        return {
            "prompt_embeds": F.pad(embeds, (0, 0, 0, missing)),
            "mask": F.pad(mask.long(), (0, missing)),
            **padded(tokens, grids, most=options.references, room=room),
        }

    def _tokens(self, picture: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Return the (1, N, 64) tokens of an image, and their rows and columns."""
        pipeline = self.pipeline
        width, height = self._size(picture, self.options.reference_area)
        unit = pipeline.image_processor.preprocess(picture, height, width).unsqueeze(2)
        latents = pipeline._encode_vae_image(unit.to(self.settings.device, pipeline.vae.dtype), None)
        _, channels, _, rows, columns = latents.shape
        return pipeline._pack_latents(latents, 1, channels, rows, columns), (rows // 2, columns // 2)

    def _scaled(self, picture: Image.Image, area: int) -> Image.Image:
        width, height = self._size(picture, area)
        scaled: Image.Image = self.pipeline.image_processor.resize(picture, height, width)
        return scaled

    def _size(self, picture: Image.Image, area: int) -> tuple[int, int]:
        width, height = _module().calculate_dimensions(area, picture.width / picture.height)
        return width, height


def _module() -> Any:
    """Return the module with the pipeline's sizes."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

    return pipeline_qwenimage_edit_plus
