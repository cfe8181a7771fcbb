"""Standard output whose reader may be gone, as in ``flowmill run CONFIG | head``: the work goes on without it."""

from __future__ import annotations

import os
import sys
from typing import IO


def write(text: str, stream: IO[str]) -> None:
    """Write a visible text to a stream immediately; drop it if nothing reads the stream any more."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        discard_output(stream)


def discard_output(stream: IO[str]) -> None:
    """Point a stream whose pipe is closed at the null device, and standard error if it is the same pipe."""
    closed = os.fstat(stream.fileno())
    null = os.open(os.devnull, os.O_WRONLY)
    # There is no standard error in a process that was started without one.
    for each in filter(None, (stream, sys.stderr)):
        if os.path.samestat(os.fstat(each.fileno()), closed):
            os.dup2(null, each.fileno())
    os.close(null)
