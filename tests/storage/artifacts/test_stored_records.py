"""Stored records: equal content gives the same bytes in every version, and a record is valid at its own path only."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
import xxhash

from flowmill.configs.errors import CorruptError
from flowmill.storage import layout
from flowmill.storage.artifacts.checkpoints import commit_checkpoint
from flowmill.storage.artifacts.checksummed_json import seal, unseal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry, RunFolder
from flowmill.storage.artifacts.records import Manifest, Record, RemovalNote, ShardRecord, content
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.attempt_claims import Claim, claimed
from flowmill.storage.maintenance.garbage_collection import Removal, remove

REF = ArtifactRef("rewards", "1" * 32)
POLICY = ArtifactRef("policies", "2" * 32)
LINEAGE = "00001.score.digits"
#: xxh3-64 of every record of ``write_all`` by path. A new value needs a new version of the record.
WRITTEN = {
    f"{POLICY}/_checkpoints/000003-fd8e2ae94186a5aa.json": "cec069324a5ffeb1",
    f"{POLICY}/_claim.json": "98f380c8ed85ba45",
    f"{REF}/_removed.json": "84976b0d32b67cbb",
    f"{REF}/_shards/00000.json": "fb85e59c0d11c66a",
    f"{REF}/manifest.json": "a6a0d7e58abada17",
    "runs/run/configs/0001.json": "7dc56903f14a5efc",
    "runs/run/copies/configs/0001.json": "7dc56903f14a5efc",
    "runs/run/copies/lineage/00001.score.digits.001.json": "7fd21b74d98082d5",
    "runs/run/copies/run.json": "e24db9ffc5b3814d",
    "runs/run/lineage/00001.score.digits.001.json": "7fd21b74d98082d5",
    "runs/run/run.json": "e24db9ffc5b3814d",
}


def write_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """Write a record of every type with fixed content."""
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(time, "time", lambda: 1.5)
    store = ArtifactStore(str(root))
    with store.root.staging() as folder:
        (folder / "data.bin").write_bytes(bytes(3 << 20))
        (folder / "small.json").write_bytes(b"{}")
        store.commit(REF, "00000", folder, rows=2, summary={"mean": 0.5}, producer={"started": 1.0}, content="0" * 32)
    store.seal(
        REF,
        shards=["00000"],
        summary={"mean": 0.5},
        stage="score",
        stage_version=1,
        options={"b": 1, "a": None},
        inputs=("trajectories/" + "3" * 32,),
    )
    claimed(store, POLICY, Claim(run="run", sizes={"micro_batch_size": None, "other": 2}))
    with store.root.staging() as folder:
        (folder / "state.bin").write_bytes(b"state")
        commit_checkpoint(store, POLICY, 3, folder)
    run = RunFolder(store, "run")
    run.create({"config": {"run": {"seed": 0}}, "seed": 0})
    run.add("configs", {"run": {"seed": 0}})
    run.append(LineageEntry(epoch=1, stage="score", slot="digits", artifact=str(REF)))
    remove(store, Removal(label=str(REF), size=0, reason="kept small", trace=True))
    return store


def test_the_bytes_of_records_do_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path / "store", monkeypatch)
    files = sorted((tmp_path / "store").rglob("*.json"))
    found = {path.relative_to(tmp_path / "store").as_posix(): path.read_bytes() for path in files}
    found = {path: data for path, data in found.items() if not path.endswith("small.json")}
    assert {path: xxhash.xxh3_64_hexdigest(data) for path, data in found.items()} == WRITTEN


@pytest.mark.parametrize(
    ("kind", "path", "other"),
    [
        (ShardRecord, layout.record(REF, "00000"), layout.record(REF, "00001")),
        (ShardRecord, layout.record(REF, "00000"), layout.record(POLICY, "00000")),
        (Manifest, layout.manifest(REF), layout.manifest(POLICY)),
        (RemovalNote, layout.removed(REF), layout.removed(POLICY)),
        (Claim, layout.claim(POLICY), layout.claim(REF)),
        (LineageEntry, f"runs/run/lineage/{LINEAGE}.001.json", f"runs/run/lineage/{LINEAGE}.002.json"),
    ],
)
def test_a_record_is_valid_at_its_own_path(
    kind: type[Record], path: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_all(tmp_path / "store", monkeypatch).root.read(path) or b""
    fields = unseal(data, path)
    assert kind.decode(data, path).place(path) == path
    with pytest.raises(CorruptError, match=f"{other} is the record of {path}: it was copied from elsewhere"):
        kind.decode(data, other)
    for changed in ({**fields, "more": 1}, {}, {name: [0] for name in fields}):
        with pytest.raises(CorruptError, match=f"{path} is (not {kind.noun}|the record of)|schema version"):
            kind.decode(seal(changed), path)
    with pytest.raises(CorruptError, match="does not match its own checksum"):
        kind.decode(data.replace(b'"checksum": "', b'"checksum": "0'), path)


#: Versions without checksums, before 0.1.0, wrote these; everything else had a checksum from the start.
EARLY = {
    "runs/r/run.json": {"config": {}, "prompts": ""},
    "runs/r/configs/0001.json": {"run": {}, "model": {}},
    "runs/r/lineage/00001.score.digits.001.json": {"epoch": 1, "stage": "score", "slot": "digits", "artifact": "a"},
    "runs/r/tracking/0001.json": {"mlflow_run_id": "1", "experiment_id": "2"},
    f"runs/r/finished-{'0' * 16}/0001.json": {"artifacts": [], "made": [], "result": {}},
    layout.record(REF, "00000"): {"shard": "00000", "digest": "0" * 32, "rows": 1, "files": []},
    layout.manifest(REF): {"kind": "rewards", "id": REF.id, "shards": []},
    layout.removed(REF): {"removed": 1.0, "reason": ""},
    f"{layout.checkpoints(POLICY)}/000003-0.json": {"files": []},
}
LATER = [
    *(f"runs/r/{series}/0001.json" for series in ("needs", "states", "lengths", "benchmark", "ratings", "preferences")),
    layout.fit("taste", 1),
    layout.claim(POLICY),
]


@pytest.mark.parametrize("path", [*EARLY, *LATER])
def test_a_record_without_a_checksum_is_damaged_unless_early_versions_wrote_it(path: str) -> None:
    early = EARLY.get(path)
    assert early is None or content(json.dumps(early).encode(), path) == early
    for damaged in ({}, {"algorithm": 3}, {"at": path}, {"state": "done"}, *(() if early else EARLY.values())):
        with pytest.raises(CorruptError, match=f"{path} lacks the checksum .*'flowmill store repair' sets it aside"):
            content(json.dumps(damaged).encode(), path)


def test_records_of_version_1_are_valid_at_their_own_path() -> None:
    """They do not name their artifact."""
    fields = {"shard": "00000", "digest": "0" * 32, "rows": 1, "files": [], "schema_version": 1}
    data = json.dumps(fields).encode()
    assert ShardRecord.decode(data, layout.record(REF, "00000")).rows == 1
    with pytest.raises(CorruptError, match="copied from elsewhere"):
        ShardRecord.decode(data, layout.record(REF, "00001"))
