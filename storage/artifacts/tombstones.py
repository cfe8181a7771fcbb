"""Notes that the files of an artifact were removed on purpose, leaving its records and manifest."""

from __future__ import annotations

import time

from configs.errors import CorruptError
from storage import layout
from storage.artifacts.checksummed_json import seal, unseal
from storage.layout import ArtifactRef


def removal_note(ref: ArtifactRef, reason: str) -> bytes:
    """Return the note that an artifact's files were removed."""
    return seal({"artifact": str(ref), "removed": time.time(), "reason": reason})


def is_removed(data: bytes | None, ref: ArtifactRef) -> bool:
    """Return whether a note says that an artifact's files were removed; a note of another artifact is ignored.

    Args:
        data: the note, None if there is none.
        ref: the artifact.
    """
    try:
        return data is not None and _named(data, ref) == str(ref)
    except CorruptError:
        # A note exists, so the files are gone or being removed.
        return True


def check_note(data: bytes, ref: ArtifactRef) -> None:
    """Check that a note is intact and belongs to the artifact.

    Raises:
        CorruptError: the note is damaged or belongs to another artifact.
    """
    named = _named(data, ref)
    if named != str(ref):
        raise CorruptError(
            f"{layout.removed(ref)} says that the files of {named} were removed. It was copied from there; run "
            "'flowmill store repair' to set it aside."
        )


def _named(data: bytes, ref: ArtifactRef) -> str:
    """Return the artifact that a note names, or ``ref`` for notes of version 0.1.0, which name none."""
    path = layout.removed(ref)
    value = unseal(data, path)
    if "removed" not in value:
        raise CorruptError(f"{path} is no note of a removal: something else was copied there.")
    return str(value.get("artifact", ref))
