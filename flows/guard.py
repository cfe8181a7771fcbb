"""Prefect's server behind the guard against pages of other origins."""

from __future__ import annotations

from flowmill.tasks.execution.guard import OwnPagesOnly


def prefect_app() -> OwnPagesOnly:
    """Return Prefect's server behind the guard; an application factory for uvicorn."""
    from prefect.server.api.server import create_app

    return OwnPagesOnly(create_app())
