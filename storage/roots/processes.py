"""Names that tell which process they are of, so that what a dead one left can be told from what a live one holds.

A process id alone tells nothing: another container on the same folder counts its own, and a machine counts anew after
it was started again.
"""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from functools import cache
from pathlib import Path

import psutil

_SEPARATOR = "~"
_PARTS = 5


def tag() -> str:
    """Return a unique name: host, which start of which machine and process namespace, process, its start, a number."""
    pid = os.getpid()
    return _SEPARATOR.join((socket.gethostname(), _machine(), str(pid), _own_start(pid), uuid.uuid4().hex))


def is_gone(name: str) -> bool:
    """Return whether the process of a ``tag`` is certainly gone; False where that cannot be known from here."""
    parts = name.split(_SEPARATOR)
    if len(parts) != _PARTS or not parts[2].isdigit():
        return False
    host, machine, pid, start, _ = parts
    return host == socket.gethostname() and machine == _machine() and _start(int(pid)) != start


def told(name: str) -> str:
    """Return host and process of a ``tag`` for people."""
    parts = name.split(_SEPARATOR)
    return f"{parts[0]}, pid {parts[2]}" if len(parts) == _PARTS else "unknown host and process"


@cache
def _machine() -> str:
    """Return what differs from start to start of a machine, and from one namespace of processes to another."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, space = str(int(psutil.boot_time())), ""
    return hashlib.blake2b(f"{boot}{space}".encode(), digest_size=6).hexdigest()


@cache
def _own_start(pid: int) -> str:
    """Return when this process began, which is asked for with every file; a fork has another number."""
    return _start(pid) or ""


def _start(pid: int) -> str | None:
    """Return when a process began, in the kernel's own count; None if there is none."""
    try:
        # Its name, in parentheses, may hold anything; the 20th of what follows is the start.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        return str(int(psutil.Process(pid).create_time()))
    except psutil.NoSuchProcess:
        return None
