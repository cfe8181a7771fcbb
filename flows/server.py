"""The temporary Prefect API of a run without a configured server.

Prefect's own temporary server starts only with the first flow, and it outlives a killed parent. This one starts while
libraries are being imported, and ends with its parent.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flowmill.configs.errors import FlowmillError
from flowmill.configs.gc_tuning import RARELY
from flowmill.configs.import_paths import HOME
from flowmill.tasks.execution.launch import stop_trees
from flowmill.tasks.execution.parent_death import die_with_parent


@contextmanager
def local_api() -> Iterator[LocalApi | None]:
    """Start a temporary Prefect API server unless PREFECT_API_URL (or the profile) names one; stop it at the end.

    It starts before Prefect is imported here, which takes a second, and is stopped if a profile names another. Nested
    calls share the outer server: Prefect's client retries unsent events for minutes if its server is gone.
    """
    early = LocalApi() if _starts_early() else None
    with ExitStack() as stack:
        if early is not None:
            stack.callback(early.stop)
        from prefect.settings import get_current_settings

        if get_current_settings().api.url:
            stack.close()
            from flowmill.flows.api import check_server

            check_server()
            yield None
            return
        if _temporary:
            yield _temporary[-1]
            return
        check_home()
        if early is None:
            early = LocalApi()
            stack.callback(early.stop)
        _temporary.append(early)
        stack.callback(_temporary.remove, early)
        yield early


def _starts_early() -> bool:
    """Return whether a server starts before Prefect and its settings are imported: one that cannot write, ends with a
    traceback."""
    if "prefect" in sys.modules or os.environ.get("PREFECT_API_URL"):
        return False
    home = os.environ.get("PREFECT_HOME") or os.path.expanduser("~/.prefect")
    return _write_error(Path(home)) is None


def check_home() -> None:
    """Check that Prefect's server can write its database; the server itself would fail with a long traceback."""
    from prefect.settings import get_current_settings

    home = get_current_settings().home
    if error := _write_error(home):
        raise FlowmillError(
            f"Prefect's home '{home}' cannot be written: {error.strerror or error}. Its server keeps its database "
            "there. Set PREFECT_HOME to a folder that can be written, or PREFECT_API_URL to a server that runs."
        )


def _write_error(folder: Path) -> OSError | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"0")
    except OSError as error:
        return error
    return None


def has_lasting_api() -> bool:
    """Return whether the Prefect API is reachable by other processes and outlives this one."""
    return not _temporary and _TEMPORARY not in os.environ


def environment_of_child() -> dict[str, str]:
    """Return the environment of a process of ours that uses this process's Prefect server."""
    from prefect.settings import get_current_settings

    server = {"PREFECT_API_URL": str(get_current_settings().api.url)}
    return os.environ | server | ({} if has_lasting_api() else {_TEMPORARY: "1"})


_temporary: list[LocalApi] = []
#: Set in processes whose PREFECT_API_URL is the temporary server of another.
_TEMPORARY = "FLOWMILL__TEMPORARY_API"
#: ``python -m uvicorn`` with rare garbage collection, which starts a third faster and ends sooner.
_UVICORN = (
    f"import atexit, gc, runpy; gc.set_threshold{RARELY}; atexit.register(gc.freeze); "
    "runpy.run_module('uvicorn', run_name='__main__', alter_sys=True)"
)
#: Maximum number of starts of the server; repeated failures are permanent.
_STARTS = 4


def prefect_command(port: int) -> list[str]:
    """Return the command that starts Prefect's server on the loopback interface, guarded against foreign pages."""
    command = [sys.executable, "-c", _UVICORN, "--factory", "flowmill.flows.guard:prefect_app"]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--lifespan", "on"]


def prefect_environment(port: int) -> dict[str, str]:
    """Return the environment of ``prefect_command``."""
    pages = ",".join(f"http://{name}:{port}" for name in ("127.0.0.1", "localhost"))
    return _own_environment() | {"PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": pages}


def _own_environment() -> dict[str, str]:
    """Return the environment of a process that imports flowmill's packages from any working directory."""
    tree, others = str(HOME), os.environ.get("PYTHONPATH")
    # Safe path: files in the user's working directory must not shadow the server's libraries.
    return {**os.environ, "PYTHONPATH": os.pathsep.join([tree, *([others] if others else [])]), "PYTHONSAFEPATH": "1"}


class LocalApi:
    """A Prefect API server on a free port of the loopback interface."""

    def __init__(self) -> None:
        """Start the process; ``wait`` before using it."""
        self._answered = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/api"
        self._command = [*prefect_command(port), "--log-level", "error"]
        self._environment = prefect_environment(port) | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
        self._stopping, self._begun = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        # The parent-death signal follows the forking thread, which must live as long as the server.
        threading.Thread(target=self._keep, daemon=True, name="prefect-server").start()
        self._begun.wait()
        if self._failure is not None:
            raise FlowmillError(f"Prefect's API server cannot be started: {self._failure}.")

    def _keep(self) -> None:
        """Run the server, and restart it at the same address if it ends early; its database stays."""
        for left in reversed(range(_STARTS)):
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    text=True,
                    # A restarted server reports only events that its predecessor left unfinished.
                    stderr=subprocess.DEVNULL if self._answered else None,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except BaseException as error:  # noqa: BLE001 - the starting thread receives it
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
        """Return the API's URL once it answers."""
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
