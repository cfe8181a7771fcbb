"""The work that ``tools.benchmarks.peers`` gives to everybody: a small Stable Diffusion 3, and what is done with it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import torch

from flowmill.models.quickstart.tiny import build_tiny

#: 64 images of 128 x 128 per epoch, guidance, nine of ten steps trained, two updates.
WORK: dict[str, Any] = {
    "prompts_per_epoch": 8,
    "group_size": 8,
    "steps": 10,
    "guidance_scale": 4.5,
    "size": 128,
    "batch": 8,
    "updates_per_epoch": 2,
    "learning_rate": 3e-4,
    "text_tokens": 128,
    "lora": {"rank": 32, "alpha": 64},
}
PROMPTS = [f"a {color} {shape}" for color in ("red", "green", "blue", "yellow") for shape in ("cube", "circle", "cat")]


def build_base(folder: Path) -> None:
    """Write the base model: 2.3 M parameters of random weights behind tiny text encoders."""
    pipeline = build_tiny("sd3")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline.transformer = diffusers.SD3Transformer2DModel(
            sample_size=16,
            in_channels=16,
            out_channels=16,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=128,
            pooled_projection_dim=64,
            pos_embed_max_size=32,
            qk_norm="rms_norm",
        )
    pipeline.save_pretrained(folder)


class Rows:
    """Counts the rows that pass through the denoisers of this process, with and without gradient."""

    def __init__(self) -> None:
        """Count from now on."""
        self._rows: Counter[bool] = Counter()
        forward = diffusers.SD3Transformer2DModel.forward
        rows = self._rows

        def counted(module: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            rows[torch.is_grad_enabled()] += len(hidden_states)
            return forward(module, hidden_states, *arguments, **options)

        diffusers.SD3Transformer2DModel.forward = counted

    def counted(self) -> dict[str, int]:
        """Return how many."""
        return {"with_gradient": self._rows[True], "without": self._rows[False]}
