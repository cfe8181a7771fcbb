"""What sampling ends in: decoded media, final latents, or both, as the config wants them stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from configs.schema import RunConfig
from models.maths.conditioning import Conditioning
from models.meter import timed
from models.policies.diffusion import DiffusionPolicy, finite
from tasks.inputs.components import decode_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Finals:
    """The end of B samples."""

    media: np.ndarray | None
    """(B, ..., 3) uint8 images or clips; None where nothing is decoded."""
    latents: np.ndarray | None
    """(B, ...) float32 or float16; None where they are not kept."""

    @classmethod
    def of(cls, policy: DiffusionPolicy, final: Tensor, config: RunConfig, conditioning: Conditioning) -> Finals:
        """Decode (B, ...) final latents if the config wants media, and keep them if it wants latents.

        Kept is what moved; decoded are B rows with what the conditioning holds of a clip beside it.

        Raises:
            SamplingError: latents or images are not finite.
        """
        media = config.rollout.media
        finite(final, "final latents")
        kept = final.to(getattr(torch, config.rollout.latents_dtype)).cpu().numpy() if media.latents else None
        if not media.decodes:
            return cls(None, kept)
        return cls(decode_in_slices(policy, policy.finished(final, conditioning), decode_rows(config)).numpy(), kept)

    def sample(self, row: int) -> dict[str, Any]:
        """Return the fields of a ``Sample`` about its end."""
        return {
            "media": None if self.media is None else self.media[row],
            "final": None if self.latents is None else self.latents[row],
        }


def decode_in_slices(policy: DiffusionPolicy, latents: Tensor, size: int) -> Tensor:
    """Return the images or clips of (B, ...) final latents, uint8 on the CPU, decoded ``size`` rows at a time.

    Every slice has exactly so many rows, the last one padded: kernels differ with the number of rows.
    """
    padding = latents[-1:].expand(-len(latents) % size, *latents.shape[1:])
    parts = torch.cat([latents, padding]).split(size)
    with timed(policy.meter):
        return torch.cat([policy.decode(part).cpu() for part in parts])[: len(latents)]
