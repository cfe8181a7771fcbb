from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flowmill.configs.errors import CommitLostError, CorruptError, NotCommittedError, RunConflictError, StoreError
from flowmill.configs.schema import StoreSection
from flowmill.storage.artifacts import checkpoints
from flowmill.storage.artifacts.checkpoints import clear_checkpoints, commit_checkpoint, latest_checkpoint
from flowmill.storage.artifacts.checksummed_json import seal
from flowmill.storage.artifacts.collective_publish import SingleProcess
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry, RunFolder
from flowmill.storage.backends import open_backend
from flowmill.storage.backends.checksums import check_block, describe_file
from flowmill.storage.backends.local import LocalBackend, MappedFile
from flowmill.storage.layout import STAGING, ArtifactRef
from flowmill.storage.maintenance.verify import describe_artifact, list_artifacts, verify_store
from flowmill.storage.trajectories.embeddings import EmbeddingCache, EmbeddingWriter, Rows

REF = ArtifactRef("rewards", "f" * 32)
ORIGIN = {"stage": "score", "stage_version": 1, "options": {}, "inputs": ()}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


def commit(store: ArtifactStore, shard: str, content: str = "x", ref: ArtifactRef = REF) -> None:
    with store.root.staging() as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "data.bin").write_text(content)
        store.commit(ref, shard, folder, rows=1)


def test_a_shard_counts_only_with_its_record(store: ArtifactStore) -> None:
    with store.root.staging() as folder:
        (folder / "data.bin").write_text("x")
        store.root.publish(folder, f"{REF.path}/00000-abc")
    assert store.records(REF) == []
    commit(store, "00000")
    assert [record.shard for record in store.records(REF)] == ["00000"]


def test_the_manifest_needs_every_shard(store: ArtifactStore) -> None:
    commit(store, "00000")
    with pytest.raises(NotCommittedError, match="00001"):
        store.seal(REF, shards=["00000", "00001"], summary={}, **ORIGIN)
    assert store.manifest(REF) is None
    commit(store, "00001", "y")
    manifest = store.seal(REF, shards=["00000", "00001"], summary={"mean": 1.5}, **ORIGIN)
    assert (manifest.rows, manifest.size, manifest.summary) == (2, 2, {"mean": 1.5})
    assert store.manifest(REF) == manifest


def test_equal_content_commits_twice_and_other_content_loses(store: ArtifactStore) -> None:
    commit(store, "00000", "same")
    commit(store, "00000", "same")
    with pytest.raises(CommitLostError, match="committed first by another writer"):
        commit(store, "00000", "other")
    assert len(store.records(REF)) == 1
    assert store.folder(REF, store.records(REF)[0]).joinpath("inner/data.bin").read_text() == "same"
    assert verify_store(store, deep=True)["problems"] == []


