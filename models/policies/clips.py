"""Base class of families that make clips: the numbers of frames, and rounding to uint8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from configs.errors import ConfigError
from models.policies.clip_lengths import ClipLengths
from models.policies.diffusion import DiffusionSettings
from models.policies.nan_checks import pixels
from models.policies.pipeline import PipelinePolicy

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


def clip_noise(pipeline: Any, settings: DiffusionSettings, generators: Sequence[torch.Generator]) -> Tensor:
    """Return (B, C, f, h, w) float32 noise of latents, for pipelines whose own method needs more than their size."""
    from diffusers.utils.torch_utils import randn_tensor

    frames = (settings.frames - 1) // pipeline.vae_scale_factor_temporal + 1
    side = pipeline.vae_scale_factor_spatial
    shape = (len(generators), pipeline.vae.config.z_dim, frames, settings.height // side, settings.width // side)
    return randn_tensor(shape, list(generators), settings.device, torch.float32)  # type: ignore[no-any-return]


def frames_at_ends(pipeline: Any, settings: DiffusionSettings, images: Sequence[Sequence[Image.Image]]) -> Tensor:
    """Return the conditioning that ``WanImageToVideoPipeline`` computes from first frames and optional last frames.

    Args:
        pipeline: pipeline with an autoencoder.
        settings: size and number of frames.
        images: the first frame of each of B clips, or the first and the last.

    Returns:
        (B, ...) float32.
    """
    size, found = (settings.height, settings.width), []
    for ends in images:
        units = [pipeline.video_processor.preprocess(one, *size).to(settings.device, torch.float32) for one in ends]
        # The returned latents are unused; a separate generator keeps the global one unchanged.
        _, condition, *_ = pipeline.prepare_latents(
            units[0],
            *(1, pipeline.vae.config.z_dim, *size, settings.frames, torch.float32, settings.device),
            torch.Generator(),
            last_image=units[1] if len(units) > 1 else None,
        )
        found.append(condition)
    return torch.cat(found)


class ClipPolicy(PipelinePolicy):
    """Adapter for a pipeline of clips."""

    lengths: ClassVar[ClipLengths] = ClipLengths(every=4)
    """Supported numbers of frames."""

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, C, f, h, w) float32 noise."""
        settings, channels = self.settings, next(iter(self.denoisers.values())).config.out_channels
        size = (settings.height, settings.width, settings.frames)
        return self.pipeline.prepare_latents(  # type: ignore[no-any-return]
            len(generators), channels, *size, torch.float32, settings.device, list(generators)
        )

    def images(self, decoded: Tensor) -> Tensor:
        """Return (B, F, H, W, 3) uint8 clips of (B, 3, F, H, W) frames in [-1, 1]."""
        unit: Tensor = self.pipeline.video_processor.postprocess_video(decoded, output_type="pt")
        return pixels(unit).permute(0, 1, 3, 4, 2).contiguous()

    @classmethod
    def check_size(cls, folder: Path | None, settings: DiffusionSettings, *, unit: int | None = None) -> None:
        """Check height, width and the number of frames.

        Raises:
            ConfigError: the model cannot make such clips.
        """
        if settings.frames not in cls.lengths:
            raise ConfigError(
                f"model.frames is {settings.frames}, but this model takes {cls.lengths}. "
                f"{cls.lengths.nearest(settings.frames)}."
            )
        super().check_size(folder, DiffusionSettings(height=settings.height, width=settings.width), unit=unit)
