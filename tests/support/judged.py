"""Judgments for tests: images of digits in a folder, and files of preferences and ratings of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from flowmill.configs.reward_fit import FitConfig
from flowmill.models.quickstart.corpus import digit_pairs
from flowmill.models.rewards.backbones import Pixels
from flowmill.models.rewards.fitted import ABOUT, HEAD
from flowmill.models.rewards.latents import layer_tensors

#: Options of a network for images of digits.
PIXELS: dict[str, Any] = {"name": "pixels", "options": {"height": 8, "width": 16}}
#: Figures of a reward that is better than chance.
HELDOUT = {"accuracy": {"mean": 0.8, "low": 0.7, "high": 0.9, "count": 99}}


def write_images(folder: Path, count: int, seed: int = 1) -> np.ndarray:
    """Write 0.png, 1.png, ...; return the share of ink in the left half of each less that in the right half."""
    folder.mkdir(parents=True, exist_ok=True)
    _, gray = digit_pairs(count, seed)
    for number, image in enumerate(gray):
        Image.fromarray(np.repeat(image[..., None], 3, -1)).save(folder / f"{number}.png")
    ink = 1 - gray.astype(np.float64) / 255
    found: np.ndarray = ink[:, :, :16].mean((1, 2)) - ink[:, :, 16:].mean((1, 2))
    return found


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_pairs(folder: Path, count: int, *, random: bool = False, ties: float = 0.0) -> Path:
    """Write images, and preferences for those with more ink on the left, or for either at random.

    Args:
        folder: of images and file.
        count: number of preferences; each has two images and a prompt of its own.
        random: either may be preferred.
        ties: difference of ink below which a pair is a tie.
    """
    left, draw = write_images(folder, 2 * count), np.random.default_rng(0)
    rows = []
    for number in range(count):
        pair = [2 * number, 2 * number + 1]
        better, worse = draw.permutation(pair) if random else sorted(pair, key=lambda each: -left[each])
        tie = bool(abs(left[better] - left[worse]) < ties)
        chosen, rejected = (f"{each}.png" for each in (better, worse))
        rater = ("ada", "bob", "cy")[number % 3]
        rows.append({"prompt": f"prompt {number}", "chosen": chosen, "rejected": rejected, "tie": tie, "rater": rater})
    return write_rows(folder / "pairs.jsonl", rows)


def fit_config(folder: Path, data: object, **settings: Any) -> FitConfig:
    """Return a config of a fit, with a store in a folder."""
    given = {"data": str(data), "backbone": PIXELS, "store": {"root": str(folder / "store")}, "updates": 120}
    return FitConfig.model_validate({**given, **settings})


def write_fitted(folder: Path) -> str:
    """Write a reward with random layers on images, as a fit writes it."""
    folder.mkdir()
    torch.manual_seed(0)
    backbone = Pixels(**PIXELS["options"])
    save_file(layer_tensors(backbone.head(torch.zeros(1, 3, 8, 16))), folder / HEAD)
    (folder / ABOUT).write_text(json.dumps({"backbone": PIXELS, "heldout": HELDOUT}))
    return str(folder)