def test_digest_knows_content_and_not_the_producer(tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        store = ArtifactStore(str(tmp_path / name))
        with store.root.staging() as folder:
            (folder / "data.bin").write_text("same")
            record = store.commit(REF, "0", folder, rows=1, producer={"seconds": len(name) + len(digests)})
        digests.append((record.digest, store.seal(REF, shards=["0"], summary={}, **ORIGIN).digest))
    assert digests[0] == digests[1]


def _race(arguments: tuple[str, int]) -> str:
    root, number = arguments
    store = ArtifactStore(root)
    try:
        commit(store, "00000", f"writer {number % 2}")
    except CommitLostError:
        return "lost"
    return "won"


@pytest.mark.slow
def test_racing_writers_have_one_content(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    with _processes().Pool(4) as pool:
        outcomes = pool.map(_race, [(root, number) for number in range(16)])
    store = ArtifactStore(root)
    record = store.records(REF)[0]
    content = (store.folder(REF, record) / "inner" / "data.bin").read_text()
    winner = int(content.removeprefix("writer "))
    assert [outcome == "won" for outcome in outcomes] == [number % 2 == winner for number in range(16)]
    assert verify_store(store, deep=True)["problems"] == []


def _processes() -> Any:
    """Return what starts processes that share the imports of this file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _publish_and_remove(arguments: tuple[str, int]) -> None:
    root, number = arguments
    store = LocalBackend(root)
    for _ in range(50):
        with store.staging() as folder:
            for name in range(4):
                (folder / f"{name}.bin").write_bytes(b"same")
            store.publish(folder, "artifact/shard")
        if number % 2:
            store.remove("artifact/shard")


@pytest.mark.slow
def test_publishing_what_others_remove_meanwhile(tmp_path: Path) -> None:
    with _processes().Pool(4) as pool:
        pool.map(_publish_and_remove, [(str(tmp_path), number) for number in range(4)], chunksize=1)
    assert len(list((tmp_path / "artifact").rglob("*.bin"))) in (0, 4)
    assert list((tmp_path / STAGING).iterdir()) == []


def test_published_weights_can_be_read_by_whoever_can_list_the_store(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    with backend.staging() as folder:
        save_file({"weight": torch.ones(2)}, folder / "policy.safetensors")
        backend.publish(folder, "policies/one")
    above = (tmp_path / "policies").stat().st_mode & 0o666
    assert (tmp_path / "policies/one/policy.safetensors").stat().st_mode & 0o777 == above


def test_locks_can_be_read_by_whoever_can_list_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``store gc`` of an administrator, whose umask is often 077, locks the store for all."""
    root = ArtifactStore(str(tmp_path)).root
    (tmp_path / "runs").mkdir(mode=0o755)
    before = os.umask(0o077)
    try:
        with root.lock("runs/.lock", "The store"):
            assert (tmp_path / "runs/.lock").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)

    def refused(*about: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("flowmill.storage.backends.local.os.open", refused)
    with pytest.raises(StoreError, match=r"runs/\.lock' cannot be read.*chmod -R a\+rX"):
        root.locked("runs/.lock")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_found_and_named(store: ArtifactStore, damage: str) -> None:
    commit(store, "00000", "payload")
    path = next((Path(store.root.uri) / REF.path).rglob("data.bin"))
    if damage == "flip":
        path.write_text("paYload")
    elif damage == "truncate":
        path.write_text("pay")
    else:
        path.unlink()
    fresh = ArtifactStore(store.root.uri)
    with pytest.raises(CorruptError, match=r"data\.bin"):
        fresh.folder(REF, fresh.records(REF)[0])
    problems = verify_store(fresh, deep=True)["problems"]
    assert len(problems) == 1
    assert "data.bin" in problems[0]
    assert bool(verify_store(fresh, deep=False)["problems"]) == (damage != "flip")


def test_every_block_is_checked_once_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowmill.storage.backends import mapped_file
    from flowmill.storage.backends.base import BLOCK

    checked: list[int] = []

    def spy(data: memoryview, number: int, *arguments: Any, **options: Any) -> None:
        checked.append(number)
        check_block(data, number, *arguments, **options)

    monkeypatch.setattr(mapped_file, "check_block", spy)
    root = LocalBackend(str(tmp_path / "store"))
    (tmp_path / "store" / "kind").mkdir()
    (tmp_path / "store" / "kind" / "file").write_bytes(os.urandom(2 * BLOCK + 1))
    entry = describe_file(tmp_path / "store" / "kind" / "file", "file")
    first, second = root.blob("kind", entry), root.blob("kind", entry)
    first.read(0, BLOCK)
    second.read(0, 2 * BLOCK)
    assert checked == [0, 0, 1], "until all of it is known, each reader checks what it reads"
    second.read(2 * BLOCK, 1)
    root.blob("kind", entry).read(0, 2 * BLOCK + 1)
    assert checked == [0, 0, 1, 2]
    LocalBackend(str(tmp_path / "store")).blob("kind", entry).read(0, 1)
    assert checked == [0, 0, 1, 2, 0], "another process checks for itself"


def test_newer_schema_is_refused_with_the_hint(store: ArtifactStore) -> None:
    commit(store, "00000")
    path = Path(store.root.uri) / REF.path / "_shards" / "00000.json"
    data = json.loads(path.read_text())
    sealed = {key: value for key, value in data.items() if key not in ("checksum", "format")}
    path.write_bytes(seal({**sealed, "schema_version": 99}))
    with pytest.raises(CorruptError, match="Upgrade flowmill"):
        store.records(REF)
    for damaged in ("{half", "[1]"):
        path.write_text(damaged)
        with pytest.raises(CorruptError, match="not JSON"):
            store.records(REF)


def test_unusable_roots(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--root"):
        open_backend(StoreSection(root=str(tmp_path / "file")))
    with pytest.raises(StoreError, match="no store for 'ftp://'"):
        open_backend(StoreSection(root="ftp://host/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_root(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="--root"):
        open_backend(StoreSection(root=str(tmp_path / "closed" / "store")))


def _hold(path: str, ready: object, release: object) -> None:
    with LocalBackend(path).lock("runs/r/.lock", "Run 'r'"):
        ready.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_one_process_executes_a_run(tmp_path: Path) -> None:
    context = _processes()
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), ready, release))
    holder.start()
    assert ready.wait(30)
    with (
        pytest.raises(RunConflictError, match=f"pid {holder.pid}"),
        LocalBackend(str(tmp_path)).lock("runs/r/.lock", "Run 'r'"),
    ):
        pass
    holder.kill()
    holder.join()
    with LocalBackend(str(tmp_path)).lock("runs/r/.lock", "Run 'r'"):
        pass


def entry(artifact: str, epoch: int = 1, stage: str = "score") -> LineageEntry:
    return LineageEntry(epoch=epoch, stage=stage, slot="", artifact=artifact)


def test_lineage_keeps_history_in_order(store: ArtifactStore) -> None:
    run = RunFolder(store, "r")
    for artifact in ("rewards/a", "rewards/a", "rewards/b", "rewards/a"):
        run.append(entry(artifact))
    assert [e.artifact for e in run.entries()] == ["rewards/a", "rewards/b", "rewards/a"]
    fresh = RunFolder(store, "r")
    assert fresh.entries_of(*entry("rewards/a").key) == run.entries()
    assert fresh.entries_of(3, "rollout") == []
    run.append(entry("rewards/c"))
    assert fresh.entries() != run.entries()
    fresh.refresh()
    assert fresh.entries() == run.entries()


def test_a_series_keeps_every_record_and_shows_the_newest(store: ArtifactStore) -> None:
    run = RunFolder(store, "r")
    assert run.config() is None
    assert run.create({"config": {"run": {"epochs": 1}}})
    assert run.config() == {"run": {"epochs": 1}}
    for epochs in (2, 2, 3, 2):
        run.add("configs", {"run": {"epochs": epochs}})
    assert store.root.list("runs/r/configs") == ["0001.json", "0002.json", "0003.json"]
    assert RunFolder(store, "r").config() == {"run": {"epochs": 2}}


def encode(cache: EmbeddingCache, shard: str, texts: list[str], *batches: Rows) -> None:
    """Commit a shard of embeddings that were computed in some batches."""
    with cache.store.root.staging() as folder:
        with EmbeddingWriter(folder, texts) as writer:
            for batch in batches:
                writer.add(batch)
        cache.store.commit(cache.ref, shard, folder, rows=len(texts))


def test_embeddings_are_found_by_text_and_grow(store: ArtifactStore) -> None:
    cache = EmbeddingCache(store, ArtifactRef("embeddings", "e"))
    assert cache.missing(["a", "b", "a"]) == ["a", "b"]
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    lengths = np.array([300, 7])
    encode(cache, "s1", ["a", "b"], *(Rows({"pooled": rows[i : i + 1], "length": lengths[i : i + 1]}) for i in (0, 1)))
    encode(cache, "s2", ["c"], Rows({"pooled": rows[:1] + 10, "length": lengths[:1] + 1}))
    assert cache.missing(["a", "c", "d"]) == ["d"]
    found = cache.load(["c", "b", "c"])
    np.testing.assert_array_equal(found.arrays["pooled"], [rows[0] + 10, rows[1], rows[0] + 10])
    np.testing.assert_array_equal(found.arrays["length"], [301, 7, 301])
    assert (found.arrays["pooled"].dtype, found.arrays["length"].dtype) == (np.float32, np.int64)
    assert found.dtypes == {}
    with pytest.raises(NotCommittedError, match="'d'"):
        cache.load(["d"])
    with pytest.raises(NotCommittedError, match="'d'"):
        cache.digest(["a", "d"])


def test_embeddings_are_plain_npy_files_and_keep_bits_numpy_has_no_dtype_for(tmp_path: Path) -> None:
    cache = EmbeddingCache(ArtifactStore(str(tmp_path)), ArtifactRef("embeddings", "e"))
    bits = np.arange(2**16 - 8, 2**16, dtype=np.uint16).reshape(2, 4)
    encode(cache, "s", ["a", "b"], Rows({"x": bits}, {"x": "bfloat16"}))
    found = cache.load(["b"])
    np.testing.assert_array_equal(found.arrays["x"], bits[1:])
    assert found.dtypes == {"x": "bfloat16"}
    (file,) = tmp_path.rglob("x.npy")
    np.testing.assert_array_equal(np.load(file), bits)


def test_embedding_digest_does_not_depend_on_shards_and_changes_with_any_bit(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    digests = []
    for name, shards, change in (("one", [["a", "b"]], 0), ("two", [["b"], ["a"]], 0), ("three", [["a", "b"]], 1e-6)):
        cache = EmbeddingCache(ArtifactStore(str(tmp_path / name)), ArtifactRef("embeddings", "e"))
        for number, texts in enumerate(shards):
            encode(cache, str(number), texts, Rows({"x": rows[["ab".index(text) for text in texts]] + change}))
        digests.append(cache.digest(["a", "b"]))
    assert digests[0] == digests[1] != digests[2]
    assert cache.digest(["a"]) != cache.digest(["b"])


def test_a_batch_of_embeddings_reads_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = EmbeddingCache(ArtifactStore(str(tmp_path)), ArtifactRef("embeddings", "e"))
    rows = np.random.default_rng(0).random((40, 1 << 18), np.float32)
    encode(cache, "s", [str(n) for n in range(40)], *(Rows({"x": rows[n : n + 4]}) for n in range(0, 40, 4)))
    read: list[int] = []
    original = MappedFile.read

    def counted(self: MappedFile, offset: int, size: int) -> memoryview:
        read.append(size)
        return original(self, offset, size)

    monkeypatch.setattr(MappedFile, "read", counted)
    cache.digest([str(n) for n in range(40)])
    assert read == []
    np.testing.assert_array_equal(cache.load(["7", "31", "7"]).arrays["x"], rows[[7, 31, 7]])
    assert read == [1 << 20] * 2
    (file,) = tmp_path.rglob("x.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    cache.load(["7", "2"])
    with pytest.raises(CorruptError, match=r"x\.npy, bytes 41943040 to"):
        cache.load(["39"])


def test_which_of_several_rows_counts_does_not_depend_on_the_order_of_arrival(tmp_path: Path) -> None:
    """Readers that see shards as they come, in any order, read the same rows as one that starts in the end."""
    ref, texts = ArtifactRef("embeddings", "1" * 32), [["a", "b"], ["a", "c"], ["a", "b", "c", "d"]]
    seen = []
    for number, order in enumerate(itertools.permutations(range(3))):
        store = ArtifactStore(str(tmp_path / str(number)))
        running = EmbeddingCache(store, ref)
        for shard in order:
            encode(running, str(7 - shard), texts[shard], Rows({"x": np.full((len(texts[shard]), 2), shard + 1.0)}))
            assert running.missing(texts[shard]) == []
            running.load(texts[shard])
        for cache in (running, EmbeddingCache(store, ref)):
            seen.append((cache.digest(texts[2]), cache.load(texts[2]).arrays["x"].tolist()))
    assert all(each == seen[0] for each in seen)
    assert seen[0][1] == [[1, 1], [1, 1], [2, 2], [3, 3]], "as stores have been read at the start of a process"


def test_a_shard_whose_rows_another_run_has_encoded_meanwhile_harms_nobody(tmp_path: Path) -> None:
    cache = EmbeddingCache(ArtifactStore(str(tmp_path)), ArtifactRef("embeddings", "e"))
    encode(cache, "empty", [])
    encode(cache, "s", ["a"], Rows({"x": np.ones((1, 2), np.float32)}))
    again = EmbeddingCache(cache.store, cache.ref)
    np.testing.assert_array_equal(again.load(["a"]).arrays["x"], [[1, 1]])


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["hashes"].pop(),
        lambda index: index["tensors"]["x"].update(stored="|O"),
        lambda index: index["tensors"]["x"].update(shape=[-1]),
        lambda index: index["tensors"].update({"../x": index["tensors"].pop("x")}),
        lambda index: index["tensors"].clear(),
    ],
)
def test_a_table_of_embedding_rows_that_is_none_is_refused(tmp_path: Path, change: Callable[[Any], None]) -> None:
    cache = EmbeddingCache(ArtifactStore(str(tmp_path)), ArtifactRef("embeddings", "e"))
    with cache.store.root.staging() as folder:
        with EmbeddingWriter(folder, ["a"]) as writer:
            writer.add(Rows({"x": np.zeros((1, 2), np.float32)}))
        index = json.loads((folder / "rows.json").read_text())
        change(index)
        (folder / "rows.json").write_text(json.dumps(index))
        cache.store.commit(cache.ref, "s", folder, rows=1)
    with pytest.raises(CorruptError, match="is no table of embedding rows"):
        cache.load(["a"])


class Rank(SingleProcess):
    """One of two ranks, which are threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._values, self._barrier = rank, values, barrier

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_go_on_from_one_checkpoint_whatever_others_commit_and_remove(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    ref = ArtifactRef("policies", "p")

    def commit(*updates: int) -> None:
        for update in updates:
            with store.root.staging() as folder:
                (folder / "policy.bin").write_text(f"{update}")
                commit_checkpoint(store, ref, update, folder)

    commit(1)
    fetched, values, barrier = checkpoints._fetched, [None, None], threading.Barrier(2)
    found: dict[int, Any] = {}

    def interrupted(store: ArtifactStore, ref: ArtifactRef, name: str) -> Path | None:
        # Another process commits others, and removes this one, before the late rank reads it.
        if threading.current_thread().name == str(late) and name.startswith("000001"):
            commit(2, 3)
        return fetched(store, ref, name)

    monkeypatch.setattr(checkpoints, "_fetched", interrupted)

    def read(rank: int) -> None:
        found[rank] = latest_checkpoint(store, ref, Rank(rank, values, barrier))

    threads = [threading.Thread(target=read, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] == found[1]
    assert found[0][0] == 3


def test_checkpoints_keep_the_newest_and_notice_damage(store: ArtifactStore) -> None:
    ref = ArtifactRef("policies", "p")
    assert latest_checkpoint(store, ref) is None
    for update in (2, 9, 10):
        with store.root.staging() as folder:
            (folder / "policy.bin").write_text(f"{update}")
            commit_checkpoint(store, ref, update, folder)
    found = latest_checkpoint(store, ref)
    assert found is not None
    assert (found[0], (found[1] / "policy.bin").read_text()) == (10, "10")
    # Records of earlier versions have no checksums of blocks.
    record = found[1].with_name(f"{found[1].name}.json")
    files = [{key: file[key] for key in ("name", "size", "xxh3")} for file in json.loads(record.read_text())["files"]]
    record.write_text(json.dumps({"files": files}))
    assert latest_checkpoint(store, ref) == found
    (found[1] / "policy.bin").write_text("tampered")
    with pytest.raises(CorruptError, match="damaged"):
        latest_checkpoint(store, ref)
    record.unlink()
    before = latest_checkpoint(store, ref)
    assert before is not None
    assert (before[0], (before[1] / "policy.bin").read_text()) == (9, "9")
    before[1].with_name(f"{before[1].name}.json").unlink()
    assert latest_checkpoint(store, ref) is None, "the newest two stay"
    clear_checkpoints(store, ref)
    assert latest_checkpoint(store, ref) is None


def test_listing_names_users_and_describes(store: ArtifactStore) -> None:
    commit(store, "00000")
    store.seal(REF, shards=["00000"], summary={"mean": 1.0}, **ORIGIN)
    run = RunFolder(store, "r")
    run.create({"config": {}})
    run.append(entry(str(REF)))
    listed = list_artifacts(store)
    assert [(item["artifact"], item["runs"], item["complete"]) for item in listed] == [(str(REF), ["r"], True)]
    assert describe_artifact(store, "ffff")["summary"] == {"mean": 1.0}
    with pytest.raises(StoreError, match="no artifact 'zz'"):
        describe_artifact(store, "zz")
