"""Transient optimizer checkpoints of a policy that is being trained.

They live beside the unfinished policy artifact, are committed like shards (files first, then a record that names them),
and are removed when the policy is complete.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from configs.errors import CorruptError
from configs.fingerprint import fingerprint
from storage import layout
from storage.checksums import describe_file
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.roots.base import FileEntry


def commit_checkpoint(store: ArtifactStore, ref: ArtifactRef, update: int, folder: Path) -> None:
    """Publish a folder as the checkpoint after ``update`` optimizer updates."""
    files = [describe_file(path, path.name) for path in sorted(folder.iterdir())]
    name = f"{update:06d}-{fingerprint([[file.name, file.xxh3] for file in files])[:16]}"
    store.root.publish(folder, f"{layout.checkpoints(ref)}/{name}")
    record = json.dumps({"files": [asdict(file) for file in files]}, sort_keys=True)
    store.root.create(f"{layout.checkpoints(ref)}/{name}.json", record.encode())


def latest_checkpoint(store: ArtifactStore, ref: ArtifactRef) -> tuple[int, Path] | None:
    """Return (updates done, local folder) of the newest checkpoint, or None.

    Raises:
        CorruptError: its content is not what its record says.
    """
    names = [name for name in store.root.list(layout.checkpoints(ref)) if name.endswith(".json")]
    if not names:
        return None
    name = names[-1].removesuffix(".json")
    path = f"{layout.checkpoints(ref)}/{name}"
    try:
        files = json.loads(store.root.read(f"{path}.json") or b"")["files"]
        entries = [FileEntry.parse(file) for file in files]
        for entry in entries:
            store.root.check(path, entry)
        folder = {store.root.fetch(path, entry).parent for entry in entries}.pop()
    except (ValueError, KeyError, TypeError, CorruptError) as error:
        raise CorruptError(f"Checkpoint {path} was damaged after it was committed ({error}). Remove it.") from None
    return int(name.partition("-")[0]), folder


def clear_checkpoints(store: ArtifactStore, ref: ArtifactRef) -> None:
    """Remove all checkpoints of a policy."""
    store.root.remove(layout.checkpoints(ref))
