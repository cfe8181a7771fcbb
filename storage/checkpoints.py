"""Transient optimizer checkpoints of a policy that is being trained.

They live beside the unfinished policy artifact, are committed by a rename of a finished folder whose name carries its
digest, and are removed when the policy is complete.
"""

from __future__ import annotations

from pathlib import Path

from configs.errors import CorruptError
from configs.fingerprint import fingerprint
from storage import layout
from storage.commit import ArtifactStore, hash_file
from storage.layout import ArtifactRef


def commit_checkpoint(store: ArtifactStore, ref: ArtifactRef, update: int, folder: Path) -> None:
    """Publish a folder as the checkpoint after ``update`` optimizer updates."""
    store.root.publish(folder, f"{layout.checkpoints(ref)}/{update:06d}-{_digest(folder)[:16]}")


def latest_checkpoint(store: ArtifactStore, ref: ArtifactRef) -> tuple[int, Path] | None:
    """Return (updates done, local folder) of the newest checkpoint, or None.

    Raises:
        CorruptError: its content is not what its name says.
    """
    names = store.root.list(layout.checkpoints(ref))
    if not names:
        return None
    name = names[-1]
    update, _, digest = name.partition("-")
    folder = store.root.local(f"{layout.checkpoints(ref)}/{name}")
    if _digest(folder)[:16] != digest:
        raise CorruptError(f"Checkpoint {folder} was damaged after it was committed. Remove it and run again.")
    return int(update), folder


def clear_checkpoints(store: ArtifactStore, ref: ArtifactRef) -> None:
    """Remove all checkpoints of a policy."""
    store.root.remove(layout.checkpoints(ref))


def _digest(folder: Path) -> str:
    return fingerprint([[path.name, hash_file(path)] for path in sorted(folder.iterdir())])
