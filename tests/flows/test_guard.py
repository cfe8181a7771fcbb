"""Servers are started behind the guard, by every command."""

from __future__ import annotations

import os
import re

from flows.server import prefect_command, prefect_environment
from tests.conftest import ROOT


def test_no_server_is_started_unguarded() -> None:
    """Every command of the product that starts one of these servers goes through the guard."""
    assert "flows.guard:prefect_app" in prefect_command(4200)
    assert "*" not in prefect_environment(4200)["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    plain = re.compile(r'"prefect", "server"|"mlflow", "server"|prefect\.server\.api\.server:create_app')
    places = [path for name in ("flows", "tasks", "flowmill") for path in (ROOT / name).rglob("*.py")]
    assert not [path for path in places if plain.search(path.read_text())]
    assert prefect_environment(4200)["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
