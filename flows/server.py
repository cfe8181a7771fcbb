"""The Prefect API of a run without a server of its own.

Prefect starts a temporary server by itself, but only when the first flow begins, and it outlives a killed parent.
This one starts while models are still being imported, and dies with us.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import FlowmillError
from configs.gc_tuning import RARELY
from tasks.execution.launch import stop_trees
from tasks.execution.parent_death import die_with_parent


@contextmanager
def local_api() -> Iterator[LocalApi | None]:
    """Start a temporary Prefect API server unless PREFECT_API_URL (or the profile) names one; stop it in the end.

    Inside another it is the one that runs: what Prefect's client has not told a server that is gone by then, it goes on
    telling it for minutes.

    Raises:
        ConfigError: the one that is named does not answer.
        FlowmillError: none can be started.
    """
    from prefect.settings import get_current_settings

    if get_current_settings().api.url:
        from flows.api import check_server

        check_server()
        yield None
        return
    if _temporary:
        yield _temporary[-1]
        return
    check_home()
    api = LocalApi()
    _temporary.append(api)
    try:
        yield api
    finally:
        _temporary.remove(api)
        api.stop()


def check_home() -> None:
    """Check that Prefect's server can keep its database: it would end with pages of its own about it.

    Raises:
        FlowmillError: nothing can be written there.
    """
    from prefect.settings import get_current_settings

    home = get_current_settings().home
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home) as probe:
            probe.write(b"0")
    except OSError as error:
        raise FlowmillError(
            f"Prefect's home '{home}' cannot be written: {error.strerror or error}. Its server keeps its database "
            "there. Set PREFECT_HOME to a folder that can be written, or PREFECT_API_URL to a server that runs."
        ) from None


def has_lasting_api() -> bool:
    """Return whether the Prefect API is one that somebody else can reach and outlives this process."""
    return not _temporary


_temporary: list[LocalApi] = []
#: ``python -m uvicorn``, which is a third sooner at work.
_UVICORN = (
    f"import gc, runpy; gc.set_threshold{RARELY}; runpy.run_module('uvicorn', run_name='__main__', alter_sys=True)"
)
#: How often a server is started; one that ends again and again will not get better.
_STARTS = 4


def prefect_command(port: int) -> list[str]:
    """Return what starts Prefect's server on the loopback interface, such that it answers no foreign page."""
    command = [sys.executable, "-c", _UVICORN, "--factory", "flows.guard:prefect_app"]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--lifespan", "on"]


def prefect_environment(port: int) -> dict[str, str]:
    """Return the environment of ``prefect_command``."""
    pages = ",".join(f"http://{name}:{port}" for name in ("127.0.0.1", "localhost"))
    return own_environment() | {"PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": pages}


def own_environment() -> dict[str, str]:
    """Return the environment of a process that imports flowmill's packages, wherever it is started."""
    tree, others = str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")
    # Safe path: the working directory is the user's, and what lies there must not hide the server's libraries.
    return {**os.environ, "PYTHONPATH": os.pathsep.join([tree, *([others] if others else [])]), "PYTHONSAFEPATH": "1"}


class LocalApi:
    """A Prefect API server on a free port of the loopback interface."""

    def __init__(self) -> None:
        """Start the process; ``wait`` before using it.

        Raises:
            FlowmillError: the machine starts no process any more.
        """
        self._answered = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        self._command = [*prefect_command(port), "--log-level", "error"]
        self._environment = prefect_environment(port) | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
        self._stopping, self._begun = threading.Event(), threading.Event()
        self._failure: OSError | None = None
        # The parent-death signal is that of the thread that forks, which must live as long as the server.
        threading.Thread(target=self._keep, daemon=True, name="prefect-server").start()
        self._begun.wait()
        if self._failure is not None:
            raise FlowmillError(f"Prefect's API server cannot be started: {self._failure}.")

    def _keep(self) -> None:
        """Run the server, and run it again at the same address if it ends while it is needed; its database stays."""
        for left in reversed(range(_STARTS)):
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    text=True,
                    # What a second one says is of events that the first left unfinished.
                    stderr=subprocess.DEVNULL if self._answered else None,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                self._failure = error
                return
            finally:
                self._begun.set()
            self._process.wait()
            if self._stopping.is_set() or not self._answered:
                return
            if left:
                sys.stderr.write("flowmill: Prefect's temporary server ended; it is started again.\n")

    def wait(self) -> str:
        """Return the API's URL once it answers.

        Raises:
            FlowmillError: the server ended, or did not answer in time.
        """
        limit = float(os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"])
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise FlowmillError(
                    f"Prefect's API server ended with code {self._process.returncode} while starting; its own "
                    "message is above. Check that fastapi and SQLAlchemy are within flowmill's bounds: pip check."
                )
            if _answers(f"{self.url}/health"):
                self._answered = True
                return self.url
            time.sleep(0.05)
        raise FlowmillError(
            f"Prefect's API server did not answer within {limit:.0f} s. Raise "
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, or start 'prefect server start' and set PREFECT_API_URL."
        )

    def stop(self) -> None:
        """Stop the server."""
        self._stopping.set()
        stop_trees([self._process], grace=5)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
