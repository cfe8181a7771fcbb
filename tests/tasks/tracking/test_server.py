"""MLflow's server is started behind the guard, or not at all."""

from __future__ import annotations

import pytest


def test_mlflow_serves_what_the_guard_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam in MLflow is where it was, and another would stop the server instead of leaving it open."""
    from mlflow import cli, server

    from tasks.tracking import server as own

    plain = server._build_uvicorn_command
    monkeypatch.setattr(server, "_build_uvicorn_command", plain)
    monkeypatch.setattr(cli, "cli", lambda *given, **named: None)
    own.main([])
    built = server._build_uvicorn_command(None, "127.0.0.1", 5000, 1, "mlflow.server.fastapi_app:app")
    assert built[-2:] == ["--factory", "tasks.tracking.server:mlflow_app"]
    with pytest.raises(RuntimeError, match="not guarded"):
        server._build_uvicorn_command(None, "127.0.0.1", 5000, 1, "mlflow.server:other")
