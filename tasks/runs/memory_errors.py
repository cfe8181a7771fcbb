"""Out-of-memory errors, with remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from configs.errors import OutOfMemoryError

#: Errors of torch and of Python, by name so that torch need not be imported here.
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")


@contextmanager
def enough_memory(task: str, remedies: Sequence[str], advice: Callable[[], str] = str) -> Iterator[None]:
    """Raise an error with remedies where a device has too little memory.

    Args:
        task: the work inside.
        remedies: possible changes, a sentence each.
        advice: returns a further remedy, based on the memory in use at that time.

    Raises:
        OutOfMemoryError: the device ran out of memory inside.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if type(error).__name__ not in _NO_MEMORY:
            raise
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutOfMemoryError(
            f"{task}: {message} {' '.join([*remedies, *filter(None, [advice()])])} 'flowmill check' estimates memory."
        ) from error
