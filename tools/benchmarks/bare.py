"""The compute of ``tools.benchmarks.peers`` alone: its rows through the denoiser with adapters, forward and backward.

``python -m tools.benchmarks.bare BASE CHANGES`` prints CPU seconds and rows of a second epoch. CHANGES is the
JSON of a variant of ``tools.benchmarks.peers``, which says which halves of guidance have a gradient, which predictions
are stored, and whether blocks are compiled. Adapters are merged as flowmill merges
them. Nothing else is done: no text, noise schedule, decoding, loss, reward, optimizer or file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig

from flowmill.models.policies.pipeline import compile_blocks
from flowmill.models.policies.sd3 import SD3
from flowmill.models.weights.merging import Merged
from flowmill.tasks.training.policy_moves import estimate_rows
from tools.benchmarks.work import WORK, Rows


class Bare:
    """The denoiser with its adapters, and inputs of the work's shapes."""

    def __init__(self, base: Path, *, compiled: bool) -> None:
        self._denoiser: Any = diffusers.SD3Transformer2DModel.from_pretrained(base / "transformer").eval()
        self._denoiser.requires_grad_(False)
        rank, alpha = WORK["lora"]["rank"], WORK["lora"]["alpha"]
        self._denoiser.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(SD3.lora_targets)))
        Merged([self._denoiser])
        if compiled:
            compile_blocks(self._denoiser, ())
        torch.manual_seed(0)
        config, side = self._denoiser.config, WORK["size"] // 8
        self._shapes = {
            "hidden_states": (config.in_channels, side, side),
            "encoder_hidden_states": (77 + WORK["text_tokens"], config.joint_attention_dim),
            "pooled_projections": (config.pooled_projection_dim,),
        }

    def forward(self, rows: int) -> torch.Tensor:
        """Return the predictions of so many rows of noise, (rows, channels, height, width)."""
        inputs = {name: torch.randn(rows, *shape) for name, shape in self._shapes.items()}
        prediction: torch.Tensor = self._denoiser(**inputs, timestep=torch.full((rows,), 500.0), return_dict=False)[0]
        return prediction

    def epoch(self, *, both: bool, stored: bool) -> None:
        """Sample, train and measure KLs once."""
        batch, updates = WORK["batch"], WORK["updates_per_epoch"]
        batches = WORK["prompts_per_epoch"] * WORK["group_size"] // batch
        trained = batches * (WORK["steps"] - 1)
        with torch.no_grad():
            for _ in range(batches * WORK["steps"]):
                self.forward(2 * batch)
        for number in range(trained):
            # The first update has the policy of the rollout, whose predictions are there.
            if not both and not (stored and number < trained // updates):
                with torch.no_grad():
                    self.forward(batch)
            self.forward(2 * batch if both else batch).mean().backward()  # type: ignore[no-untyped-call]
            if (number + 1) % (trained // updates) == 0:
                self._step()
        with torch.no_grad():
            # The KLs to the previous policy and to the base model need the predictions of both, with guidance.
            for _ in range(2 * estimate_rows(trained * batch) // batch):
                self.forward(2 * batch)

    def _step(self) -> None:
        """Change the adapters, so that they are merged again as after an update."""
        with torch.no_grad():
            for parameter in self._denoiser.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-6)
                    parameter.grad = None


def form_of(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Return the arguments of ``Bare.epoch`` for a variant of ``tools.benchmarks.peers``."""
    stored = changes.get("rollout", {}).get("unconditional", False)
    return {"both": changes["optimize"]["guidance_gradient"] == "both", "stored": stored}


def main() -> None:
    """Compute two epochs, and print the second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("changes", type=json.loads)
    options = parser.parse_args()
    changes: Mapping[str, Mapping[str, Any]] = options.changes
    torch.set_num_threads(1)
    rows = Rows()
    bare = Bare(options.base, compiled=changes.get("model", {}).get("compile", False))
    form = form_of(changes)
    bare.epoch(**form)
    before, begun = rows.counted(), time.process_time()
    bare.epoch(**form)
    counted = {name: count - before[name] for name, count in rows.counted().items()}
    sys.stdout.write(json.dumps({"cpu": time.process_time() - begun, **counted}) + "\n")


if __name__ == "__main__":
    main()
