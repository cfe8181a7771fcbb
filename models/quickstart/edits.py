"""A tiny FLUX.1 Kontext that edits images of two handwritten digits: it replaces one of them and keeps the other.
Legend: N images, H W pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.flux1 import Flux1Kontext
from flowmill.models.policies.pipeline import TextOptions
from flowmill.models.quickstart.base import Report
from flowmill.models.quickstart.corpus import HEIGHT, STAYS, WIDTH, digit_pairs, edit_text
from flowmill.models.quickstart.pretrain import as_pixels, noised, normalized_latents, train_autoencoder, train_flow
from flowmill.models.quickstart.tiny import build_tiny

#: Texts by mark, side and digit.
_TEXTS = [edit_text(digit, right, stays) for stays in STAYS for right in (False, True) for digit in "0123456789"]
#: Tokens of a text; of so many rows of the corpus the last two have a text that changes nothing.
_TOKENS, _ROWS = 5, 8
#: Channels of latents, and channels of the autoencoder's levels.
_CHANNELS, _LEVELS = 8, (8, 16, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitEditsBuilder:
    """The prompt ``7-`` replaces the digit on the left by a 7, ``-7`` the one on the right, and the other one stays;
    with any other mark, or none, both stay."""

    steps: int = 800
    """Flow-matching steps: 800 give a base model with some 85 % right edits."""
    vae_steps: int = 200
    """Autoencoder steps."""
    images: int = 6000
    """Corpus size."""

    family: ClassVar[str] = "flux1_kontext"
    latents: ClassVar[tuple[int, int]] = (_CHANNELS, 2 ** (len(_LEVELS) - 1))

    def build(self, folder: Path, report: Report) -> None:
        """Write a pre-trained diffusers folder."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipeline = _pipeline()
            self._pretrain(pipeline, report)
        pipeline.save_pretrained(folder)

    def _pretrain(self, pipeline: Any, report: Report) -> None:
        sources, edited, texts = _edits(self.images)
        pixels = as_pixels(np.concatenate([sources, edited]))
        train_autoencoder(pipeline.vae, pixels, self.vae_steps, report)
        options = TextOptions(max_sequence_length=_TOKENS)
        policy = Flux1Kontext(pipeline, DiffusionSettings(height=HEIGHT, width=WIDTH), options)
        started, clean = policy.packed(normalized_latents(pipeline.vae, pixels)).chunk(2)
        modules = nn.ModuleList([pipeline.transformer, pipeline.text_encoder_2]).requires_grad_(True)
        _, pooled, _ = pipeline.encode_prompt(_TEXTS, None, device="cpu", max_sequence_length=_TOKENS)
        pooled = pooled.detach()

        def loss(rows: Tensor) -> Tensor:
            embeds, chosen = pipeline._get_t5_prompt_embeds(_TEXTS, 1, _TOKENS, "cpu"), texts[rows]
            inputs = {"prompt_embeds": embeds[chosen], "pooled": pooled[chosen], "image_latents": started[rows]}
            noisy, sigma, target = noised(clean[rows])
            return F.mse_loss(policy.call({"transformer": pipeline.transformer}, noisy, sigma, inputs), target)

        train_flow(modules, loss, self.images, self.steps, report)


def _edits(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (N, H, W) uint8 images of two digits, the same after edits, and the (N,) places of their texts."""
    (_, sources), (others, drawn) = digit_pairs(count, seed=1), digit_pairs(count, seed=2)
    row = np.arange(count)
    sides, marks = row % 2, np.where(row % _ROWS < _ROWS - 2, 0, 1 + row // _ROWS % (len(STAYS) - 1))
    right = np.arange(WIDTH) >= WIDTH // 2
    changed = (right == sides[:, None]) & (marks == 0)[:, None]
    digits = [int(both[side]) for side, both in zip(sides, others, strict=True)]
    return sources, np.where(changed[:, None], drawn, sources), 20 * marks + 10 * sides + digits


def _pipeline() -> Any:
    levels = len(_LEVELS)
    transformer = {"in_channels": 4 * _CHANNELS, "num_layers": 2, "attention_head_dim": 32, "guidance_embeds": False}
    autoencoder = {
        "block_out_channels": _LEVELS,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "latent_channels": _CHANNELS,
        "mid_block_add_attention": False,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
    }
    changes: dict[str, dict[str, Any]] = {
        "transformer": {**transformer, "axes_dims_rope": [8, 12, 12]},
        "vae": autoencoder,
        "scheduler": {"use_dynamic_shifting": False, "shift": 1.0},
    }
    return build_tiny("flux1_kontext", changes=changes)
