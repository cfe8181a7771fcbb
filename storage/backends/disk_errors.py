"""Uniform errors of full or failing disks for all writing libraries."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from flowmill.configs.errors import StoreError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
#: Errors that a retry does not fix.
_FULL = {*_NO_ROOM, errno.EFBIG, errno.EROFS}


def lacks_room(error: OSError) -> bool:
    """Return whether an error says that removing files would help."""
    return error.errno in _NO_ROOM


@contextmanager
def named_disk(where: str) -> Iterator[None]:
    """Convert disk errors inside the context to ones that name the store; native libraries have other error types.

    Args:
        where: the store.

    Raises:
        StoreError: the disk is full or read-only.
        OSError: the disk failed in another way, which may be temporary.
    """
    try:
        yield
    except OSError as error:
        raise _full(where, error.errno) or error from error.__cause__
    except Exception as error:
        # Rust's format, in errors of safetensors.
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise _full(where, number) or OSError(number, os.strerror(number), where) from error


def _full(where: str, number: int | None) -> StoreError | None:
    if number not in _FULL:
        return None
    return StoreError(
        f"'{where}': {os.strerror(number)}. Committed data stays: free space ('flowmill store gc' lists removable "
        "files) and run the same command again."
    )
