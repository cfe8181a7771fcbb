"""Policies whose samples an autoencoder of a diffusers pipeline decodes, and what they make once for all forwards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from models.policies.diffusion import DiffusionPolicy, DiffusionSettings
from models.policies.nan_checks import pixels

if TYPE_CHECKING:
    from torch import Tensor, nn

#: What gradients pass through may be so many times larger than images are: a power of two, which rounds nothing.
_HEADROOM = 16.0


def recompute_decoder(vae: Any) -> None:
    """Let an autoencoder compute again what it would keep for a backward pass, block by block, where it can."""
    if vae._supports_gradient_checkpointing and not vae.is_gradient_checkpointing:
        vae.enable_gradient_checkpointing()


class DecodingPolicy(DiffusionPolicy):
    """Holds a pipeline, and decodes with its autoencoder."""

    decoder_names: ClassVar[tuple[str, ...]] = ("vae",)
    """Components that only decode samples, or encode what they start from."""

    def __init__(self, pipeline: Any, settings: DiffusionSettings) -> None:
        """Hold a loaded pipeline."""
        super().__init__(settings)
        self.pipeline = pipeline
        self._tables: dict[tuple[Any, ...], Tensor] = {}

    def move_decoder(self, device: torch.device) -> None:
        """Move what decodes; what ``device_map`` placed stays where it is, and what has no weights goes nowhere."""
        if self.settings.device_map is not None:
            return
        for module in (getattr(self.pipeline, name) for name in self.decoder_names):
            first = None if module is None else next(module.parameters())
            # Asked for every stage: where nothing moves, hundreds of modules need not be walked through.
            if first is not None and not first.is_meta and first.device != device:
                module.to(device)

    def images(self, decoded: Tensor) -> Tensor:
        """Return decoded images (B, 3, H, W) in [-1, 1] as (B, H, W, 3) uint8, rounded as the pipeline rounds them."""
        unit: Tensor = self.pipeline.image_processor.postprocess(decoded, output_type="pt")
        return pixels(unit).permute(0, 2, 3, 1).contiguous()

    @abstractmethod
    def decoded(self, latents: Tensor) -> Tensor:
        """Return what the autoencoder makes of (B, ...) final latents.

        That is (B, 3, H, W) images or (B, 3, F, H, W) clips in the autoencoder's dtype, about -1 to 1.
        """

    def decoded_clean(self, latents: Tensor) -> Tensor:
        """Return what the autoencoder makes of (B, ...) clean latents, see ``decoded``."""
        return self.decoded(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images or clips as the pipeline's post-processing rounds them."""
        return self.images(self.decoded(latents))

    def decode_smoothly(self, latents: Tensor) -> Tensor:
        """Return images, or frames of clips, as the autoencoder makes them of (B, ...) clean latents.

        Those of Wan and Qwen-Image cut what they made to [-1, 1], so it is made smaller before, and as large after.
        With ``model.gradient_checkpointing`` blocks are computed again on the way back, where the autoencoder can.
        """

        if self.settings.gradient_checkpointing:
            recompute_decoder(self.pipeline.vae)

        def smaller(module: nn.Module, given: Any, made: Any) -> Any:
            # Some give what they keep for later frames too.
            return (made[0] / _HEADROOM, *made[1:]) if isinstance(made, tuple) else made / _HEADROOM

        hook = self.pipeline.vae.decoder.register_forward_hook(smaller)
        try:
            found = self.decoded_clean(latents).float() * _HEADROOM
        finally:
            hook.remove()
        unit = found / 2 + 0.5
        return unit.transpose(1, 2) if unit.ndim == 5 else unit

    def table(self, device: torch.device, make: Callable[..., Tensor], *about: Any) -> Tensor:
        """Return what is made in host memory and the same for every forward; it is made and moved to a device once.

        Args:
            device: where it goes.
            make: makes it of ``about``; one function makes one kind of table.
            about: all that decides what it is.
        """
        key = (device, make.__qualname__, *about)
        if key not in self._tables:
            self._tables[key] = make(*about).to(device)
        return self._tables[key]

    def forget_tables(self) -> None:
        """Make tables anew where they are asked for next."""
        self._tables.clear()

    def decode_standardized(self, latents: Tensor) -> Tensor:
        """Return (B, 3, F, H, W) frames of (B, C, f, h, w) latents that a mean and std per channel were taken off."""
        vae, latents = self.pipeline.vae, latents.to(self.pipeline.vae.dtype)
        mean, inverse = self.standards(latents)
        frames: Tensor = vae.decode(latents / inverse + mean, return_dict=False)[0]
        return frames

    def standards(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of the autoencoder's C channels and 1 / their stds, (1, C, 1, 1, 1) each."""
        config = self.pipeline.vae.config
        mean, inverse = self.table(like.device, _scales, *config.latents_mean, *config.latents_std)
        return mean.to(like), inverse.to(like)

    def decode_scaled(self, latents: Tensor) -> Tensor:
        """Return what the autoencoder makes of (B, C, h, w) latents that its config scales and shifts."""
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor
        shifted = scaled if vae.config.shift_factor is None else scaled + vae.config.shift_factor
        images: Tensor = vae.decode(shifted, return_dict=False)[0]
        return images


def _scales(*values: float) -> Tensor:
    """Return the means of C channels and 1 / their stds, (2, 1, C, 1, 1, 1) float32, of C means and C stds."""
    means, stds = torch.tensor(values).view(2, 1, -1, 1, 1, 1)
    return torch.stack([means, 1.0 / stds])
