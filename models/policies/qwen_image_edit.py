"""Qwen-Image-Edit (QwenImageEditPipeline): the text encoder also reads the image; its latents are appended tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from configs.errors import ConfigError
from models.policies.diffusion import Images, PipelineCall
from models.policies.parts import Part
from models.policies.pipeline import Rows
from models.policies.qwen_image import QwenImage

if TYPE_CHECKING:
    from torch import Tensor

#: Pixels to which the pipeline always scales the image to edit.
_PIPELINE_AREA = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageEditOptions:
    """Options of the family."""

    max_sequence_length: int = 2048
    """Tokens of text and image together; every prompt is padded to this length and masked."""
    condition_area: int = _PIPELINE_AREA
    """Pixels to which the image to edit is scaled, with the aspect ratio of the generated image."""


class QwenImageEdit(QwenImage):
    """Adapter for QwenImageEditPipeline."""

    pipeline_name = "QwenImageEditPipeline"
    family = "qwen_image_edit"
    options_type: ClassVar[type[Any]] = QwenImageEditOptions
    options: QwenImageEditOptions
    text_parts = ("text_encoder", "tokenizer", "processor")
    # Prompts that are too long are refused.
    readers = ()
    encoding_parts = frozenset({Part.TEXT, Part.VAE})

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        """Return the processor if transformers cannot load it: its video processor, unused here, needs torchvision."""
        from transformers.utils import is_torchvision_available

        if Part.TEXT not in parts or is_torchvision_available():
            return {}
        from models.policies.dummy_components import TextImageProcessor

        return {"processor": TextImageProcessor.load(folder / "processor")}

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D), ``mask`` (B, L) and ``image_latents`` (B, tokens, 64).

        Raises:
            ConfigError: text and image have more tokens than ``max_sequence_length``.
        """
        rows = [self._encode_one(prompt, image) for prompt, (image,) in zip(prompts, images or (), strict=True)]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def extra_tokens(self, rows: Rows) -> Tensor | None:
        """Return the tokens of the image to edit."""
        return rows["image_latents"]

    def shapes(self, rows: Rows) -> list[tuple[int, int, int]]:
        """Return the grids of the generated image and of the one to edit."""
        unit = self.pipeline.vae_scale_factor * 2
        width, height = self._condition_size()
        return [*super().shapes(rows), (1, height // unit, width // unit)]

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it sets the padding of text, and scales the image to a megapixel."""
        call = super().pipeline_call(steps, negative_prompt)
        arguments = {name: value for name, value in call.arguments.items() if name != "max_sequence_length"}
        area = self.options.condition_area
        differences: tuple[str, ...] = ()
        if area != _PIPELINE_AREA:
            differences = (
                f"The run scaled the image to edit to {area} pixels; {self.pipeline_name} always scales it to "
                f"{_PIPELINE_AREA}.",
            )
        return replace(call, arguments=arguments, image_size=self._condition_size(), differences=differences)

    def _encode_one(self, prompt: str, pixels: np.ndarray) -> dict[str, Tensor]:
        pipeline, length = self.pipeline, self.options.max_sequence_length
        width, height = self._condition_size()
        image = pipeline.image_processor.resize(Image.fromarray(pixels), height, width)
        embeds, mask = pipeline.encode_prompt([prompt], image=image, device=self.settings.device)
        mask = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        missing = length - embeds.shape[1]
        if missing < 0:
            raise ConfigError(
                f"model.options.max_sequence_length is {length}, but text and image of prompt {prompt!r} have "
                f"{embeds.shape[1]} tokens. Raise it, or lower model.options.condition_area."
            )
        unit = pipeline.image_processor.preprocess(image, height, width).unsqueeze(2)
        latents = pipeline._encode_vae_image(unit.to(self.settings.device, pipeline.vae.dtype), None)
        _, channels, _, rows, columns = latents.shape
        return {
            "prompt_embeds": F.pad(embeds, (0, 0, 0, missing)),
            "mask": F.pad(mask.long(), (0, missing)),
            "image_latents": pipeline._pack_latents(latents, 1, channels, rows, columns),
        }

    def _condition_size(self) -> tuple[int, int]:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        width, height, _ = calculate_dimensions(self.options.condition_area, self.settings.width / self.settings.height)
        return width, height

    def _prepared(self, rows: int, generators: list[torch.Generator]) -> Any:
        channels = self.pipeline.transformer.config.in_channels // 4
        size, device = (self.settings.height, self.settings.width), self.settings.device
        return self.pipeline.prepare_latents(None, rows, channels, *size, torch.float32, device, generators)[0]
