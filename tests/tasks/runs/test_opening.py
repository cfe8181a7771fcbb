"""A started run writes the records that it lost again."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.quarantine import quarantine
from flowmill.storage.maintenance.verify import find_problems
from flowmill.tasks.runs.opening import begin_run, find_run, finished_result, mark_finished
from flowmill.tasks.runs.state import note_state
from tests.conftest import ConfigFactory
from tests.support.inside import prepare


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
