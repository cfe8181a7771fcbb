"""Images and clips of data, with their sound if the model makes some, as samples: encoded by its autoencoders."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from flowmill.configs.errors import DataError
from flowmill.models.films import open_sound
from flowmill.models.policies.diffusion import DiffusionPolicy, SoundForm
from flowmill.models.policies.nan_checks import finite, noise_levels
from flowmill.storage.trajectories.base import Sample
from flowmill.storage.trajectories.media import Sound
from flowmill.tasks.inputs.components import decode_rows
from flowmill.tasks.modalities.data_images import read_media
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.media import decode_in_slices
from flowmill.tasks.modalities.samplers import SamplingContext

#: Seconds by which a sound may end before its clip: files hold whole packets of sound, and some models cut the last.
_GAP = 0.1


@dataclass(frozen=True, slots=True)
class DataMedia:
    """An image or a clip as the model sees it."""

    pixels: np.ndarray
    """(H, W, 3) or (F, H, W, 3) uint8."""
    sound: Sound | None
    """Its sound; None for models without."""

    def heard(self) -> np.ndarray:
        """Return the (N, C) int16 sound, (0, 0) without one."""
        return np.zeros((0, 0), np.int16) if self.sound is None else self.sound.samples

    def same(self, other: DataMedia) -> bool:
        """Return whether pixels and sound are equal."""
        return np.array_equal(self.pixels, other.pixels) and np.array_equal(self.heard(), other.heard())


def read_content(making: SamplingContext, sample: DataSample) -> DataMedia:
    """Return an image or clip of the configured size, with the sound of its frames if the model makes some."""
    form, data = _policy(making).sound_form, sample.file.read()
    if form is None:
        return DataMedia(read_media(making, sample, data), None)
    pixels = read_media(making, sample, data, making.config.rollout.media.fps)
    try:
        return DataMedia(pixels, _sound(data, form))
    except ValueError as error:
        raise DataError(
            f"{sample.file.name}: {error}, but model.policy '{making.config.model.policy}' makes clips with sound. "
            "Give films that have both, or remove the row."
        ) from None


def media_samples(making: SamplingContext, samples: Sequence[DataSample], media: Sequence[DataMedia]) -> list[Sample]:
    """Return images or clips of data as samples that end in their latents."""
    config, policy = making.config, _policy(making)
    form, size, row_latents = policy.sound_form, decode_rows(config), dict[int, np.ndarray]()
    for shape in dict.fromkeys(each.pixels.shape for each in media):
        rows = [row for row, each in enumerate(media) if each.pixels.shape == shape]
        with torch.no_grad():
            pixels = _joined(making, [media[row].pixels for row in rows])
            latents = decode_in_slices(policy, lambda part: policy.encode_media(part.float() / 127.5 - 1), pixels, size)
            if form is not None:
                sounds = _joined(making, [media[row].heard() for row in rows])
                heard = decode_in_slices(policy, lambda part: policy.encode_sounds(part.float() / 32768), sounds, size)
                latents = torch.cat([latents, heard], dim=1)
        finite(latents, "latents of given samples")
        row_latents |= zip(rows, latents.to(getattr(torch, config.rollout.latents_dtype)).numpy(), strict=True)
    # The chain ends at level 0: these latents are clean, whatever the last level of the family's schedule.
    sigmas = [*noise_levels(policy, config.rollout.steps).tolist()[:-1], 0.0]
    return [
        Sample(
            **sample.columns(),
            sigmas=sigmas,
            states=[config.rollout.steps],
            latents=row_latents[row][None],
            media=media[row].pixels if config.rollout.media.decodes else None,
            sound=media[row].sound if config.rollout.media.decodes else None,
        )
        for row, sample in enumerate(samples)
    ]


def _policy(making: SamplingContext) -> DiffusionPolicy:
    return cast(DiffusionPolicy, making.host.decoding())


def _sound(data: bytes, form: SoundForm) -> Sound:
    """Return the sound of a clip, completed with a moment of silence; raise ValueError if it has none."""
    sound = open_sound(io.BytesIO(data), rate=form.rate, channels=form.channels, length=form.length)
    if len(sound) < form.length - _GAP * form.rate:
        seconds, whole = len(sound) / form.rate, form.length / form.rate
        raise ValueError(f"its sound ends after {seconds:.2f} of {whole:.2f} seconds")
    if not sound.any():
        raise ValueError("its sound is silent")
    return Sound(samples=np.pad(sound, ((0, form.length - len(sound)), (0, 0))), rate=form.rate)


def _joined(making: SamplingContext, rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return (B, C, ...) tensors of rows (..., C)."""
    return torch.from_numpy(np.stack(rows)).to(making.host.device).movedim(-1, 1)
