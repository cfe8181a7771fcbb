"""Wan 2.2 TI2V-5B text to video (WanPipeline with ``expand_timesteps``).

One transformer, an autoencoder with 16 pixels and 48 channels per latent, and a time input for each token.

Without a start image all tokens have the same noise level, so steps and log-probs work as in other families.
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
    """Adapter for WanPipeline with a time input per token; latents are (B, 48, f, h, w)."""

    family = "wan22_ti2v"
    expands_timesteps = True
    size_unit = 32

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        frames, height, width = latents.shape[2:]
        # The pipeline uses every second latent of a mask, which is all ones without an image.
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
