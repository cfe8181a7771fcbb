"""The comparison with Flow-GRPO: and with the bare compute, refused where it is not the same work."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowmill.configs.load import parse_config
from flowmill.tasks.checks.check import check_config
from tools.benchmarks import __main__ as bench
from tools.benchmarks import bare, flow_grpo, page, peers
from tools.benchmarks.work import PROMPTS, WORK, build_base

COUNTED: dict[str, dict[str, Any]] = {
    peers.THEIRS: {"cpu": 10.0, "peak": 2000.0, "with_gradient": 1152, "without": 1280},
    "flowmill, conditional": {"cpu": 7.0, "peak": 1000.0, "with_gradient": 576, "without": 2112},
}


def test_equal_work_is_compared_in_pairs() -> None:
    peers.check_work(COUNTED)
    slower = {**COUNTED, peers.THEIRS: {**COUNTED[peers.THEIRS], "cpu": 14.0}}
    text = peers.table([COUNTED, slower])
    assert "| flowmill, conditional | 7.0 | 0.70 (0.50 to 0.70) |  | 1000 | 576 | 2112 |" in text


@pytest.mark.parametrize("side", list(COUNTED))
def test_other_work_is_not_compared(side: str) -> None:
    other = {**COUNTED, side: {**COUNTED[side], "without": 1279}}
    with pytest.raises(SystemExit, match="not the same work"):
        peers.check_work(other)


def test_without_a_checkout_it_is_compared_with_the_bare_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flowmill, conditional"
    monkeypatch.setattr(peers, "build_base", lambda folder: None)
    monkeypatch.setattr(peers, "ours", lambda base, variant: COUNTED[name])
    alone = {**COUNTED[name], "without": 1856}
    monkeypatch.setattr(peers, "bare", lambda base, variant, plain: {**alone, "cpu": 7.0 if plain else 5.0})
    text = peers.compare(None, 2, [name])
    assert f"| {name} | 7.0 |  | 1.40 (1.40 to 1.40) | 1000 |" in text
    assert "| bare compute, conditional, peft's adapters | 7.0 |" in text


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


def test_epochs_end_where_they_should() -> None:
    stop = flow_grpo.Epochs(2)
    stop.marks, stop.rows = [], SimpleNamespace(counted=lambda: {"without": 7})
    # Never an evaluation; the end before a third epoch.
    assert [epoch % stop for epoch in range(2)] == [1, 1]
    with pytest.raises(flow_grpo.Done):
        2 % stop
    assert len(stop.marks) == 3
    assert stop.marks[-1]["without"] == 7


def test_of_ours_every_epoch_but_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowmill.tasks.tracking.tracker import Tracker
    from tools.benchmarks import ours

    logged: list[int] = []
    monkeypatch.setattr(Tracker, "log_epoch", lambda self, epoch: logged.append(epoch))
    taken = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(ours, "cpu_of_all", lambda: next(taken))
    rows = iter([{"without": 4}, {"without": 9}, {"without": 15}])
    marks = ours.Marks(SimpleNamespace(counted=lambda: next(rows)))  # type: ignore[arg-type]
    for epoch in (1, 2, 3):
        Tracker.log_epoch(None, epoch)  # type: ignore[arg-type]
    assert logged == [1, 2, 3]
    assert marks.epochs() == [{"cpu": 2.0, "without": 5}, {"cpu": 3.0, "without": 6}]


def test_rows_are_counted_with_and_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.benchmarks import work

    class Model:
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    monkeypatch.setattr(work.diffusers, "SD3Transformer2DModel", Model)
    rows = work.Rows()
    Model().forward(torch.zeros(3, 2))
    with torch.no_grad():
        Model().forward(torch.zeros(5, 2))
    assert rows.counted() == {"with_gradient": 3, "without": 5}


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
