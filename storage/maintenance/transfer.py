"""Copies a run with all artifacts it names from one root to another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from flowmill.configs.errors import CommitLostError, RunConflictError
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.fit_names import fits_of
from flowmill.storage.artifacts.lineage import RunFolder, records_of
from flowmill.storage.artifacts.mirrored_records import LOGS
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.backends.base import PART
from flowmill.storage.layout import ArtifactRef

_PIECE = 4 * PART


def copy_run(
    source: ArtifactStore,
    target: ArtifactStore,
    run: str,
    *,
    fits: Collection[str] = (),
    progress: Callable[[str, int, int], None],
) -> dict[str, int]:
    """Copy a run's artifacts, checked byte by byte, then its records. Existing files are not copied again, and stay.

    Files that the target removed, as by ``flowmill store gc``, are copied again from a source that has them.

    The copy of a run that is being executed is a snapshot: later commits are not part of it.

    Args:
        source: store of the run.
        target: store of the copy.
        run: name of the run.
        fits: names of fitted rewards, of which every finished fit is copied.
        progress: called with (artifact, done, total) after each artifact.

    Returns:
        Counts of artifacts, shards and bytes copied.

    Raises:
        RunConflictError: the target has another run of this name, other records of it, or another fit, or a process
            works on that run or removes files there.
        CommitLostError: the target has a shard with other content, or lost what was copied.
    """
    # So that no process removes what is copied before the run names it.
    with RunFolder(target, run).at_work():
        return _copied(source, target, run, fits, progress)


def _copied(
    source: ArtifactStore,
    target: ArtifactStore,
    run: str,
    fits: Collection[str],
    progress: Callable[[str, int, int], None],
) -> dict[str, int]:
    _check_same(source, target, run)
    fitted = _fits(source, target, fits)
    # Records are read first: all artifacts that they name are committed, and are copied below.
    records = records_of(source, run)
    _check_continued(target, run, records)
    refs = list(dict.fromkeys([*RunFolder(source, run).named(), *fitted.values()]))
    counts, complete = {"artifacts": len(refs), "shards": 0, "bytes": 0}, list[ArtifactRef]()
    for number, ref in enumerate(refs, 1):
        # The manifest is read before the shards, as a later one could name shards that are not copied.
        manifest = source.root.read(layout.manifest(ref))
        gone, lacks = source.removed(ref), target.removed(ref)
        # An artifact that was copied with its files keeps them, if the source removed its own since.
        whole = target.manifest(ref) is not None and not lacks
        # Files that the manifest does not name are left out; a cache has no manifest and is copied whole.
        for record in source.records(ref) if manifest is None else source.shards(ref):
            copied = 0 if gone else _copy_shard(source, target, ref, record, again=lacks)
            counts["shards"] += copied > 0
            counts["bytes"] += copied
            _copy_object(source, target, layout.record(ref, record.shard))
        if gone and not whole:
            _copy_object(source, target, layout.removed(ref))
        elif lacks and not gone:
            # Its files are there again.
            target.root.remove(layout.removed(ref))
        if manifest is not None:
            target.root.create(layout.manifest(ref), manifest)
            complete.append(ref)
        progress(str(ref), number, len(refs))
    for path in fitted:
        _copy_object(source, target, layout.copy_of(path))
        _copy_object(source, target, path)
    _check_complete(target, complete)
    for path, data in records.items():
        target.root.create(path, data)
    return counts


def _check_complete(target: ArtifactStore, refs: Sequence[ArtifactRef]) -> None:
    """Raise CommitLostError if the target lacks the manifest of an artifact that was copied."""
    paths = [layout.manifest(ref) for ref in refs]
    lost = [path for path, data in zip(paths, target.root.read_many(paths), strict=True) if data is None]
    if lost:
        raise CommitLostError(
            f"'{lost[0]}' is missing in '{target.root.uri}', though it was copied: another program removed it since. "
            "Copy again."
        )


def _fits(source: ArtifactStore, target: ArtifactStore, names: Collection[str]) -> dict[str, ArtifactRef]:
    """Return finished fits by the paths of their records; raise RunConflictError if the target has another there."""
    refs = {}
    for name in names:
        present = fits_of(target, name)
        for number, ref in fits_of(source, name).items():
            if present.get(number, ref) != ref:
                raise RunConflictError(
                    f"{target.root.uri} has another fit '{name}@{number}', so scores of the copied run would be stale. "
                    "Copy to another root."
                )
            if source.manifest(ref) is not None:
                refs[layout.fit(name, number)] = ref
    return refs


def _check_same(source: ArtifactStore, target: ArtifactStore, run: str) -> None:
    """Raise RunConflictError if the target has another run of this name."""
    ours, theirs = RunFolder(source, run).describe(), RunFolder(target, run).describe()
    if theirs is not None and theirs != ours:
        raise RunConflictError(
            f"{target.root.uri} has another run of the name '{run}', so the two would become one. Copy to another root."
        )


def _check_continued(target: ArtifactStore, run: str, records: Mapping[str, bytes]) -> None:
    """Raise RunConflictError if the target has other records of the run: it was continued in both stores."""
    paths = [path for path in records if path.split("/")[2] in LOGS]
    for path, theirs in zip(paths, target.root.read_many(paths), strict=True):
        if theirs is not None and theirs != records[path]:
            raise RunConflictError(
                f"'{path}' in '{target.root.uri}' differs from that of the source: run '{run}' was continued in both "
                "stores, or a record is damaged ('flowmill store verify' says so). Copy to another root."
            )


def _copy_shard(
    source: ArtifactStore, target: ArtifactStore, ref: ArtifactRef, record: ShardRecord, *, again: bool
) -> int:
    """Copy a shard's files unless the target has its record; return the bytes copied.

    Args:
        again: the target removed the files, and has the record alone.
    """
    present = target.record(ref, record.shard)
    if present is not None:
        if present.digest != record.digest:
            raise CommitLostError(
                f"{target.root.uri} has shard {record.shard} of {ref} with other content "
                f"({present.digest[:12]}, the source {record.digest[:12]}). Copy to an empty root."
            )
        if not again:
            return 0
    with target.root.staging() as folder:
        for file in record.files:
            blob = source.files(ref, record).blob(file.name)
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                for start in range(0, blob.size, _PIECE):
                    out.write(blob.read(start, min(_PIECE, blob.size - start)))
        target.root.publish(folder, layout.shard_folder(ref, record.shard, record.digest))
    return sum(file.size for file in record.files)


def _copy_object(source: ArtifactStore, target: ArtifactStore, path: str) -> None:
    data = source.root.read(path)
    if data is not None:
        target.root.create(path, data)
