"""Processes that die with the one that started them; standard library alone, as ranks ask for it before all else."""

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
    """Ask the kernel to end this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, by)


def end_without_agent() -> None:
    """End if torchrun's agent, which started this process, died before the kernel could be asked (Linux).

    A process whose parent died gets another, which need not be process 1, and in a container the agent can be that one.
    """
    with suppress(OSError):
        if _AGENT not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
            sys.exit("torchrun's agent, which started this process, is gone")
