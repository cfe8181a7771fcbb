"""What a machine has too little of, said with what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from configs.errors import OutOfMemoryError

#: torch's, and Python's own; by name, as torch need not be loaded here.
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")


@contextmanager
def enough_memory(what: str, remedies: Sequence[str], advice: Callable[[], str] = str) -> Iterator[None]:
    """Say what to change where a device has too little memory.

    Args:
        what: what is worked on inside.
        remedies: what to change, a sentence each.
        advice: returns what else may help, told by what of the memory is in use then.

    Raises:
        OutOfMemoryError: inside, there was too little.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if type(error).__name__ not in _NO_MEMORY:
            raise
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutOfMemoryError(
            f"{what}: {said} {' '.join([*remedies, *filter(None, [advice()])])} 'flowmill check' estimates what fits."
        ) from error
