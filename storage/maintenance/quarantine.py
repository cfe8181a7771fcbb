"""Moves damaged shards to quarantine, so that their stage regenerates them; nothing is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

from flowmill.configs.errors import CorruptError
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.mirrored_records import put_back
from flowmill.storage.artifacts.records import Manifest, Record, ShardRecord, removal_note
from flowmill.storage.layout import QUARANTINE, ArtifactRef
from flowmill.storage.maintenance.verify import Problem

_Record = TypeVar("_Record", bound=Record)


def quarantine(store: ArtifactStore, problem: Problem) -> list[str]:
    """Move the files of a problem below ``quarantine/``; return the moved paths.

    The manifest goes first, so that readers see an incomplete artifact. The record goes last, so that the same damage
    appears again after a crash in between.
    """
    ref = problem.ref
    if ref is None:
        return _put_back(store, problem.path)
    if problem.path == layout.removed(ref):
        return _rewrite_note(store, ref)
    if problem.kind == "orphaned":
        paths = [problem.path]
    elif problem.path:
        # The record of a checkpoint goes before its files, which are ignored without it.
        paths = [f"{problem.path}.json", problem.path]
    else:
        paths = [layout.manifest(ref)]
        if problem.shard is not None:
            records = store.root.list(ref.path)
            paths += [f"{ref.path}/{name}" for name in records if name.rpartition("-")[0] == problem.shard]
            paths.append(layout.record(ref, problem.shard))
    return [path for path in paths if _set_aside(store, path)]


def revive(store: ArtifactStore, ref: ArtifactRef) -> None:
    """Quarantine the rest of an artifact whose files were removed, so that its stage regenerates it.

    The note goes first: after a crash in between, the files are reported as missing.
    """
    store.root.remove(layout.removed(ref))
    for path in (layout.manifest(ref), *(layout.record(ref, shard) for shard in store.committed(ref))):
        _set_aside(store, path)


def leave_trace(store: ArtifactStore, ref: ArtifactRef, reason: str) -> bool:
    """Restore manifest and records of an artifact that no stage regenerates, and mark its files as removed.

    Returns:
        Whether all are intact, in place or in quarantine.
    """
    path = layout.manifest(ref)
    manifest, data = next(_intact(store, Manifest, path), (None, b""))
    if manifest is None:
        return False
    records = {}
    for shard, digest, _ in manifest.shards:
        place = layout.record(ref, shard)
        records[place] = next(
            (content for each, content in _intact(store, ShardRecord, place) if each.digest == digest), b""
        )
    if not all(records.values()):
        return False
    # The manifest goes last, so that it is still missing after a crash in between.
    store.root.create(layout.removed(ref), removal_note(ref, reason))
    for place, content in [*records.items(), (path, data)]:
        store.root.create(place, content)
    return True


def _intact(store: ArtifactStore, kind: type[_Record], path: str) -> Iterator[tuple[_Record, bytes]]:
    """Yield the intact ones, with their bytes, of the record at a path and its quarantined versions, newest first."""
    parent, _, name = f"{QUARANTINE}/{path}".rpartition("/")
    aside = [each for each in store.root.list(parent) if each == name or each.startswith(f"{name}.")]
    newest_first = sorted(aside, key=lambda each: (len(each), each), reverse=True)
    for place in (path, *(f"{parent}/{each}" for each in newest_first)):
        data = store.root.read(place) or b""
        with suppress(CorruptError):
            yield kind.decode(data, path), data


def _put_back(store: ArtifactStore, path: str) -> list[str]:
    """Quarantine a damaged record of a run, or its copy, and replace it with the intact one of the two.

    If both are damaged, both are quarantined: a copy that stays would keep the record from being written again.
    """
    whole = put_back(store.root, path)
    moved = []
    for place in whole or dict.fromkeys([path, layout.copy_of(layout.record_of(path))]):
        data = store.root.read(place)
        if data is not None and data == whole.get(place):
            continue
        moved += [place] if _set_aside(store, place) else []
        if place in whole:
            store.root.create(place, whole[place])
    return moved


def _rewrite_note(store: ArtifactStore, ref: ArtifactRef) -> list[str]:
    """Quarantine a note of a removal; if files were removed, write a new one."""
    path = layout.removed(ref)
    moved = [path] if _set_aside(store, path) else []
    if not any(layout.holds_files(name) for name in store.root.list(ref.path)):
        store.root.create(path, removal_note(ref, "the note of it was damaged"))
    return moved


def _set_aside(store: ArtifactStore, path: str) -> bool:
    parent, _, name = path.rpartition("/")
    if name not in store.root.list(parent):
        return False
    store.root.move(path, _free(store, f"{QUARANTINE}/{path}"))
    return True


def _free(store: ArtifactStore, path: str) -> str:
    """Return the path, with a number if it is already taken."""
    parent, _, name = path.rpartition("/")
    taken = set(store.root.list(parent))
    if name not in taken:
        return path
    number = next(n for n in range(2, len(taken) + 3) if f"{name}.{n}" not in taken)
    return f"{path}.{number}"
