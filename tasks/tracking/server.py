"""MLflow's server, started behind the guard against pages of other origins."""

from __future__ import annotations

import sys
from typing import Any

from tasks.execution.guard import OwnPagesOnly


def mlflow_app() -> OwnPagesOnly:
    """Return MLflow's guarded server: a factory for uvicorn."""
    from mlflow.server.fastapi_app import app

    return OwnPagesOnly(app)


def main(arguments: list[str]) -> None:
    """Run 'mlflow server' with the given arguments and the guarded application.

    Raises:
        RuntimeError: this version of MLflow starts its server in another way, which would be unguarded.
    """
    from mlflow import cli, server

    plain = getattr(server, "_build_uvicorn_command", None)
    if plain is None:
        raise RuntimeError("This version of MLflow starts its server in an unknown way.")

    def guarded(*given: Any, **named: Any) -> list[str]:
        command: list[str] = plain(*given, **named)
        if command[-1] != "mlflow.server.fastapi_app:app":
            raise RuntimeError(f"This version of MLflow serves '{command[-1]}', which is not guarded.")
        return [*command[:-1], "--factory", "tasks.tracking.server:mlflow_app"]

    server._build_uvicorn_command = guarded
    cli.cli(["server", *arguments], prog_name="mlflow")


if __name__ == "__main__":
    main(sys.argv[1:])
