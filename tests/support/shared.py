"""Servers that all processes of a test run share: one Prefect API server, and one process that forks command lines.

Each is started when somebody first asks for it, by the process that pytest was called in, and ends with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import socketserver
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from flowmill.flows.server import LocalApi
from tests.support.preloaded import Preloaded

#: Names the socket of the process that shares, to those that it starts.
VARIABLE = "FLOWMILL_TEST_SHARED"


class Shared:
    """Starts what it is asked for, once, and says where it is."""

    def __init__(self) -> None:
        """Listen; nothing is started yet."""
        self._stack, self._lock = ExitStack(), threading.Lock()
        self._found: dict[str, str] = {}
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="flowmill-shared-")))
        self.address = str(folder / "socket")
        asked = self

        class Answer(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                name = self.rfile.readline().decode().strip()
                self.wfile.write(asked._get(name).encode())

        self._server = socketserver.ThreadingUnixStreamServer(self.address, Answer)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _get(self, name: str) -> str:
        with self._lock:
            if "prefect" not in self._found:
                api = LocalApi()
                self._stack.callback(api.stop)
                self._found["prefect"] = api.wait()
            if name == "preloaded" and name not in self._found:
                started = Preloaded({**os.environ, "PREFECT_API_URL": self._found["prefect"], "COLUMNS": "200"})
                self._stack.callback(started.close)
                self._found[name] = started.address
            if name == "database" and name not in self._found:
                self._found[name] = str(Path(self.address).with_name("prefect.db"))
                with closing(sqlite3.connect(Path(os.environ["PREFECT_HOME"]) / "prefect.db")) as database:
                    database.execute("VACUUM INTO ?", [self._found[name]])
            return self._found[name]

    def close(self) -> None:
        """End what was started."""
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            self._stack.close()


def where(name: str) -> str:
    """Return where something shared is, made now if nobody has asked before.

    Args:
        name: ``prefect``, the server; ``preloaded``, what forks; ``database``, a server's with all its tables, to copy.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[VARIABLE])
        connection.sendall(f"{name}\n".encode())
        with connection.makefile("rb") as answer:
            return answer.read().decode()


def once(name: str, build: Callable[[Path], object]) -> Path:
    """Return a folder that the first of all processes that needs it builds; nobody changes it afterwards."""
    folder = Path(os.environ[VARIABLE]).with_name(name)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            build(building)
            building.rename(folder)
    return folder
