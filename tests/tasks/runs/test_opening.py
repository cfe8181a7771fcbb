"""A started run writes the records that it lost again, says its state, and is read on after a name changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowmill.configs.errors import ConfigError, RunConflictError
from flowmill.configs.schema import RunConfig, StoreSection
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.quarantine import quarantine
from flowmill.storage.maintenance.verify import find_problems
from flowmill.tasks.runs import opening
from flowmill.tasks.runs.addresses import find_artifact
from flowmill.tasks.runs.locks import executing, holding
from flowmill.tasks.runs.opening import begin_run, find_run, finished_result, mark_finished, open_run
from flowmill.tasks.runs.staleness import Freshness, status_of
from flowmill.tasks.runs.state import note_state, state_of
from flowmill.tasks.specs.graph import Node
from tests.conftest import ConfigFactory
from tests.support.inside import Make, make_stage, prepare, run_epoch


def problems(root: str) -> list[str]:
    return [problem.path for problem in find_problems(ArtifactStore(root), deep=True)]


@pytest.mark.parametrize("name", ["run.json", "configs/0001.json", "needs/0001.json", "states/0002.json"])
def test_a_start_writes_a_record_again_that_is_lost_with_its_copy(make_config: ConfigFactory, name: str) -> None:
    config = make_config()
    context = prepare(config)
    note_state(context, "running")
    mark_finished(context, {})
    note_state(context, "done")
    root = context.store.root.uri
    assert problems(root) == []
    assert finished_result(begin_run(config)) == {}
    for folder in ("", "copies/"):
        Path(root, "runs", "small", folder + name).write_bytes(b"{}")
    for _ in range(2):
        for problem in find_problems(ArtifactStore(root), deep=True):
            quarantine(ArtifactStore(root), problem)
    assert problems(root) == [f"runs/small/{name}"]
    found = find_run(config)
    assert found is not None
    assert finished_result(found) is None, "it has nothing left to compute, but records to write"
    again = begin_run(config)
    note_state(again, "running")
    note_state(again, "done")
    assert problems(root) == []
    assert finished_result(again) == {}


def test_a_run_is_opened_with_the_settings_of_its_store_but_the_places_of_a_machine(make_config: Make) -> None:
    other = {"cache": "elsewhere", "cache_size": 64_000_000, "single_writer": True}
    assert {"root", *other} == set(StoreSection.model_fields), "a new setting is recorded, or belongs to a machine"
    config = make_config(*(f"store.{key}={value}" for key, value in other.items()))
    begin_run(config)
    opened = open_run(config.store.root, "small").config.store
    assert opened == config.store.model_copy(update={"cache": None})
    assert begin_run(make_config()).config.store.single_writer is False
    assert open_run(config.store.root, "small").config.store.single_writer is False, "that of the last start"


def test_running_stopped_failed_and_done(make_config: Make) -> None:
    context = prepare(make_config())
    note_state(context, "running")
    with executing(context):
        assert state_of(context, complete=False) == "running"
    with holding(context.store, context.run.name):
        note_state(context, "done")
        assert state_of(context, complete=True) == "running", "a process loads its libraries to go on"
    note_state(context, "running")
    assert state_of(context, complete=False) == "stopped", "killed"
    note_state(context, "failed", ValueError("no reward\nmore"))
    assert state_of(context, complete=False) == "failed: no reward"
    assert state_of(context, complete=True) == "done"
    remedy = f"'/{'folder/' * 20}image.png' cannot be read. Save it again, or remove its prompts."
    note_state(context, "failed", ValueError(remedy))
    assert state_of(context, complete=False) == f"failed: {remedy}", "messages end with the remedy"


def test_an_artifact_has_an_address_in_its_run(make_config: Make) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    ref = context.chain.require(1, "score", "jpeg_compressibility").ref
    for name in ("small/score@1", "small/score[jpeg_compressibility]@1", str(ref), ref.id[:9]):
        assert find_artifact(context.store, name) == ref
    assert find_artifact(context.store, "small/policy@0") == context.policy_ref(0)
    with pytest.raises(ConfigError, match=r"stage 'scores' does not exist\. Did you mean 'score'"):
        find_artifact(context.store, "small/scores@1")


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
