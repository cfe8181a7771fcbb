"""Base class of families that make clips: the numbers of frames, and rounding to uint8."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowmill.configs.errors import ConfigError
from flowmill.configs.model_families import ClipLengths
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.nan_checks import pixels
from flowmill.models.policies.pipeline import PipelinePolicy

if TYPE_CHECKING:
    from torch import Tensor


class ClipPolicy(PipelinePolicy):
    """Adapter for a pipeline of clips."""

    lengths: ClassVar[ClipLengths] = ClipLengths(every=4)
    frames_argument: ClassVar[str] = "num_frames"
    fixed_first: ClassVar[bool] = False
    """The first frame is that of an image and stays fixed; chains hold the others, see ``finished``."""

    def noise_channels(self) -> int:
        """Return the channels of generated latents; the transformer may also read others."""
        return int(next(iter(self.denoisers.values())).config.out_channels)

    def noise_size(self) -> tuple[int, ...]:
        return *super().noise_size(), self.settings.frames

    def decoded(self, latents: Tensor) -> Tensor:
        return self.decode_standardized(latents)

    def encoded(self, media: Tensor) -> Tensor:
        """Return the latents of (B, 3, F, H, W) clips."""
        return self.encode_standardized(media)

    def more_arguments(self, steps: int) -> dict[str, Any]:
        return {**super().more_arguments(steps), self.frames_argument: self.settings.frames}

    def images(self, decoded: Tensor) -> Tensor:
        """Return (B, F, H, W, 3) uint8 clips of (B, 3, F, H, W) frames in [-1, 1]."""
        unit: Tensor = self.pipeline.video_processor.postprocess_video(decoded, output_type="pt")
        return pixels(unit).permute(0, 1, 3, 4, 2).contiguous()

    @classmethod
    def check_size(cls, folder: Path | None, settings: DiffusionSettings, *, unit: int | None = None) -> None:
        """Check height, width and the number of frames; raise ConfigError if the model cannot make such clips."""
        if settings.frames not in cls.lengths:
            raise ConfigError(
                f"model.frames is {settings.frames}, but this model takes {cls.lengths}. "
                f"{cls.lengths.nearest(settings.frames)}."
            )
        if cls.fixed_first and settings.frames == 1:
            raise ConfigError(
                f"model.frames is 1, but the first frame of model.policy '{cls.family}' is the image, and nothing is "
                f"left to make. Set it to {cls.lengths.every + 1} or more."
            )
        super().check_size(folder, DiffusionSettings(height=settings.height, width=settings.width), unit=unit)

    def decode_smoothly(self, latents: Tensor) -> Tensor:
        """Return the frames of clips; raise ConfigError if the first is fixed, as gradients are taken from latents that
        lack it."""
        if self.fixed_first:
            raise ConfigError(
                f"model.policy '{self.family}': clips are decoded with the image they start from, which the decoding "
                "for reward gradients does not get. Choose an optimize.algorithm that needs no gradients."
            )
        return super().decode_smoothly(latents)
