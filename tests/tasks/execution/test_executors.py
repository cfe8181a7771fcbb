"""Every executor runs the shards it is given, and names those that it committed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from flowmill.flows import process_state, stages
from flowmill.tasks.execution.executor import Executor, Listener
from flowmill.tasks.execution.process_executor import ProcessExecutor
from flowmill.tasks.execution.rank_executor import RankExecutor
from flowmill.tasks.execution.session import Session
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage_run import StageRun
from tests.support.inside import Make, prepare, session_of

EXECUTORS: dict[str, Callable[[Session], Executor]] = {
    "processes": ProcessExecutor,
    "tasks": stages.TaskExecutor,
    "ranks": RankExecutor,
}


@pytest.mark.parametrize("name", ["processes", "tasks", pytest.param("ranks", marks=pytest.mark.slow)])
def test_an_executor_names_the_shards_that_it_committed(
    name: str, make_config: Make, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "ranks":
        request.getfixturevalue("forked_ranks")
    # Without a Prefect server the function of a task is called.
    monkeypatch.setattr(stages, "shards_task", lambda run, shards: stages.run_shards.fn)
    with closing(session_of(prepare(make_config("rollout.groups_per_shard=1")))) as session:
        run = StageRun(session.stage(Node(1, "rollout")))
        executor, heard = session.executor(EXECUTORS[name]), list[str]()
        assert session.executor(EXECUTORS[name]) is executor
        with process_state.opened(session.context):
            names = executor.run(run, run.pending(), Listener(on_commit=heard.extend))
        assert sorted(names) == sorted(heard) == [shard.name for shard in run.stage.shards()]
        assert run.pending() == []


def test_a_closed_session_makes_its_executors_again(make_config: Make) -> None:
    session = session_of(prepare(make_config()))
    first = session.executor(ProcessExecutor)
    session.close()
    assert session.executor(ProcessExecutor) is not first
