"""The tiny unified model: built from a seed alone, with codes as Janus decodes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowmill.models.quickstart import unified
from flowmill.models.quickstart.corpus import digit_pairs
from flowmill.models.quickstart.unified import UnifiedDigitsBuilder
from flowmill.models.rewards.digits import DigitsReward


def test_equal_seeds_build_equal_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import JanusForConditionalGeneration

    monkeypatch.setattr(unified, "_CORPUS", 96)
    made, reported = [], list[str]()
    for number in range(2):
        folder = tmp_path / str(number)
        torch.manual_seed(number)
        builder = UnifiedDigitsBuilder(coder_steps=5, steps=2)
        builder.build(folder, lambda activity, done, total: reported.append(activity))
        made.append((folder / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    assert [reported.count(name) for name in ("image tokens", "language model")] == [10, 4]
    model: Any = JanusForConditionalGeneration.from_pretrained(tmp_path / "0")
    book = model.model.vqmodel.quantize.embedding.weight
    assert torch.allclose(book.norm(dim=-1), torch.ones(len(book)), atol=1e-5)


def test_first_codes_are_the_means_of_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unified, "_CODES", 2)
    torch.manual_seed(0)
    points = torch.nn.functional.normalize(torch.tensor([[1.0, 0.1], [1.0, -0.1], [-0.1, 1.0], [0.1, 1.0]]), dim=-1)
    found = unified._first_codes(points[:, None])
    assert torch.allclose(found[found[:, 0].argsort()], torch.tensor([[0.0, 1.0], [1.0, 0.0]]), atol=1e-6)


def test_narrow_digits_are_read_as_wide_ones() -> None:
    texts, gray = digit_pairs(40, seed=3, heldout=True)
    wide = np.repeat(gray[..., None], 3, -1)
    narrow = gray.reshape(40, 16, 16, 2).mean(-1).round().astype(np.uint8)
    prompts = [f'"{text}"' for text in texts]
    seen, squeezed = (DigitsReward().score(each, prompts, [{}] * 40) for each in (wide, np.stack([narrow] * 3, -1)))
    assert seen.values.mean() > 0.9
    assert np.mean(np.array(seen.notes) == np.array(squeezed.notes)) > 0.95
