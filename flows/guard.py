"""Prefect's server as it is started here: behind the guard against pages of other origins."""

from __future__ import annotations

from tasks.execution.guard import OwnPagesOnly


def prefect_app() -> OwnPagesOnly:
    """Return Prefect's server, guarded: a factory for uvicorn."""
    from prefect.server.api.server import create_app

    return OwnPagesOnly(create_app())
