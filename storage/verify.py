"""What is in a store, and whether it is what was committed."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq

from configs.errors import CorruptError, StoreError
from storage import layout
from storage.checksums import check_size
from storage.commit import ArtifactStore, ShardRecord
from storage.files import arrow_file
from storage.layout import KINDS, ArtifactRef
from storage.lineage import RunFolder, list_runs


def list_artifacts(store: ArtifactStore) -> list[dict[str, Any]]:
    """Return one entry per artifact, complete or not, with the runs whose lineage names it."""
    users = _users(store)
    return [_entry(store, ref, sorted(users.get(str(ref), ()))) for ref in _refs(store)]


def describe_artifact(store: ArtifactStore, name: str) -> dict[str, Any]:
    """Return everything about one artifact.

    Raises:
        StoreError: no artifact, or more than one, has this name.
    """
    ref = _find(store, name)
    manifest, records = store.manifest(ref), store.records(ref)
    described: dict[str, Any] = {"artifact": str(ref), "complete": manifest is not None}
    if manifest is not None:
        described |= {"stage": manifest.stage, "inputs": list(manifest.inputs), "options": dict(manifest.options)}
        described |= {"rows": manifest.rows, "size": manifest.size, "digest": manifest.digest}
        described["summary"] = dict(manifest.summary)
    described["shards"] = [
        {"shard": record.shard, "rows": record.rows, "files": [file.name for file in record.files], **record.producer}
        for record in records
    ]
    described["runs"] = sorted(_users(store).get(str(ref), ()))
    described["schema"] = _schema(store, ref, records)
    return described


def verify_store(store: ArtifactStore, *, deep: bool) -> dict[str, Any]:
    """Check every record and manifest; return counts and one line per problem."""
    problems: list[str] = []
    artifacts = files = 0
    for ref in _refs(store):
        artifacts += 1
        try:
            records = store.records(ref)
            manifest = store.manifest(ref)
        except CorruptError as error:
            problems.append(str(error))
            continue
        present = {record.shard: record for record in records}
        for shard, digest, _ in manifest.shards if manifest else ():
            if shard not in present:
                problems.append(f"{layout.record(ref, shard)} is missing; the manifest names it.")
            elif present[shard].digest != digest:
                problems.append(f"{layout.record(ref, shard)} describes other content than the manifest.")
        for record in records:
            files += len(record.files)
            problems += _check_record(store, ref, record, deep=deep)
    return {"artifacts": artifacts, "files": files, "deep": deep, "problems": problems}


def _check_record(store: ArtifactStore, ref: ArtifactRef, record: ShardRecord, *, deep: bool) -> list[str]:
    folder = layout.shard_folder(ref, record.shard, record.digest)
    sizes, problems = store.root.files(folder), []
    for file in record.files:
        try:
            check_size(sizes.get(file.name), file, where=f"{folder}/{file.name}")
            if deep:
                store.root.check(folder, file)
        except CorruptError as error:
            problems.append(str(error))
    return problems


def _entry(store: ArtifactStore, ref: ArtifactRef, runs: list[str]) -> dict[str, Any]:
    records, manifest = store.records(ref), store.manifest(ref)
    return {
        "artifact": str(ref),
        "stage": manifest.stage if manifest else "",
        "complete": manifest is not None,
        "shards": len(records),
        "rows": sum(record.rows for record in records),
        "size": sum(file.size for record in records for file in record.files),
        "runs": runs,
    }


def _refs(store: ArtifactStore) -> list[ArtifactRef]:
    return [ArtifactRef(kind, name) for kind in KINDS for name in store.root.list(kind)]


def _find(store: ArtifactStore, name: str) -> ArtifactRef:
    found = [ref for ref in _refs(store) if str(ref).startswith(name) or ref.id.startswith(name)]
    exact = [ref for ref in found if str(ref) == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not found:
        raise StoreError(f"There is no artifact '{name}' in '{store.root.uri}'. 'flowmill store ls' lists them.")
    raise StoreError(f"'{name}' is the beginning of {len(found)} artifacts: {', '.join(map(str, found[:5]))} ...")


def _users(store: ArtifactStore) -> dict[str, set[str]]:
    users: dict[str, set[str]] = {}
    for name in list_runs(store):
        for entry in RunFolder(store, name).entries():
            users.setdefault(entry.artifact, set()).add(name)
    return users


def _schema(store: ArtifactStore, ref: ArtifactRef, records: list[ShardRecord]) -> dict[str, list[str]]:
    schemas: dict[str, list[str]] = {}
    for record in records[:1]:
        for file in record.files:
            if file.name.endswith(".parquet"):
                schema = pq.read_schema(arrow_file(store.files(ref, record).blob(file.name)))
                schemas[file.name] = [f"{field.name}: {field.type}" for field in schema]
    return schemas
