"""Policies that decode samples with a diffusers pipeline's autoencoder, and their tables cached across forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowmill.models.policies.diffusion import DiffusionPolicy, DiffusionSettings
from flowmill.models.policies.nan_checks import pixels

#: Largest decoder output, relative to [-1, 1], whose gradient is preserved: a power of two, so that scaling is exact.
_HEADROOM = 16.0


def recompute_decoder(vae: Any) -> None:
    """Turn on gradient checkpointing in an autoencoder that supports it."""
    if vae._supports_gradient_checkpointing and not vae.is_gradient_checkpointing:
        vae.enable_gradient_checkpointing()


class DecodingPolicy(DiffusionPolicy):
    """Holds a pipeline, and decodes with its autoencoder."""

    decoder_names: ClassVar[tuple[str, ...]] = ("vae",)
    """Components that only decode samples or encode start images and clips."""

    def __init__(self, pipeline: Any, settings: DiffusionSettings) -> None:
        super().__init__(settings)
        self.pipeline = pipeline
        self._tables: dict[tuple[Any, ...], Tensor] = {}

    def move_decoder(self, device: torch.device) -> None:
        for module in (getattr(self.pipeline, name) for name in self.decoder_names):
            first = None if module is None else next(module.parameters())
            # Called in every stage: without a move, this avoids walking hundreds of modules.
            if first is not None and not first.is_meta and first.device != device:
                module.to(device)

    def images(self, decoded: Tensor) -> Tensor:
        """Return decoded images (B, 3, H, W) in [-1, 1] as (B, H, W, 3) uint8, rounded as the pipeline rounds them."""
        unit: Tensor = self.pipeline.image_processor.postprocess(decoded, output_type="pt")
        return pixels(unit).permute(0, 2, 3, 1).contiguous()

    def decoded(self, latents: Tensor) -> Tensor:
        """Return the autoencoder's output for (B, ...) final latents; by default scaled and shifted by its config.
        Images are (B, 3, H, W), clips (B, 3, F, H, W), in the autoencoder's dtype, about -1 to 1."""
        return self.decode_scaled(latents)

    def run_decoder(self, vae: Any, latents: Tensor) -> Tensor:
        """Return an autoencoder's output for (B, ...) latents that are scaled for it."""
        decoded: Tensor = vae.decode(latents, return_dict=False)[0]
        return decoded

    def decoded_clean(self, latents: Tensor) -> Tensor:
        """Return the autoencoder's output for (B, ...) clean latents, see ``decoded``."""
        return self.decoded(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images or clips as the pipeline's post-processing rounds them."""
        return self.images(self.decoded(latents))

    def decode_smoothly(self, latents: Tensor) -> Tensor:
        """Return images, or frames of clips, of (B, ...) clean latents, without clamping. The autoencoders of Wan and
        Qwen-Image clamp their output to [-1, 1], so it is scaled down before and up after. With
        ``model.gradient_checkpointing``, autoencoders that support it recompute blocks in the backward pass."""

        if self.settings.gradient_checkpointing:
            recompute_decoder(self.pipeline.vae)

        def smaller(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            # Some also return a cache for later frames.
            return (outputs[0] / _HEADROOM, *outputs[1:]) if isinstance(outputs, tuple) else outputs / _HEADROOM

        hook = self.pipeline.vae.decoder.register_forward_hook(smaller)
        try:
            decoded = self.decoded_clean(latents).float() * _HEADROOM
        finally:
            hook.remove()
        unit = decoded / 2 + 0.5
        return unit.transpose(1, 2) if unit.ndim == 5 else unit

    def table(self, device: torch.device, make: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return a table that is the same for every forward; it is created in host memory and moved only once.
        ``make``: creates it from ``args``; each kind of table has its own function; ``args``: everything that the
        table depends on."""
        key = (device, make.__qualname__, *args)
        if key not in self._tables:
            self._tables[key] = make(*args).to(device)
        return self._tables[key]

    def forget_tables(self) -> None:
        """Drop the cached tables."""
        self._tables.clear()

    @torch.no_grad()
    def encode_media(self, media: Tensor) -> Tensor:
        """Return the clean latents of media, the inverse of ``decoded_clean`` around the autoencoder."""
        return self.encoded(media).float()

    def encoded(self, media: Tensor) -> Tensor:
        """Return the latents of media in the layout of ``initial_latents``; by default scaled and shifted."""
        return self.encode_scaled(media)

    def likeliest(self, media: Tensor) -> Tensor:
        """Return the autoencoder's latents of media in [-1, 1]: the mode of its distribution."""
        encoded = self.pipeline.vae.encode(media.to(self.pipeline.vae.dtype), return_dict=False)[0]
        # Some autoencoders give a distribution, some the latents.
        return encoded if isinstance(encoded, torch.Tensor) else encoded.mode()

    def encode_scaled(self, media: Tensor) -> Tensor:
        """Return (B, C, h, w) latents of media, the inverse of ``decode_scaled``."""
        config = self.pipeline.vae.config
        latents = self.likeliest(media)
        shift = config.get("shift_factor")
        scaled: Tensor = (latents if shift is None else latents - shift) * config.scaling_factor
        return scaled

    def encode_standardized(self, media: Tensor) -> Tensor:
        """Return (B, C, f, h, w) latents of (B, 3, F, H, W) clips, the inverse of ``decode_standardized``."""
        latents = self.likeliest(media)
        mean, inverse = self.standards(latents)
        return (latents - mean) * inverse

    def encode_normalized(self, media: Tensor, patchify: Callable[[Tensor], Tensor]) -> Tensor:
        """Return (B, N, C) tokens of images, the inverse of ``decode_normalized``.

        Args:
            media: (B, 3, H, W).
            patchify: converts latents to patches (B, C, h, w).
        """
        spatial = patchify(self.likeliest(media))
        mean, std = self._batch_norm(spatial)
        return ((spatial - mean) / std).permute(0, 2, 3, 1).flatten(1, 2)

    def _batch_norm(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std of the patches' channels, (1, C, 1, 1) each."""
        vae = self.pipeline.vae
        mean, variance = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
        return mean.to(like), torch.sqrt(variance + vae.config.batch_norm_eps).to(like)

    def decode_standardized(self, latents: Tensor) -> Tensor:
        """Return (B, 3, F, H, W) frames of (B, C, f, h, w) latents that are standardized per channel."""
        vae, latents = self.pipeline.vae, latents.to(self.pipeline.vae.dtype)
        mean, inverse = self.standards(latents)
        return vae.decode(latents / inverse + mean, return_dict=False)[0]

    def standards(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of the autoencoder's C channels and 1 / their stds, (1, C, 1, 1, 1) each."""
        config = self.pipeline.vae.config
        mean, inverse = self.table(like.device, _scales, *config.latents_mean, *config.latents_std)
        return mean.to(like), inverse.to(like)

    def decode_normalized(
        self, latents: Tensor, grid: tuple[int, int], unpatchify: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return (B, 3, H, W) images of (B, N, C) tokens that are normalized by the autoencoder's batch norm.
        ``latents``: tokens in the order of the rows of an image; ``unpatchify``: converts patches (B, C, h, w) to
        latents."""
        vae = self.pipeline.vae
        spatial = latents.unflatten(1, grid).permute(0, 3, 1, 2).contiguous()
        mean, std = self._batch_norm(spatial)
        return vae.decode(unpatchify(spatial * std + mean).to(vae.dtype), return_dict=False)[0]

    def decode_scaled(self, latents: Tensor) -> Tensor:
        """Return the autoencoder's output for (B, C, h, w) latents, scaled and shifted by its config."""
        vae = self.pipeline.vae
        scaled, shift = latents.to(vae.dtype) / vae.config.scaling_factor, vae.config.get("shift_factor")
        return self.run_decoder(vae, scaled if shift is None else scaled + shift)


def _scales(*values: float) -> Tensor:
    """Return the means of C channels and 1 / their stds, (2, 1, C, 1, 1, 1) float32, of C means and C stds."""
    means, stds = torch.tensor(values).view(2, 1, -1, 1, 1, 1)
    return torch.stack([means, 1.0 / stds])
