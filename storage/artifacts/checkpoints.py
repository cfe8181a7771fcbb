"""Transient optimizer checkpoints of a policy during training.

They live in the unfinished policy artifact and are committed like shards: first the files, possibly of several
processes, then a record that names them. The newest two stay until the policy is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flowmill.configs.errors import CorruptError
from flowmill.configs.fingerprint import fingerprint
from flowmill.storage import layout
from flowmill.storage.artifacts.collective_publish import ProcessGroup, SingleProcess, publish
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.records import Record
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.backends.checksums import check_size
from flowmill.storage.layout import ArtifactRef

#: Number of retained checkpoints: one to resume from, and the one before it in case of damage.
_RETAINED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Record):
    """The record of a checkpoint."""

    noun = "the record of a checkpoint"

    files: Annotated[tuple[FileEntry, ...], Field(min_length=1)]
    """Its files, sorted by name."""

    def place(self, where: str) -> str:
        """Return the path itself: the files below it, which are compared with the record, determine its name."""
        return where


def commit_checkpoint(
    store: ArtifactStore, ref: ArtifactRef, update: int, folder: Path, company: ProcessGroup | None = None
) -> None:
    """Publish a folder as the checkpoint after ``update`` optimizer updates; all of ``company`` call this together."""
    company = company or SingleProcess()
    top = layout.checkpoints(ref)

    def name(files: Sequence[FileEntry]) -> str:
        return f"{update:06d}-{fingerprint([[file.name, file.xxh3] for file in files])[:16]}"

    files = publish(store.root, folder, lambda files: f"{top}/{name(files)}", company)
    if company.rank == 0:
        store.root.create(f"{top}/{name(files)}.json", Checkpoint(files=files).encoded())
        for old in _committed(store, ref)[:-_RETAINED]:
            store.root.remove(f"{top}/{old}.json")
            store.root.remove(f"{top}/{old}")


def latest_checkpoint(
    store: ArtifactStore, ref: ArtifactRef, company: ProcessGroup | None = None
) -> tuple[int, Path] | None:
    """Return (updates done, local folder) of the newest checkpoint, or None; the same one on all of ``company``, which
    call this together."""
    company = company or SingleProcess()
    while True:
        name = company.gather((_committed(store, ref) or [""])[-1] if company.rank == 0 else "")[0]
        if not name:
            return None
        folder = _fetched(store, ref, name)
        # Another run that trains the same policy may have removed it in the meantime.
        is_there = all(company.gather(folder is not None))
        if is_there and folder is not None:
            return int(name.partition("-")[0]), folder


def _fetched(store: ArtifactStore, ref: ArtifactRef, name: str) -> Path | None:
    """Return the local folder of a checkpoint; None if it was removed."""
    path = f"{layout.checkpoints(ref)}/{name}"
    try:
        entries = _checked(store, path, deep=True)
        return {store.root.fetch(path, entry).parents[entry.name.count("/")] for entry in entries}.pop()
    except CorruptError:
        # Its record may be cached.
        if name not in _committed(store, ref):
            return None
        raise


def damaged_checkpoints(store: ArtifactStore, ref: ArtifactRef, *, deep: bool) -> Iterator[tuple[str, str]]:
    """Yield (folder, problem) of every checkpoint that differs from its record.

    Args:
        ref: the policy.
        deep: compare every byte instead of sizes only.
    """
    for name in _committed(store, ref):
        path = f"{layout.checkpoints(ref)}/{name}"
        try:
            _checked(store, path, deep=deep)
        except CorruptError as error:
            # Training may have removed the oldest one in the meantime.
            if name in _committed(store, ref):
                yield path, str(error)


def _checked(store: ArtifactStore, path: str, *, deep: bool) -> tuple[FileEntry, ...]:
    """Return the files of a checkpoint after comparing sizes, or every byte, with its record."""
    try:
        entries = Checkpoint.decode(store.root.read(f"{path}.json") or b"", f"{path}.json").files
        sizes = {} if deep else store.root.files(path)
        for entry in entries:
            if deep:
                store.root.check(path, entry)
            else:
                check_size(sizes.get(entry.name), entry, where=f"{path}/{entry.name}")
    except CorruptError as error:
        raise CorruptError(
            f"Checkpoint {path} was damaged after it was committed ({error}). 'flowmill store repair' sets it aside: "
            "training then goes on from the checkpoint before it, or from the start of the epoch."
        ) from None
    return entries


def _committed(store: ArtifactStore, ref: ArtifactRef) -> list[str]:
    names = store.root.list(layout.checkpoints(ref))
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def clear_checkpoints(store: ArtifactStore, ref: ArtifactRef) -> None:
    """Remove all checkpoints of a policy, if there are any."""
    if store.root.list(layout.checkpoints(ref)):
        store.root.remove(layout.checkpoints(ref))
