"""The comparison with Flow-GRPO: and with the bare compute, refused where it is not the same work."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowmill.configs.load import parse_config
from flowmill.tasks.checks.check import check_config
from tools.benchmarks import __main__ as bench
from tools.benchmarks import bare, page, peers
from tools.benchmarks.work import PROMPTS, WORK, build_base

COUNTED: dict[str, dict[str, Any]] = {
    peers.THEIRS: {"cpu": 10.0, "peak": 2000.0, "with_gradient": 1152, "without": 1280},
    "flowmill, conditional": {"cpu": 7.0, "peak": 1000.0, "with_gradient": 576, "without": 1984},
}


def test_equal_work_is_compared_in_pairs() -> None:
    peers.check_work(COUNTED)
    slower = {**COUNTED, peers.THEIRS: {**COUNTED[peers.THEIRS], "cpu": 14.0}}
    text = peers.table([COUNTED, slower])
    assert "| flowmill, conditional | 7.0 | 0.70 (0.50 to 0.70) |  | 1000 | 576 | 1984 |" in text


@pytest.mark.parametrize("side", list(COUNTED))
def test_other_work_is_not_compared(side: str) -> None:
    other = {**COUNTED, side: {**COUNTED[side], "without": 1279}}
    with pytest.raises(SystemExit, match="not the same work"):
        peers.check_work(other)


@pytest.mark.parametrize("variant", list(peers.VARIANTS))
def test_the_bare_compute_has_the_rows_of_its_variant(
    variant: str,
) -> None:
    changes, counted = peers.VARIANTS[variant], {"with_gradient": 0, "without": 0}

    class Denoiser(bare.Bare):
        def __init__(self) -> None:
            pass

        def forward(self, rows: int) -> torch.Tensor:
            counted["with_gradient" if torch.is_grad_enabled() else "without"] += rows
            return torch.zeros(rows, requires_grad=torch.is_grad_enabled())

        def _step(self) -> None:
            pass

    Denoiser().epoch(**bare.form_of(changes))
    peers.check_work({peers.bare_name(variant): counted})


def test_every_variant_is_a_config_that_works(tmp_path: Path) -> None:
    build_base(tmp_path / "base")
    for variant in peers.VARIANTS.values():
        config = parse_config(peers.config(tmp_path / "base", tmp_path, 2, variant), where="peers")
        cost = check_config(config)
        assert cost.samples_per_epoch == WORK["prompts_per_epoch"] * WORK["group_size"]
        assert cost.optimize_rows == cost.samples_per_epoch * (WORK["steps"] - 1)
        assert len(PROMPTS) >= WORK["prompts_per_epoch"]


def test_every_benchmark_has_its_place_in_a_page(tmp_path: Path) -> None:
    made = bench.parts(Namespace(flow_grpo=None, rounds=1, seeds=1, write=False))
    pages = {name: bench.PAGES.get(name, bench.DOCS / "evidence.md") for name in made}
    for name, where in pages.items():
        assert f"<!-- measured: {name} -->" in where.read_text(), name
    copied = tmp_path / "evidence.md"
    copied.write_text((bench.DOCS / "evidence.md").read_text())
    page.write(copied, "epoch", "| a | b |\n", "a machine")
    text = copied.read_text()
    assert "<!-- measured: epoch -->\n\n| a | b |\n\n(a machine)\n\n<!-- end -->" in text
    page.write(copied, "epoch", "| a | c |\n", "a machine")
    assert copied.read_text() == text.replace("| a | b |", "| a | c |")
    copied.write_text(text.replace("<!-- end -->", "", 1))
    with pytest.raises(ValueError, match="has no '<!-- end -->' of its own"):
        page.write(copied, "peers", "", "")
    with pytest.raises(ValueError, match="has no '<!-- measured: nothing -->'"):
        page.write(copied, "nothing", "", "")
