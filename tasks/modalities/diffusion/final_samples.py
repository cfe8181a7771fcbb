"""Final samples: decoded media, final latents, or both, as the config stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowmill.configs.schema import RunConfig
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies.diffusion import DiffusionPolicy
from flowmill.models.policies.nan_checks import finite
from flowmill.storage.trajectories.media import Sound
from flowmill.tasks.inputs.components import decode_rows
from flowmill.tasks.modalities.media import decode_in_slices


@dataclass(frozen=True, slots=True)
class Finals:
    """The results of B samples."""

    media: np.ndarray | None
    """(B, ..., 3) uint8 images or clips; None without decoding."""
    latents: np.ndarray | None
    """(B, ...) float32 or float16; None if they are not stored."""
    sounds: np.ndarray | None = None
    """(B, N, C) int16; None if clips have no sound."""
    rate: int = 0
    """Samples per second of sounds."""

    @classmethod
    def of(cls, policy: DiffusionPolicy, final: Tensor, config: RunConfig, conditioning: Conditioning) -> Finals:
        """Decode (B, ...) final latents if the config stores media, and keep them if it stores latents.

        Only the denoised part is stored; for decoding it is joined with the clip in the conditioning.
        """
        media = config.rollout.media
        finite(final, "final latents")
        stored = final.to(getattr(torch, config.rollout.latents_dtype)).cpu().numpy() if media.latents else None
        if not media.decodes:
            return cls(None, stored)
        ends, size = policy.finished(final, conditioning), decode_rows(config)
        decoded = decode_in_slices(policy, policy.decode, ends, size).numpy()
        if policy.sound_rate is None:
            return cls(decoded, stored)
        return cls(decoded, stored, decode_in_slices(policy, policy.sounds, ends, size).numpy(), policy.sound_rate)

    def sample(self, row: int) -> dict[str, Any]:
        """Return the fields of a ``Sample`` that hold its result."""
        heard = None if self.sounds is None else Sound(samples=self.sounds[row], rate=self.rate)
        return {
            "media": None if self.media is None else self.media[row],
            "sound": heard,
            "final": None if self.latents is None else self.latents[row],
        }
