"""Lists the content of a store and checks it against the commit records."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowmill.configs.errors import CorruptError, StoreError
from flowmill.storage import layout
from flowmill.storage.artifacts.checkpoints import damaged_checkpoints
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.fit_names import damaged_fits
from flowmill.storage.artifacts.lineage import (
    PREFERENCES,
    RATINGS,
    LineageEntry,
    RunFolder,
    damaged_records,
    list_runs,
    readable_entries,
)
from flowmill.storage.artifacts.records import Manifest, RemovalNote, ShardRecord
from flowmill.storage.artifacts.remedies import remedy
from flowmill.storage.backends.checksums import check_size
from flowmill.storage.layout import KINDS, ArtifactRef, is_artifact
from flowmill.storage.trajectories.arrow_files import arrow_file

#: Records that are requested together.
_TOGETHER = 512
#: Artifacts whose manifests are read together.
_LISTED = 64


def list_artifacts(store: ArtifactStore, aged: Callable[[str], bool] = lambda artifact: True) -> list[dict[str, Any]]:
    """Return one entry per artifact, complete or not, with the runs and epochs whose lineage names it.

    Folders of others next to artifacts, such as ``prompts/images`` of a project, have none.

    Args:
        store: the store.
        aged: whether an artifact's age is read, from the records of all its shards; None for others that are complete.
    """
    uses, refs, entries = _uses(store), list_refs(store), list[dict[str, Any]]()
    for start in range(0, len(refs), _LISTED):
        some = refs[start : start + _LISTED]
        paths = [path for ref in some for path in (layout.manifest(ref), layout.removed(ref))]
        read = store.root.read_many(paths)
        for ref, data, removed in zip(some, read[::2], read[1::2], strict=True):
            manifest = None if data is None else Manifest.decode(data, layout.manifest(ref))
            is_whole = data is not None or removed is not None
            if not is_whole and not any(map(layout.is_of_artifact, store.root.list(ref.path))):
                continue
            records = None if manifest is not None and not aged(str(ref)) else store.records(ref)
            entry = _entry(ref, uses.get(str(ref), []), manifest, records)
            entries.append({**entry, "removed": removed is not None and store.removed(ref)})
    return entries


def describe_artifact(store: ArtifactStore, name: str) -> dict[str, Any]:
    """Return all details of one artifact."""
    ref = find_ref(store, name)
    manifest, records = store.manifest(ref), store.records(ref)
    described: dict[str, Any] = {"artifact": str(ref), "complete": manifest is not None, "removed": store.removed(ref)}
    if manifest is not None:
        described |= {"stage": manifest.stage, "inputs": list(manifest.inputs), "options": dict(manifest.options)}
        described |= {"rows": manifest.rows, "size": manifest.size, "digest": manifest.digest}
        described["summary"] = dict(manifest.summary)
    described["shards"] = [
        {"shard": record.shard, "rows": record.rows, "files": [file.name for file in record.files], **record.producer}
        for record in records
    ]
    described["runs"] = sorted(users_of(store).get(str(ref), ()))
    described["schema"] = _schema(store, ref, records)
    return described


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A difference between a store and its commit records."""

    ref: ArtifactRef | None
    """The artifact; None for a record of a run."""
    shard: str | None
    """The shard; None for the manifest and for files outside shards."""
    kind: str
    """missing, corrupt or orphaned."""
    message: str
    """The actual content and the expected content."""
    path: str = ""
    """The only path to quarantine: a run's record, an optional part of an artifact, or what is orphaned."""

    @property
    def lacks(self) -> bool:
        """Whether the artifact lacks a required part, which its stage regenerates."""
        return self.ref is not None and self.kind != "orphaned" and not self.path


def verify_store(store: ArtifactStore, *, deep: bool) -> dict[str, Any]:
    """Check every record and manifest; return counts and one line per problem."""
    refs, check = list_refs(store), partial(check_artifact, store, deep=deep)
    # Whole files are read one after another.
    checked = [check(ref) for ref in refs] if deep else store.root.map(check, refs)
    problems = [*_of_runs(store), *(problem for problems, _ in checked for problem in problems)]
    return {
        "artifacts": len(refs),
        "files": sum(count for _, count in checked),
        "deep": deep,
        "problems": [problem.message for problem in problems],
        "found": [{"artifact": str(p.ref or p.path), "shard": p.shard, "kind": p.kind} for p in problems],
    }


def find_problems(store: ArtifactStore, *, deep: bool) -> list[Problem]:
    """Return all differences between a store and its commit records."""
    artifacts = (problem for ref in list_refs(store) for problem in check_artifact(store, ref, deep=deep)[0])
    return [*_of_runs(store), *artifacts]


def _of_runs(store: ArtifactStore) -> list[Problem]:
    losses = damaged_records(store)
    records = [Problem(ref=None, shard=None, kind=loss.kind, message=loss.message, path=loss.path) for loss in losses]
    fits = [
        Problem(ref=ref, shard=None, kind=loss.kind, message=loss.message, path="" if ref else loss.path)
        for loss, ref in damaged_fits(store)
    ]
    return [*records, *fits, *_unmade(store)]


