"""Names that identify the process that wrote a file, to recognize files of dead processes.

A process id alone is not enough: other containers on the same folder have their own ids, and ids are reused after a
restart.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import uuid
from functools import cache
from pathlib import Path

import psutil

_SEPARATOR = "~"
_PARTS = 5
_FORM = re.compile(r"[^~/]+~[0-9a-f]{12}~[0-9]+~[0-9]*~[0-9a-f]{32}")


def tag() -> str:
    """Return a unique name: host, id of boot and process namespace, process id, its start time, a random number."""
    pid = os.getpid()
    return _SEPARATOR.join((socket.gethostname(), _machine(), str(pid), _own_start(pid), uuid.uuid4().hex))


def is_tag(name: str) -> bool:
    """Return whether a name has the form of a ``tag``."""
    return _FORM.fullmatch(name) is not None


def is_gone(name: str) -> bool:
    """Return whether the process of a ``tag`` is certainly gone; False if this cannot be determined here."""
    parts = name.split(_SEPARATOR)
    if len(parts) != _PARTS or not (parts[2].isascii() and parts[2].isdigit()):
        return False
    host, machine, pid, start, _ = parts
    return host == socket.gethostname() and machine == _machine() and _start(pid) != start


def process_label(name: str) -> str:
    """Return host and process of a ``tag`` in readable form."""
    parts = name.split(_SEPARATOR)
    return f"{parts[0]}, pid {parts[2]}" if len(parts) == _PARTS else "unknown host and process"


@cache
def _machine() -> str:
    """Return an id that differs between boots of a machine and between process namespaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, space = str(int(psutil.boot_time())), ""
    return hashlib.blake2b(f"{boot}{space}".encode(), digest_size=6).hexdigest()


@cache
def _own_start(pid: int) -> str:
    """Return the start time of this process, cached per process id, as a fork has another one."""
    return _start(str(pid)) or ""


def _start(pid: str) -> str | None:
    """Return the start time of a process in the kernel's clock ticks; None if it does not exist."""
    try:
        # The start time is the 20th field after the process name, which is in parentheses and may hold any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        return str(int(psutil.Process(int(pid)).create_time()))
    except psutil.NoSuchProcess:
        return None
