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


def test_a_stage_that_is_found_says_so() -> None:
    made = StageResult(Node(1, "score", "digits"), "rewards/ab", {"": 0.5})
    found = StageResult(made.node, made.artifact, made.means, reused=True)
    assert str(made) == "score[digits]@1 rewards/ab (mean 0.500)"
    assert str(found) == f"{made} found, not computed again"
