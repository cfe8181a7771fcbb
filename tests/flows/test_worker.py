"""The log of a worker, which would repeat for each waiting flow run every half minute that it waits."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
from pathlib import Path

import pytest
from prefect.workers.base import BaseWorker

from flowmill.flows import deployments
from flowmill.flows.cli.worker import worker_command
from flowmill.flows.worker import ATTEMPTS, LOGGER, SaidOnce


def test_a_waiting_flow_run_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger, once = logging.getLogger(LOGGER), SaidOnce()
    logger.addFilter(once)
    try:
        with caplog.at_level(logging.INFO, logger=LOGGER):
            for _ in range(3):
                for run in ("a", "b"):
                    logger.info("Worker 'w' submitting flow run '%s'", run)
                    logger.info("Aborted submission of flow run '%s': Server returned a non-pending state", run)
                logger.info("Failed to update state of flow run 'a'")
    finally:
        logger.removeFilter(once)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4 + 3
    assert said.count("Failed to update state of flow run 'a'") == 3


def test_files_of_the_working_directory_shadow_no_library_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(deployments, "every_deployment", list)
    monkeypatch.setattr(deployments, "pool_type", lambda pool, kind: "process")
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    worker_command()
    (tmp_path / "logging.py").write_text("raise SystemExit('imported the wrong one')")
    (command,) = commands
    asked = [*command[: command.index("worker")], "--help"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "worker" in done.stdout


def test_prefect_has_these_messages() -> None:
    code = inspect.getsource(BaseWorker)
    assert all(each in code for each in ATTEMPTS)
    assert '"worker",' in inspect.getsource(BaseWorker.get_flow_run_logger)
