from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from configs.errors import CommitLostError, CorruptError, NotCommittedError, RunConflictError, StoreError
from configs.schema import StoreSection
from storage.checkpoints import clear_checkpoints, commit_checkpoint, latest_checkpoint
from storage.commit import ArtifactStore
from storage.embeddings import EmbeddingCache
from storage.layout import ArtifactRef
from storage.lineage import LineageEntry, RunFolder
from storage.roots import open_root
from storage.roots.local import LocalRoot
from storage.verify import describe_artifact, list_artifacts, verify_store

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


def test_racing_writers_have_one_content(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        outcomes = pool.map(_race, [(root, number) for number in range(16)])
    store = ArtifactStore(root)
    record = store.records(REF)[0]
    content = (store.folder(REF, record) / "inner" / "data.bin").read_text()
    winner = int(content.removeprefix("writer "))
    assert [outcome == "won" for outcome in outcomes] == [number % 2 == winner for number in range(16)]
    assert verify_store(store, deep=True)["problems"] == []


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


def test_newer_schema_is_refused_with_the_hint(store: ArtifactStore) -> None:
    commit(store, "00000")
    path = Path(store.root.uri) / REF.path / "_shards" / "00000.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema_version": 99}))
    with pytest.raises(CorruptError, match="Upgrade flowmill"):
        store.records(REF)
    for damaged in ("{half", "[1]"):
        path.write_text(damaged)
        with pytest.raises(CorruptError, match="not JSON"):
            store.records(REF)


def test_a_foreign_manifest_is_refused(store: ArtifactStore) -> None:
    commit(store, "00000")
    store.seal(REF, shards=["00000"], summary={}, **ORIGIN)
    other = ArtifactRef("rewards", "e" * 32)
    folder = Path(store.root.uri) / REF.path
    folder.rename(folder.with_name(other.id))
    with pytest.raises(CorruptError, match="copied from elsewhere"):
        store.manifest(other)


def test_unusable_roots(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--root"):
        open_root(StoreSection(root=str(tmp_path / "file")))
    with pytest.raises(StoreError, match="no store for 'ftp://'"):
        open_root(StoreSection(root="ftp://host/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_root(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="--root"):
        open_root(StoreSection(root=str(tmp_path / "closed" / "store")))


def test_sweep_removes_what_dead_processes_left(tmp_path: Path) -> None:
    root = LocalRoot(str(tmp_path / "store"))
    import socket

    dead = tmp_path / "store" / ".staging" / f"{socket.gethostname()}-999999999-abc"
    dead.mkdir()
    with root.staging() as alive:
        assert root.sweep() == 1
        assert alive.exists()
    assert not dead.exists()


def _hold(path: str, ready: object, release: object) -> None:
    with LocalRoot(path).lock("runs/r/.lock", "Run 'r'"):
        ready.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


def test_one_process_executes_a_run(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path), ready, release))
    holder.start()
    assert ready.wait(30)
    with (
        pytest.raises(RunConflictError, match=f"pid {holder.pid}"),
        LocalRoot(str(tmp_path)).lock("runs/r/.lock", "Run 'r'"),
    ):
        pass
    holder.kill()
    holder.join()
    with LocalRoot(str(tmp_path)).lock("runs/r/.lock", "Run 'r'"):
        pass


def entry(artifact: str, epoch: int = 1, stage: str = "score") -> LineageEntry:
    return LineageEntry(epoch=epoch, stage=stage, slot="", artifact=artifact)


def test_lineage_keeps_history_in_order(store: ArtifactStore) -> None:
    run = RunFolder(store, "r")
    for artifact in ("rewards/a", "rewards/a", "rewards/b", "rewards/a"):
        run.append(entry(artifact))
    assert [e.artifact for e in run.entries()] == ["rewards/a", "rewards/b", "rewards/a"]
    fresh = RunFolder(store, "r")
    assert fresh.made(*entry("rewards/a").key) == run.entries()
    assert fresh.made(3, "rollout") == []
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


def test_embeddings_are_found_by_text_and_grow(store: ArtifactStore) -> None:
    ref = ArtifactRef("embeddings", "e")
    cache = EmbeddingCache(store, ref)
    assert cache.missing(["a", "b", "a"]) == ["a", "b"]
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for shard, texts, values in (("s1", ["a", "b"], rows), ("s2", ["c"], rows[:1] + 10)):
        with store.root.staging() as folder:
            cache.write(folder, texts, {"pooled": values})
            store.commit(ref, shard, folder, rows=len(texts))
    assert cache.missing(["a", "c", "d"]) == ["d"]
    np.testing.assert_array_equal(cache.load(["c", "b", "c"])["pooled"], [rows[0] + 10, rows[1], rows[0] + 10])
    with pytest.raises(NotCommittedError, match="'d'"):
        cache.load(["d"])


def test_embedding_digest_does_not_depend_on_shards(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    digests = []
    for name, shards in (("one", [["a", "b"]]), ("two", [["b"], ["a"]])):
        store = ArtifactStore(str(tmp_path / name))
        cache = EmbeddingCache(store, ArtifactRef("embeddings", "e"))
        for number, texts in enumerate(shards):
            with store.root.staging() as folder:
                cache.write(folder, texts, {"x": rows[["ab".index(text) for text in texts]]})
                store.commit(cache.ref, str(number), folder, rows=len(texts))
        digests.append(cache.digest(["a", "b"]))
    assert digests[0] == digests[1]


def test_checkpoints_keep_the_newest_and_notice_damage(store: ArtifactStore) -> None:
    ref = ArtifactRef("policies", "p")
    assert latest_checkpoint(store, ref) is None
    for update in (2, 10):
        with store.root.staging() as folder:
            (folder / "policy.bin").write_text(f"{update}")
            commit_checkpoint(store, ref, update, folder)
    found = latest_checkpoint(store, ref)
    assert found is not None
    assert (found[0], (found[1] / "policy.bin").read_text()) == (10, "10")
    # Records of earlier versions have no checksums of blocks.
    record = found[1].with_name(f"{found[1].name}.json")
    record.write_text(record.read_text().replace(', "blocks": []', "").replace('"blocks": [], ', ""))
    assert "blocks" not in record.read_text()
    assert latest_checkpoint(store, ref) == found
    (found[1] / "policy.bin").write_text("tampered")
    with pytest.raises(CorruptError, match="damaged"):
        latest_checkpoint(store, ref)
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
