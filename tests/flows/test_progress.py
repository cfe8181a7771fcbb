"""The lines of a run in a log."""

from __future__ import annotations

import pytest

from flowmill.flows.progress import Lines
from flowmill.tasks.metrics.describe import StageResult
from flowmill.tasks.specs.graph import Node


def test_what_is_found_is_not_shown_as_trained(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(5) as lines:
        for epoch in (1, 2, 3):
            lines.progress("found", epoch, epoch, 5, "digits 0.1")
        lines.progress("pipeline", 4, 4, 5, "reward digits 0.2")
        lines.progress("found", 5, 5, 5, "digits 0.3")
    said = [line.split(" s  ")[1].strip() for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "epochs 1 to 3 were found committed: not trained again",
        "epoch 4/5  reward digits 0.2",
        "epoch 5 was found committed: not trained again",
    ]


def test_each_variant_of_a_sweep_has_a_time_left_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("flowmill.flows.progress.time.monotonic", lambda: now[0])
    lines = Lines(3)
    for _ in ("a", "b"):
        lines.progress("found", 1, 1, 5)
        for epoch in (2, 3, 5):
            now[0] += 60.0 if epoch < 5 else 600.0
            lines.progress("evaluate", epoch, 1, 1, "heldout")
            lines.progress("evaluate", epoch, 1, 1, "heldout")
            lines.progress("pipeline", epoch, epoch, 5)
    said = [line.split(" s  ")[1].split() for line in capsys.readouterr().out.splitlines()]
    variant = [
        ["epoch", "1", "was", "found", "committed:", "not", "trained", "again"],
        ["epoch", "2", "evaluate:", "heldout", "done"],
        ["epoch", "2/5"],
        ["epoch", "3", "evaluate:", "heldout", "done"],
        ["epoch", "3/5", "2", "min", "0", "s", "left"],
        ["epoch", "5", "evaluate:", "heldout", "done"],
        ["epoch", "5/5", "0.0", "s", "left"],
    ]
    assert said == variant * 2


def test_a_stage_that_is_found_says_so() -> None:
    made = StageResult(Node(1, "score", "digits"), "rewards/ab", {"": 0.5})
    found = StageResult(made.node, made.artifact, made.means, reused=True)
    assert str(made) == "score[digits]@1 rewards/ab (mean 0.500)"
    assert str(found) == f"{made} found, not computed again"
