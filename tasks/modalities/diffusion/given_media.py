"""Given images and clips as samples: encoded by the autoencoder of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from models.policies.diffusion import DiffusionPolicy
from models.policies.nan_checks import finite, noise_levels
from storage.trajectories.base import Sample
from tasks.inputs.components import decode_rows
from tasks.modalities.given import GivenSample
from tasks.modalities.media import decode_in_slices
from tasks.modalities.samplers import SamplingContext


def given_media(making: SamplingContext, samples: Sequence[GivenSample], media: Sequence[np.ndarray]) -> list[Sample]:
    """Return given images or clips as samples that end in their latents."""
    config = making.config
    policy = cast(DiffusionPolicy, making.host.decoding())
    kept: dict[int, np.ndarray] = {}
    for shape in dict.fromkeys(each.shape for each in media):
        rows = [row for row, each in enumerate(media) if each.shape == shape]
        pixels = torch.from_numpy(np.stack([media[row] for row in rows])).to(making.host.device).movedim(-1, 1)
        with torch.no_grad():
            latents = decode_in_slices(policy, lambda part: _encoded(policy, part), pixels, decode_rows(config))
        finite(latents, "latents of given samples")
        kept |= zip(rows, latents.to(getattr(torch, config.rollout.latents_dtype)).numpy(), strict=True)
    # The chain ends at level 0: given latents are clean, whatever the last level of the family's schedule.
    sigmas = [*noise_levels(policy, config.rollout.steps).tolist()[:-1], 0.0]
    return [
        Sample(
            **sample.columns(),
            sigmas=sigmas,
            states=[config.rollout.steps],
            latents=kept[row][None],
            media=media[row] if config.rollout.media.decodes else None,
        )
        for row, sample in enumerate(samples)
    ]


def _encoded(policy: DiffusionPolicy, pixels: torch.Tensor) -> torch.Tensor:
    return policy.encode_media(pixels.float() / 127.5 - 1)
