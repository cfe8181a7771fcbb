"""Runs of the algorithm that was called 'kto' are read, and go on, as those of 'apo_zero'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowmill.configs.errors import RunConflictError
from flowmill.configs.schema import RunConfig
from flowmill.tasks.runs import opening
from flowmill.tasks.runs.opening import begin_run, find_run, finished_result, mark_finished, open_run
from flowmill.tasks.runs.staleness import Freshness, status_of
from flowmill.tasks.specs.graph import Node
from tests.support.inside import Make, make_stage, prepare, run_epoch

RATED = ["rollout.plan={name: final}", "run.epochs=2"]


def named(make_config: Make, name: str) -> RunConfig:
    return make_config(*RATED, f"optimize.algorithm={{name: {name}, options: {{beta: 20, times: {{count: 2}}}}}}")


@pytest.fixture
def earlier(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A finished run as version 2 of the record has it."""
    recorded = opening.recorded

    def as_before(config: RunConfig) -> dict[str, Any]:
        found = recorded(config)
        found["optimize"]["algorithm"]["name"] = "kto"
        return found

    config = named(make_config, "apo_zero")
    with monkeypatch.context() as patch:
        patch.setattr(opening, "recorded", as_before)
        patch.setattr(opening, "RUN_VERSION", 2)
        context = prepare(config)
        for epoch in (1, 2):
            run_epoch(context, epoch)
        mark_finished(context, {"epochs": 2})
    stored = context.store.root.read("runs/small/run.json")
    assert stored is not None
    assert b'"kto"' in stored
    assert b"apo_zero" not in stored
    return config


def test_an_earlier_run_is_read_and_goes_on(earlier: RunConfig, make_config: Make) -> None:
    context = open_run(str(earlier.store.root), "small")
    assert context.config.optimize.algorithm.name == "apo_zero"
    assert [status_of(context.chain, Node(epoch, "optimize")).state for epoch in (1, 2)] == [Freshness.FRESH] * 2
    assert finished_result(context) == {"epochs": 2}
    assert begin_run(earlier).config == earlier
    with pytest.raises(RunConflictError, match=r"optimize.algorithm.name: 'apo_zero' -> 'kto'"):
        find_run(named(make_config, "kto"))


def test_the_two_make_other_artifacts(make_config: Make, tmp_path: Path) -> None:
    names = {}
    for name in ("kto", "apo_zero"):
        context = prepare(make_config(f"store.root={tmp_path / name}", *RATED, f"optimize.algorithm={name}"))
        names[name] = make_stage(context, "optimize", 1).options()["optimize"]["algorithm"]["name"]
    assert names == {"kto": "kto 2", "apo_zero": "kto"}
    again = open_run(str(tmp_path / "kto"), "small")
    assert again.config.optimize.algorithm.name == "kto"
