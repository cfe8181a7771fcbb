"""Notes that the files of an artifact were removed on purpose, while its records and manifest stay."""

from __future__ import annotations

import time

from configs.errors import CorruptError
from storage import layout
from storage.checksummed_json import seal, unseal
from storage.layout import ArtifactRef


def removal_note(ref: ArtifactRef, reason: str) -> bytes:
    """Return the note that an artifact's files were removed."""
    return seal({"artifact": str(ref), "removed": time.time(), "reason": reason})


def is_removed(data: bytes | None, ref: ArtifactRef) -> bool:
    """Return whether a note says that an artifact's files were removed; that of another artifact says nothing.

    Args:
        data: the note, None where there is none.
        ref: the artifact.
    """
    try:
        return data is not None and _named(data, ref) == str(ref)
    except CorruptError:
        # A note exists, so the files are gone or being removed.
        return True


def check_note(data: bytes, ref: ArtifactRef) -> None:
    """Check that a note is as it was written, and the artifact's own.

    Raises:
        CorruptError: it is not.
    """
    named = _named(data, ref)
    if named != str(ref):
        raise CorruptError(
            f"{layout.removed(ref)} says that the files of {named} were removed. It was copied from there; run "
            "'flowmill store repair' to set it aside."
        )


def _named(data: bytes, ref: ArtifactRef) -> str:
    """Return the artifact that a note names; those of version 0.1.0 name none.

    Raises:
        CorruptError: it is damaged, or no such note.
    """
    path = layout.removed(ref)
    value = unseal(data, path)
    if "removed" not in value:
        raise CorruptError(f"{path} is no note of a removal: something else was copied there.")
    return str(value.get("artifact", ref))
