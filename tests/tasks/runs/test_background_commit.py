"""Shards are written and committed while the next are worked on; failures there are reported like others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import Sample
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from flowmill.tasks.runs.background_commit import BackgroundCommit
from flowmill.tasks.runs.context import Recent
from flowmill.tasks.runs.progress import Ledger
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.stages import StageSpec
from flowmill.tasks.stages.shard_writer import ShardWriter
from flowmill.tasks.stages.stage import Output, Shard, Stage
from flowmill.tasks.stages.stage_run import StageRun

SHARDS = [Shard(f"{number:06d}") for number in range(3)]


class Numbers(Stage):
    """Writes its shards' names; ``written`` of a shard waits for what a test gives."""

    separable = True

    def __init__(self, store: ArtifactStore, written: Callable[[Shard], None], began: Callable[[Shard], None]) -> None:
        context: Any = SimpleNamespace(store=store, ledger=Ledger(), recent=Recent())
        host: Any = None
        spec = StageSpec(name="numbers", stage="tests:Numbers", artifact="rewards", scope="epoch")
        super().__init__(spec, context, Node(1, "numbers"), lambda node: None)
        self.bind(context, host)
        self._ref, self._inputs = ArtifactRef("rewards", "a" * 32), ()
        self._written, self._began = written, began

    def options(self) -> dict[str, Any]:
        return {}

    def upstream(self) -> tuple[Node, ...]:
        return ()

    def shards(self) -> list[Shard]:
        return SHARDS

    def run(self, shard: Shard, folder: Path) -> Output:
        self._began(shard)

        def written() -> Sequence[FileEntry]:
            self._written(shard)
            (folder / "name").write_text(shard.name)
            return []

        return Output(rows=1, written=written)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path))


def test_a_shard_is_committed_while_the_next_is_worked_on(store: ArtifactStore) -> None:
    began = {shard.name: threading.Event() for shard in SHARDS}

    def next_began(shard: Shard) -> None:
        later = SHARDS[SHARDS.index(shard) + 1 :]
        assert not later or began[later[0].name].wait(30), "the next shard waits for this one"

    run = StageRun(Numbers(store, next_began, lambda shard: began[shard.name].set()))
    reported: list[str] = []
    assert run.run_shards(SHARDS, on_commit=reported.extend) == [shard.name for shard in SHARDS]
    assert store.committed(run.ref) == reported == [shard.name for shard in SHARDS]
    assert not list((Path(store.root.uri) / ".staging").iterdir())


def test_one_after_the_other_where_a_shard_may_need_another(store: ArtifactStore) -> None:
    done: list[str] = []
    stage = Numbers(store, lambda shard: done.append(f"{shard.name} written"), lambda shard: done.append(shard.name))
    stage.separable = False  # type: ignore[misc]
    StageRun(stage).run_shards(SHARDS[:2])
    assert done == ["000000", "000000 written", "000001", "000001 written"]


def test_what_fails_behind_is_raised_and_named(store: ArtifactStore) -> None:
    def full(shard: Shard) -> None:
        if shard is SHARDS[1]:
            raise OSError(5, "a bad sector")

    run = StageRun(Numbers(store, full, lambda shard: None))
    with pytest.raises(OSError, match="a bad sector") as reported:
        run.run_shards(SHARDS)
    assert run.failed(reported.value) is SHARDS[1]
    assert store.committed(run.ref) == [SHARDS[0].name, SHARDS[2].name], "what was made meanwhile is not thrown away"
    assert run.pending() == [SHARDS[1]]
    assert not list((Path(store.root.uri) / ".staging").iterdir())


def test_what_was_begun_is_committed_though_the_next_fails(store: ArtifactStore) -> None:
    def broken(shard: Shard) -> None:
        if shard is SHARDS[1]:
            raise ValueError("a bug")

    run = StageRun(Numbers(store, lambda shard: None, broken))
    with pytest.raises(ValueError, match="a bug") as reported:
        run.run_shards(SHARDS)
    assert run.failed(reported.value) is SHARDS[1]
    assert store.committed(run.ref) == [SHARDS[0].name]


