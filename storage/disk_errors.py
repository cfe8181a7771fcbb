"""Errors of full or failing disks, whichever library writes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from configs.errors import StoreError

#: Nothing of this passes by trying again.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


@contextmanager
def named_disk(where: str) -> Iterator[None]:
    """Name the disk's fault and the path; libraries of other languages have errors of their own for that.

    Args:
        where: the store.

    Raises:
        StoreError: inside, the disk was full, or cannot be written.
        OSError: inside, it failed otherwise, which may pass.
    """
    try:
        yield
    except OSError as error:
        raise _full(where, error.errno) or error from error.__cause__
    except Exception as error:
        # Rust's way to say it, in safetensors' errors.
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise _full(where, number) or OSError(number, os.strerror(number), where) from error


def _full(where: str, number: int | None) -> StoreError | None:
    if number not in _FULL:
        return None
    return StoreError(
        f"'{where}': {os.strerror(number)}. Committed data stays: free space ('flowmill store gc' shows what may go) "
        "and run the same command again."
    )
