"""Processes that die with their parent; uses only the standard library, as ranks call it before other imports."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
#: Module that torchrun's agents run.
_AGENT = b"tasks/execution/agent.py"


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to end this process when its parent dies for any reason (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, by)


def end_without_agent() -> None:
    """Exit if torchrun's agent, the parent of this process, died before ``die_with_parent`` (Linux).

    An orphaned process gets a new parent, which need not be process 1; in a container the agent can be process 1.
    """
    with suppress(OSError):
        if _AGENT not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
            sys.exit("torchrun's agent, which started this process, is gone")
