"""What commands ask of a store does not grow with the shards of an artifact, nor with the runs that are locked."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from flowmill.configs.errors import CorruptError
from flowmill.storage import layout
from flowmill.storage.artifacts import lineage
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry, RunFolder, at_rest
from flowmill.storage.backends.local import LocalBackend
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance import verify
from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals, remove
from flowmill.storage.maintenance.verify import list_artifacts, verify_store
from flowmill.storage.trajectories.tables import TABLES, read_rows, write_rows

REF = ArtifactRef("rewards", "f" * 32)
ORIGIN = {"stage": "score", "stage_version": 1, "options": {}, "inputs": ()}


class CountedRoot(LocalBackend):
    """Counts what would be requests to a server, one for objects that are requested together."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.requests: Counter[str] = Counter()
        for name in ("read", "read_many", "list", "files", "remove", "remove_below", "create"):
            setattr(self, name, self._counted(name, getattr(super(), name)))

    def _counted(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object) -> object:
            self.requests[name] += 1
            before = self.requests.copy()
            answer = call(*arguments)
            self.requests = before
            return answer

        return counted


def store_of(folder: Path, shards: int) -> ArtifactStore:
    """Return a store with a run of one artifact with some shards; its requests are counted from now on."""
    store = ArtifactStore(CountedRoot(str(folder)))
    for number in range(shards):
        with store.root.staging() as staging:
            names = {name: [f"{name}{number}"] for name in ("sample_id", "prompt_id", "group_id")}
            labels = {"reward_name": "r", "reward_options": "{}", "artifact": "trajectories/x"}
            write_rows("rewards", staging, {**names, "reward": [float(number)], "note": [""]}, labels)
            store.commit(REF, f"{number:05d}", staging, rows=1)
    store.seal(REF, shards=[f"{number:05d}" for number in range(shards)], summary={}, **ORIGIN)
    run = RunFolder(store, "r")
    run.create({"config": {}, "prompts": "p"})
    run.append(LineageEntry(epoch=1, stage="score", slot="", artifact=str(REF)))
    store.root.requests.clear()  # type: ignore[attr-defined]
    return store


def collect(store: ArtifactStore) -> None:
    for removal in plan_removals(store, Retention(forget=["r"], older_than_s=-1)):
        remove(store, removal)


@pytest.mark.parametrize(
    "work",
    [
        lambda store: verify_store(store, deep=False),
        lambda store: list_artifacts(store, lambda artifact: False),
        list_artifacts,
        collect,
        lambda store: store.shards(REF),
    ],
    ids=["verify", "list", "list with ages", "collect", "shards"],
)
def test_requests_do_not_grow_with_shards(tmp_path: Path, work: Callable[[ArtifactStore], object]) -> None:
    counts = []
    for shards in (2, 20):
        store = store_of(tmp_path / str(shards), shards)
        work(store)
        counts.append(store.root.requests)  # type: ignore[attr-defined]
    assert counts[0] == counts[1]
    assert 0 < sum(counts[0].values()) < 60


def test_a_listing_without_ages_reads_no_record_and_says_the_same(tmp_path: Path) -> None:
    store = store_of(tmp_path, 3)
    (aged,) = list_artifacts(store)
    for path in (tmp_path / layout.records(REF)).iterdir():
        path.write_bytes(b"damaged")
    (quick,) = list_artifacts(store, lambda artifact: False)
    assert {**aged, "age_s": None} == quick
    with pytest.raises(CorruptError):
        list_artifacts(store)


def test_verify_reads_records_in_batches_and_names_each_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_TOGETHER", 4)
    store = store_of(tmp_path, 10)
    damaged = layout.record(REF, "00005")
    (tmp_path / damaged).chmod(0o600)
    (tmp_path / damaged).write_bytes(b"{}")
    next((tmp_path / REF.path).glob("00007-*/*")).unlink()
    found = verify_store(store, deep=True)
    kinds = [(each["shard"], each["kind"]) for each in found["found"]]
    assert kinds == [("00005", "corrupt"), ("00007", "missing"), ("00005", "missing"), (None, "orphaned")]
    assert found["files"] == 9


def test_many_shards_are_read_into_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.storage.trajectories.tables._TOGETHER", 4)
    rows = read_rows(store_of(tmp_path, 11), REF)
    assert rows.column("reward").num_chunks == 2 + 3
    assert rows.column("reward").to_pylist() == list(range(11))
    assert REF.kind in TABLES


def test_appending_to_a_long_lineage_reads_no_number_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, counts = RunFolder(ArtifactStore(str(tmp_path)), "r"), []
    numbers = Mock(wraps=lineage.number_of)
    monkeypatch.setattr(lineage, "number_of", numbers)
    for epoch in range(1, 41):
        before = numbers.call_count
        run.append(LineageEntry(epoch=epoch, stage="score", slot="", artifact=str(REF)))
        counts.append(numbers.call_count - before)
    assert counts[-1] <= counts[1]


@contextmanager
def few_files(count: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_runs_are_at_rest_than_files_may_be_open_at_first(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    for number in range(40):
        RunFolder(store, f"r{number}").create({"config": {}})
    opened = len(os.listdir("/proc/self/fd"))
    with few_files(max(map(int, os.listdir("/proc/self/fd"))) + 10), at_rest(store):
        assert len(os.listdir("/proc/self/fd")) >= opened + 40
