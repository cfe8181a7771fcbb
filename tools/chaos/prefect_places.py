"""Runs on a Prefect server that outlives them, with another clock, or carried out by Prefect's workers."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support import clusters
from tools.chaos.kills import ROOT, start
from tools.chaos.place import ENDS_S, Place, Run, kill_run

#: Part of the message that refuses a second process of a run.
_EXECUTED = "is being executed by another process"


class LastingServer(Place):
    """A Prefect server that outlives the runs."""

    def _begin(self) -> None:
        self.server = self.keep(clusters.prefect_api({**self.environment, "PREFECT_HOME": str(self.folder)}))
        self.variables = {"PREFECT_API_URL": self.server.environment["PREFECT_API_URL"]}
        # Tries of a lost server take three minutes by default.
        self.variables["PREFECT_CLIENT_MAX_RETRIES"] = "3"
        self.disturbances = {"server": lambda run: self.server.kill(), "parent": kill_run, "cancel": self._cancel}

    def heal(self) -> None:
        """Start the server again."""
        self.server.start()

    @contextlib.contextmanager
    def client(self) -> Any:
        """Give a client of the server."""
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_URL, temporary_settings

        url = self.variables["PREFECT_API_URL"]
        with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
            yield client

    def running(self) -> list[Any]:
        """Return the flow runs that are running, as the server knows."""
        with self.client() as client:
            return [each for each in client.read_flow_runs() if each.state.is_running()]

    def left(self) -> list[str]:
        """Return flow runs without a process that are running for ever."""
        deadline = time.monotonic() + ENDS_S
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(1)
        return [f"flow run {each.name} is still running" for each in running]

    def _cancel(self, run: Run) -> None:
        from prefect.states import Cancelling

        flow_runs = self.running()
        with self.client() as client:
            for each in flow_runs:
                client.set_flow_run_state(each.id, Cancelling(), force=True)
        if not flow_runs:
            run.kill()


class Clock(LastingServer):
    """Runs each of which has another clock than the one before and the server, by up to two days."""

    def _begin(self) -> None:
        super()._begin()
        source, library = ROOT / "tools" / "chaos" / "clock.c", self.folder / "clock.so"
        compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.variables["LD_PRELOAD"] = str(library)
        self.disturbances = {"clock, parent": kill_run}
        self.heal()

    def heal(self) -> None:
        """Set another clock."""
        self.variables["FLOWMILL_CLOCK"] = str(self.rng.randint(-172800, 172800))


class Flow:
    """Flow runs that workers carry out, like a process."""

    returncode: int | None = None
    is_lost = False
    """Nothing is left that could end them."""

    def __init__(self, place: Worker, ids: list[Any]) -> None:
        self._place, self._ids = place, ids

    def wait(self, timeout: float) -> list[Any]:
        """Wait for their final states."""
        deadline = time.monotonic() + timeout
        states = self._states()
        while not all(state.is_final() for state in states):
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("flow run", timeout)
            time.sleep(0.5)
            states = self._states()
        # One process at a time executes a run; the others are refused, and the run is whole if one completes.
        left = [state for state in states if not state.is_completed()]
        refused = all(_EXECUTED in (state.message or "") for state in left)
        self.returncode = 0 if refused and len(left) < len(states) else 1
        return states

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        """Wait for their final states, and return the messages."""
        if self.is_lost:
            self.returncode = -9
            return b"", None
        states = self.wait(timeout)
        return "\n".join(f"flowmill: {state.name} {state.message}" for state in states).encode(), None

    def kill(self) -> None:
        """Kill their processes."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if variables.get("FLOWMILL_TEST") == str(self._place.folder) and "PREFECT__FLOW_RUN_ID" in variables:
                    process.kill()

    def _states(self) -> list[Any]:
        with self._place.client() as client:
            return [client.read_flow_run(each).state for each in self._ids]


class Worker(LastingServer):
    """Flow runs of deployments, carried out by Prefect workers."""

    count = 1
    """Workers, and deployments of the run."""

    def _begin(self) -> None:
        # Start the server; workers start with the first deployment, which creates their pool.
        super()._begin()
        self._workers = [clusters.prefect_worker({**self.environment, **self.variables}) for _ in range(self.count)]
        self.disturbances = {"worker": self._kill_worker, "flow": kill_run, "worker and flow": self._kill_both}
        self.disturbances["cancel"] = self._cancel

    def heal(self) -> None:
        """Start server and workers again."""
        super().heal()
        for each in self._workers:
            each.start()

    def start(self, command: list[str], environment: Mapping[str, str]) -> Run:
        """Deploy the run unless it is, and have the deployments started."""
        _, config, _, root, *_ = command
        flow_runs = []
        for number in range(self.count):
            name = f"{Path(root).name}-{number}"
            arguments = ["deploy", "--only", "pipeline", "--name", name, "--config", config, "--root", root, "--yes"]
            process = start(arguments, {**environment, **self.variables})
            said = process.communicate(timeout=300)[0].decode()
            if process.returncode:
                raise SystemExit(said)
            with self.client() as client:
                deployment = client.read_deployment_by_name(f"pipeline/{name}")
                flow_runs.append(client.create_flow_run_from_deployment(deployment.id).id)
        for each in self._workers:
            if each.process is None:
                self.keep(each)
        return Flow(self, flow_runs)

    def _kill_worker(self, run: Run) -> None:
        """Kill one worker alone, and start it again: its flow run goes on if its process had begun."""
        run.is_lost = not self.running()
        worker = self.rng.choice(self._workers)
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait()
        worker.start()

    def _kill_both(self, run: Run) -> None:
        for each in self._workers:
            each.kill()
        run.kill()
        run.is_lost = True


class TwoWorkers(Worker):
    """Two workers with two deployments of one run in one store."""

    count = 2
