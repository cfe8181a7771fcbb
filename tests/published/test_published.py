"""Presets and their heads say what the publications say, and name every difference, as the rendered page does."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from flowmill.configs.load import load_config
from flowmill.tasks.checks.check import check_config
from pages.preset_page import deviations, sources
from tests.conftest import ROOT
from tools.published import PUBLISHED


def preset(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


def test_the_page_has_every_preset_with_its_source_and_differences() -> None:
    sections = dict(part.split("\n", 1) for part in f"\n{sources()}".split("\n### ")[1:])
    assert [*sections] == [*PUBLISHED]
    for name, publication in PUBLISHED.items():
        assert all(address in sections[name] for address in publication.files.values())
        rows = re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \| [^|]+ \| (.+) \|$", sections[name], re.MULTILINE)
        listed = deviations(preset(name))
        assert rows == [(key, line.published, line.ours, line.reason) for key, line in sorted(listed.items())]
        assert f"{len(publication.values()) - len(rows)} published settings are equal." in sections[name]


@pytest.mark.parametrize("line", ["# deviates: a 1 -> 2", "# deviates: a 1: why", "# deviates a 1 -> 2: why"])
def test_a_malformed_line_of_a_head_is_refused(tmp_path: Path, line: str) -> None:
    head = tmp_path / "mine.yaml"
    head.write_text("# deviates: a 1 -> 2: why\nmodel: {}\n")
    assert deviations(head)["a"].ours == "2"
    head.write_text(f"{line}\n")
    with pytest.raises(ValueError, match="is not of the form"):
        deviations(head)


def test_branching_in_full_makes_the_published_number_of_images_and_calls() -> None:
    cost = check_config(load_config(preset("flux1_tempflow")), rewards=False)
    # 48 groups of 4 trunks; 6 branches at each of 9 steps, finished in 9 + 8 + ... + 1 calls.
    assert cost.samples_per_epoch == 48 * 4 * 6 * 9 == 10368
    assert cost.rollout_forwards == 48 * 4 * (10 + 6 * sum(range(1, 10)))
    assert cost.optimize_rows == 10368
    guided = check_config(load_config(preset("qwen_image_tempflow")), rewards=False)
    assert guided.rollout_forwards == 2 * cost.rollout_forwards


def test_the_shift_dance_grpo_is_run_with_here() -> None:
    config = load_config(preset("flux1_dance"))
    tokens = (config.model.height // 16) * (config.model.width // 16)
    assert math.exp(calculate_shift(tokens)) == pytest.approx(
        float(deviations(preset("flux1_dance"))["model.options.shift"].ours), abs=5e-3
    )