def _unmade(store: ArtifactStore) -> Iterator[Problem]:
    """Yield incomplete artifacts that a run's lineage, preferences or answers name."""

    def recorded(name: str) -> dict[str, str]:
        run = RunFolder(store, name)
        # ``damaged_records`` returns those that cannot be read.
        with suppress(CorruptError):
            return {**run.recorded(PREFERENCES), **run.recorded(RATINGS)}
        return {}

    named = {name: f"the lineage of run '{min(runs)}' names it." for name, runs in users_of(store).items()}
    for records in store.root.map(recorded, list_runs(store)):
        for name, path in records.items():
            named.setdefault(name, f"{path} names it. {remedy(ArtifactRef.parse(name))}")
    for name, why in sorted(named.items()):
        ref = ArtifactRef.parse(name)
        if ref.kind == "embeddings":
            yield from _unrecorded(store, ref)
        elif store.root.read(place := layout.manifest(ref)) is None:
            yield Problem(ref=ref, shard=None, kind="missing", message=f"{place} is missing; {why}")


def _unrecorded(store: ArtifactStore, ref: ArtifactRef) -> Iterator[Problem]:
    """Yield shards with files but without a record, of an artifact that has no manifest."""
    folders = [name for name in store.root.list(ref.path) if not name.startswith("_")]
    committed = store.committed(ref)
    for folder in folders:
        shard = folder.rpartition("-")[0]
        if shard and shard not in committed and store.root.files(f"{ref.path}/{folder}"):
            message = f"{layout.record(ref, shard)} is missing; files of the shard are there."
            yield Problem(ref=ref, shard=shard, kind="missing", message=message)


def check_artifact(store: ArtifactStore, ref: ArtifactRef, *, deep: bool) -> tuple[list[Problem], int]:
    """Check one artifact; return its problems and the number of checked files."""
    problems: list[Problem] = []
    manifest = None
    try:
        manifest = store.manifest(ref)
    except CorruptError as error:
        problems.append(Problem(ref=ref, shard=None, kind="corrupt", message=str(error)))
    note = store.root.read(layout.removed(ref))
    problems += [*_check_removal(ref, note)]
    problems += [] if manifest is not None else _check_checkpoints(store, ref, deep=deep)
    removed, digests, count = note is not None and store.removed(ref), dict[str, str](), 0
    # In this order: the files of a record exist before it.
    shards = store.committed(ref)
    left = {} if removed else dict(store.root.files(ref.path))
    for shard, record in _read(store, ref, shards):
        if isinstance(record, CorruptError):
            problems.append(Problem(ref=ref, shard=shard, kind="corrupt", message=str(record)))
            continue
        digests[shard] = record.digest
        if not removed:
            problems += _check_record(store, ref, record, left, deep=deep)
            count += len(record.files)
    problems += _check_manifest(ref, manifest, digests)
    if manifest is not None:
        problems += _orphans(ref, left, {layout.shard_folder(ref, *each) for each in digests.items()})
    return problems, count


def _read(
    store: ArtifactStore, ref: ArtifactRef, shards: Sequence[str]
) -> Iterator[tuple[str, ShardRecord | CorruptError]]:
    """Yield the record of every shard, or why it cannot be read; many are requested together, few are in memory."""
    for start in range(0, len(shards), _TOGETHER):
        some = shards[start : start + _TOGETHER]
        paths = [layout.record(ref, shard) for shard in some]
        for shard, path, data in zip(some, paths, store.root.read_many(paths), strict=True):
            try:
                if data is not None:
                    yield shard, ShardRecord.decode(data, path)
            except CorruptError as error:
                yield shard, error


def _check_manifest(ref: ArtifactRef, manifest: Manifest | None, digests: Mapping[str, str]) -> list[Problem]:
    problems = []
    for shard, digest, _ in manifest.shards if manifest else ():
        path = layout.record(ref, shard)
        if shard not in digests:
            message = f"{path} is missing or damaged; the manifest names it."
            problems.append(Problem(ref=ref, shard=shard, kind="missing", message=message))
        elif digests[shard] != digest:
            message = f"{path} describes content {digests[shard][:12]}, the manifest says {digest[:12]}."
            problems.append(Problem(ref=ref, shard=shard, kind="corrupt", message=message))
    return problems


def _check_removal(ref: ArtifactRef, note: bytes | None) -> Iterator[Problem]:
    """Yield problems of the note that an artifact's files were removed."""
    path = layout.removed(ref)
    try:
        RemovalNote.decode(note, path) if note is not None else None
    except CorruptError as error:
        yield Problem(ref=ref, shard=None, kind="corrupt", message=str(error), path=path)