def test_of_two_failures_the_earlier_is_told(store: ArtifactStore) -> None:
    began = threading.Event()

    def full(shard: Shard) -> None:
        assert began.wait(30)
        raise OSError(5, "a bad sector")

    def broken(shard: Shard) -> None:
        if shard is SHARDS[1]:
            began.set()
            raise ValueError("a bug")

    run = StageRun(Numbers(store, full, broken))
    with pytest.raises(OSError, match="a bad sector") as reported:
        run.run_shards(SHARDS)
    assert run.failed(reported.value) is SHARDS[0]


def test_committed_shards_are_passed_on(store: ArtifactStore) -> None:
    began: list[str] = []
    run = StageRun(Numbers(store, lambda shard: None, lambda shard: began.append(shard.name)))
    run.run_shard(SHARDS[0])
    reported: list[str] = []
    assert run.run_shards(iter(SHARDS), on_commit=reported.extend) == [shard.name for shard in SHARDS]
    assert reported == began == [shard.name for shard in SHARDS]


def test_samples_are_written_behind_and_errors_are_not_lost(tmp_path: Path) -> None:
    sample = Sample(
        sample_id="s", prompt_id="p", group_id="p", prompt="", epoch=1, replica=0, seed=0, policy="", sigmas=[1.0, 0.0]
    )
    sample = replace(sample, media=np.zeros((2, 3, 3), np.uint8))
    shown: list[np.ndarray] = []
    with ShardWriter(WebDatasetStore().writer(tmp_path), shown.extend) as writer:
        writer.add([sample])
        known = writer.end()()
    assert [(entry.name, entry.size) for entry in known] == [("samples.tar", (tmp_path / "samples.tar").stat().st_size)]

    assert [each.shape for each in shown] == [(2, 3, 3)]

    class Broken:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def add(self, samples: Sequence[Sample]) -> None:
            self.calls.append("add")
            raise OSError(28, "no space")

        def end(self) -> Sequence[FileEntry]:
            self.calls.append("end")
            return []

    for last in (lambda writer: writer.add([sample]), lambda writer: writer.end()):
        broken = Broken()
        with ShardWriter(broken, shown.extend) as writer:
            writer.add([sample])
            with pytest.raises(OSError, match="no space"):
                last(writer)
        assert broken.calls == ["add"], "after what failed nothing is written"


def test_never_more_than_one_thing_behind() -> None:
    gate, begun = threading.Event(), threading.Event()
    with BackgroundCommit() as behind:
        behind.do(gate.wait)
        threading.Timer(0.05, gate.set).start()
        behind.do(begun.set)
        assert gate.is_set(), "the second began while the first was not done"
    assert begun.is_set()


def test_media_are_kept_as_long_as_there_is_room() -> None:
    ref, image = ArtifactRef("trajectories", "a" * 32), np.zeros((10, 10, 3), np.uint8)
    recent = Recent(1000)
    add = recent.begin(ref, "first", exact=True)
    add([image])
    assert recent.find(ref, "first", 2) is None, "a row of two"
    add([image])
    found = recent.find(ref, "first", 2)
    assert found is not None
    assert len(found) == 2
    recent.begin(ref, "lossy", exact=False)([image])
    assert recent.find(ref, "lossy", 1) is None
    second = recent.begin(ref, "second", exact=True)
    second([image, image])
    assert recent.find(ref, "first", 2) is None, "the oldest made room"
    second([image, image])
    assert recent.find(ref, "second", 4) is None, "it is too large itself"
    recent.begin(ref, "again", exact=True)([image])
    add = recent.begin(ref, "again", exact=True)
    assert recent.find(ref, "again", 1) is None, "another attempt at it has begun"
    add([image])
    assert recent.find(ref, "again", 1) is not None
    recent.forget(ref, "again")
    assert recent.find(ref, "again", 1) is None


def test_media_of_older_artifacts_are_let_go() -> None:
    image, recent = np.zeros((10, 10, 3), np.uint8), Recent()
    old, new = (ArtifactRef("trajectories", letter * 32) for letter in "ab")
    other = ArtifactRef("evaluations", "c" * 32)
    for ref in (old, other, new):
        recent.begin(ref, "shard", exact=True)([image])
    kept = [recent.find(ref, "shard", 1) is not None for ref in (old, other, new)]
    assert kept == [False, True, True]
