"""Orchestrating an epoch costs its number of shards, not the square of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from flowmill.flows import stages
from flowmill.flows.rollouts import EpochRollout
from flowmill.flows.stages import TaskExecutor
from flowmill.tasks.stages.rollout import ends_group
from flowmill.tasks.stages.score import ScoreStage
from flowmill.tasks.stages.stage import Shard


def test_a_task_is_given_a_bounded_number_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    given, shards = list[int](), [Shard(f"{number:06d}") for number in range(1000)]

    def shards_task(run: object, some: Sequence[Shard]) -> Callable[..., list[str]]:
        def task(job: str, offered: Sequence[tuple[str, int, int]], seconds: float) -> list[str]:
            given.append(len(offered))
            return [name for name, *_ in offered[:100]]

        return task

    monkeypatch.setattr(stages, "shards_task", shards_task)
    monkeypatch.setattr(stages, "job_of", lambda run: "")
    executor = Mock(is_spread=lambda stage: False, is_elsewhere=lambda stage: False)
    executor._session.executor.return_value.takes.return_value = False
    executor.wait.return_value = []
    names = TaskExecutor.run(executor, Mock(), shards, Mock())
    assert names == [shard.name for shard in shards]
    assert (len(given), max(given)) == (10, stages._OFFERED)


class Compared(str):
    """A name that counts how often it is compared."""

    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, other)


def test_shards_that_are_rolled_out_already_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compared, "count", 0)
    shards = [Shard(Compared(f"{number:06d}")) for number in range(500)]
    epoch = object.__new__(EpochRollout)
    run = Mock(stage=SimpleNamespace(name="score", slot="r"), pending=lambda: list(shards))
    ledger = MagicMock()
    ledger.typical.return_value = 0.0
    epoch._scores, epoch._ledger, epoch._tasks = [run], ledger, Mock(is_spread=lambda stage: False)
    epoch._rollout = Mock(pending=lambda: shards[2:], stage=Mock(shards=lambda: shards))
    epoch._work()
    ahead, rest = (call.args[1] for call in epoch._tasks.submit.call_args_list)  # type: ignore[attr-defined]
    assert (ahead, rest) == (shards[:2], shards[2:])
    assert Compared.count < 10 * len(shards)


def test_parts_of_groups_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        name
        for number in range(100)
        for name in (f"{number:06d}-{number:06d}_0002", f"{number:06d}_0002-{number + 1:06d}")
    ]
    assert ends_group(names[1])
    stage: Any = object.__new__(ScoreStage)
    monkeypatch.setattr(ScoreStage, "needs", lambda self: SimpleNamespace(groupwise=True))
    sampled = Mock(return_value=names)
    monkeypatch.setattr(ScoreStage, "sampled", sampled)
    shards = stage.shards()
    assert len(shards) == 100
    assert [part for shard in shards for part in stage.parts_of(shard)] == names
    assert sampled.call_count == 1
    assert object.__new__(ScoreStage).parts_of(shards[3]) == names[6:8]