def _check_checkpoints(store: ArtifactStore, ref: ArtifactRef, *, deep: bool) -> Iterator[Problem]:
    """Yield the damaged checkpoints of an unfinished training."""
    for path, message in damaged_checkpoints(store, ref, deep=deep):
        yield Problem(ref=ref, shard=None, kind="corrupt", message=message, path=path)


def _check_record(
    store: ArtifactStore, ref: ArtifactRef, record: ShardRecord, left: dict[str, int], *, deep: bool
) -> list[Problem]:
    """Compare a shard with its record, and take its files out of those that are left of the artifact."""
    folder, problems = layout.shard_folder(ref, record.shard, record.digest), []
    for file in record.files:
        where = f"{folder}/{file.name}"
        size = left.pop(where.removeprefix(f"{ref.path}/"), None)
        try:
            check_size(size, file, where=where)
            if deep:
                store.root.check(folder, file)
        except CorruptError as error:
            kind = "missing" if size is None else "corrupt"
            problems.append(Problem(ref=ref, shard=record.shard, kind=kind, message=str(error)))
    return problems


def _orphans(ref: ArtifactRef, left: Collection[str], recorded: Collection[str]) -> list[Problem]:
    """Return the folders of a complete artifact that no record names; of those that one names, the other files.

    Args:
        ref: the artifact.
        left: paths below it of the files that no record names.
        recorded: the folders that records name.
    """
    folders = {name: f"{ref.path}/{name.partition('/')[0]}" for name in left if layout.holds_files(name)}
    paths = {f"{ref.path}/{name}" if folder in recorded else folder for name, folder in folders.items()}
    return [
        Problem(ref=ref, shard=None, kind="orphaned", message=f"{path} is orphaned: no record names it.", path=path)
        for path in sorted(paths)
    ]


def _entry(
    ref: ArtifactRef,
    uses: Sequence[tuple[str, LineageEntry]],
    manifest: Manifest | None,
    records: Sequence[ShardRecord] | None,
) -> dict[str, Any]:
    epochs: dict[str, set[int]] = {}
    for name, entry in uses:
        epochs.setdefault(name, set()).add(entry.epoch)
    # Growing artifacts have no manifest.
    named = uses[0][1].stage if uses else ""
    started = [float(record.producer["started"]) for record in records or () if "started" in record.producer]
    if records is None and manifest is not None:
        figures = {"shards": len(manifest.shards), "rows": manifest.rows, "size": manifest.size}
    else:
        sizes = [file.size for record in records or () for file in record.files]
        figures = {"shards": len(records or ()), "rows": sum(each.rows for each in records or ()), "size": sum(sizes)}
    return {
        "artifact": str(ref),
        "stage": manifest.stage if manifest else named,
        "complete": manifest is not None,
        "age_s": round(time.time() - max(started), 1) if started else None,
        **figures,
        "runs": sorted(epochs),
        "epochs": {name: sorted(epochs[name]) for name in sorted(epochs)},
    }


def list_refs(store: ArtifactStore) -> list[ArtifactRef]:
    """Return every artifact of a store, complete or not, by the names of folders alone."""
    names = [f"{kind}/{name}" for kind in KINDS for name in store.root.list(kind)]
    return [ArtifactRef.parse(name) for name in names if is_artifact(name)]


def find_ref(store: ArtifactStore, name: str) -> ArtifactRef:
    """Return the artifact ``kind/id``; the kind may be left out and the id shortened."""
    matches = [ref for ref in list_refs(store) if str(ref).startswith(name) or ref.id.startswith(name)]
    exact = [ref for ref in matches if str(ref) == name]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if not matches:
        raise StoreError(f"There is no artifact '{name}' in '{store.root.uri}'. 'flowmill store ls' lists them.")
    raise StoreError(f"'{name}' is the beginning of {len(matches)} artifacts: {', '.join(map(str, matches[:5]))} ...")


def users_of(store: ArtifactStore) -> dict[str, set[str]]:
    """Return by artifact the runs whose lineage names it."""
    return {artifact: {name for name, _ in uses} for artifact, uses in _uses(store).items()}


def _uses(store: ArtifactStore) -> dict[str, list[tuple[str, LineageEntry]]]:
    """Return by artifact the runs and lineage entries that name it."""
    uses: dict[str, list[tuple[str, LineageEntry]]] = {}
    for name, entry in readable_entries(store):
        uses.setdefault(entry.artifact, []).append((name, entry))
    return uses


def _schema(store: ArtifactStore, ref: ArtifactRef, records: list[ShardRecord]) -> dict[str, list[str]]:
    import pyarrow.parquet as pq

    schemas: dict[str, list[str]] = {}
    for record in () if store.removed(ref) else records[:1]:
        for file in record.files:
            if file.name.endswith(".parquet"):
                schema = pq.read_schema(arrow_file(store.files(ref, record).blob(file.name)))
                schemas[file.name] = [f"{field.name}: {field.type}" for field in schema]
    return schemas
