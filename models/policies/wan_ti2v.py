"""Wan 2.2 TI2V-5B text to video (WanPipeline with ``expand_timesteps``).

One transformer, an autoencoder of 16 pixels and 48 channels a latent, and time as an input of each token.

Without an image to start from all tokens have one noise level, so that steps and log-probs are those of other families.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from models.library_loading import read_json
from models.policies.pipeline import Rows
from models.policies.wan import Wan

if TYPE_CHECKING:
    from torch import Tensor, nn


class Wan22TI2V(Wan):
    """Adapter for WanPipeline with a time for each token; latents are (B, 48, f, h, w)."""

    family = "wan22_ti2v"
    expands_timesteps = True
    size_unit = 32

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        frames, height, width = latents.shape[2:]
        # The pipeline takes every second latent of a mask, which is all ones without an image.
        tokens = frames * ((height + 1) // 2) * ((width + 1) // 2)
        return module(  # type: ignore[no-any-return]
            hidden_states=latents,
            timestep=(sigma * 1000)[:, None].expand(-1, tokens),
            encoder_hidden_states=rows["prompt_embeds"],
            return_dict=False,
        )[0]

    @classmethod
    def unit_of(cls, folder: Path) -> int:
        """Return the unit of height and width."""
        vae, transformer = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
        return int(vae["scale_factor_spatial"] * transformer["patch_size"][1])
