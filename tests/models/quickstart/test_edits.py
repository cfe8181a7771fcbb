"""The data that the quickstart's edit model, and the model that writes its texts, are pre-trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.flux1 import Flux1Kontext
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart import vision
from flowmill.models.quickstart.corpus import digit_pairs
from flowmill.models.quickstart.edits import _TEXTS, DigitEditsBuilder, _edits
from flowmill.models.quickstart.vision import LEFT, RIGHT, DigitEnhancerBuilder


def test_a_text_of_the_first_mark_changes_its_side_and_others_change_nothing() -> None:
    sources, edited, texts = _edits(64)
    digits, drawn = digit_pairs(64, seed=2)
    written = [_TEXTS[text] for text in texts]
    assert {text.strip("0123456789") for text in written} == {"-", "_", "=", "/", ""}
    for row, text in enumerate(written):
        wanted = sources[row].copy()
        if "-" in text:
            half = slice(16, None) if text[0] == "-" else slice(16)
            wanted[:, half] = drawn[row][:, half]
            assert text.strip("-") == digits[row][text[0] == "-"]
        np.testing.assert_array_equal(edited[row], wanted)


def test_the_policy_writes_the_digit_that_is_copied_in_five_forms() -> None:
    builder = DigitEnhancerBuilder()
    assert builder._texts("47", RIGHT) == [(RIGHT, text) for text in ("-4", "_4", "=4", "/4", "4")]
    assert builder._texts("47", LEFT) == [(LEFT, text) for text in ("7-", "7_", "7=", "7/", "7")]


def test_both_models_are_built_and_read_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DigitEditsBuilder(steps=2, vae_steps=2, images=64).build(tmp_path / "edits", lambda label, done, total: None)
    settings = DiffusionSettings(height=16, width=32)
    policy = Flux1Kontext.load(tmp_path / "edits", settings, frozenset(Part), {"max_sequence_length": 5})
    _, (gray, other) = digit_pairs(2, seed=0)
    images = [[np.repeat(each[..., None], 3, -1)] for each in (gray, other)]
    rows = policy.encode(["-4", "-4"], images)
    assert rows["image_latents"].shape == (2, 8, 32)
    assert not rows["image_latents"][0].equal(rows["image_latents"][1])
    assert rows["prompt_embeds"][0].equal(rows["prompt_embeds"][1])
    monkeypatch.setattr(vision, "PACE", replace(vision.PACE, every=1))
    monkeypatch.setattr(vision, "IMAGES", 300)
    DigitEnhancerBuilder(accuracy=1e-6).build(tmp_path / "lm", lambda label, done, total: None)
    assert (tmp_path / "lm" / "preprocessor_config.json").is_file()
