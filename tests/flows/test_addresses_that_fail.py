"""Addresses that nobody answers at: messages name the variable that led there, a proxy's included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flowmill.configs.errors import ConfigError, FlowmillError, StoreError
from flowmill.configs.roots import default_root
from flowmill.configs.schema import StoreSection
from flowmill.flows.api import check_server
from flowmill.flows.cli.error_reporting import refuse_empty
from flowmill.flows.environment import as_overrides, existing_root
from flowmill.flows.run_in_process import on_server
from flowmill.flows.server import local_api
from flowmill.storage.backends import open_backend
from tests.conftest import ROOT

#: A port without a listener, as a proxy and as a server.
NO_LISTENER = "http://127.0.0.1:9"


def test_a_prefect_server_that_does_not_answer_is_named_before_a_run_begins() -> None:
    where = r"Prefect's server at PREFECT_API_URL=http://127\.0\.0\.1:9/api does not answer"
    with (
        temporary_settings({PREFECT_API_URL: f"{NO_LISTENER}/api"}),
        pytest.raises(ConfigError, match=where),
        local_api(),
    ):
        pass


def test_a_prefect_server_that_ends_during_a_flow_is_named() -> None:
    ended = {PREFECT_API_URL: f"{NO_LISTENER}/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    said = r"server at PREFECT_API_URL=http://127\.0\.0\.1:9/api does not answer any more .*the same command continues"
    for request in (SyncPrefectClient.read_flows, SyncPrefectClient.raise_for_api_version_mismatch):
        raised = pytest.raises(FlowmillError, match=said)
        with temporary_settings(ended), raised, on_server(None), get_client(sync_client=True) as client:
            request(client)
    # That of a user's code.
    with temporary_settings(ended), pytest.raises(httpx.ConnectError), on_server(None):
        httpx.get("http://127.0.0.1:1/")


def test_a_password_in_the_address_of_a_server_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://me:secr@et@127.0.0.1:9/api"
    request = httpx.Request("GET", f"{address}/flows")
    failed = httpx.HTTPStatusError(f"Error '502' for url '{address}'", request=request, response=httpx.Response(502))

    def mismatch(client: SyncPrefectClient) -> None:
        raise RuntimeError(f"Failed to reach API at {address}")

    with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
        with pytest.raises(ConfigError) as silent:
            check_server()
        with pytest.raises(FlowmillError) as ended, on_server(None):
            raise failed
        monkeypatch.setattr(SyncPrefectClient, "api_healthcheck", lambda client: None)
        monkeypatch.setattr(SyncPrefectClient, "raise_for_api_version_mismatch", mismatch)
        with pytest.raises(ConfigError) as unusable:
            check_server()
    for each in (silent, ended, unusable):
        assert "PREFECT_API_URL=http://127.0.0.1:9/api" in str(each.value)
        assert "secr" not in str(each.value)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (f'PREFECT_API_URL = "{NO_LISTENER}/api"', ["started", "False", "stopped", "refused"]),
        ("", ["started", "False", "used", "stopped"]),
    ],
)
def test_a_server_starts_before_prefect_is_imported_and_only_if_no_profile_names_one(
    tmp_path: Path, profile: str, said: list[str]
) -> None:
    code = (
        "import sys\nfrom flowmill.configs.errors import ConfigError\nfrom flows import server\n"
        "class Api:\n    def __init__(self): print('started', 'prefect' in sys.modules)\n"
        "    def stop(self): print('stopped')\n"
        "server.LocalApi = Api\n"
        "try:\n    with server.local_api(): print('used')\nexcept ConfigError: print('refused')"
    )
    (tmp_path / "profiles.toml").write_text(f'active = "mine"\n[profiles.mine]\n{profile}\n')
    variables = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    variables |= {"PREFECT_PROFILES_PATH": str(tmp_path / "profiles.toml"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.split() == said, done.stderr


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.20.0", "Found incompatible versions"),
        ("3.8.7", r"It is of Prefect 3\.8\.7, older than 3\.8\.8"),
        ("nginx", ""),
    ],
)
def test_a_prefect_server_of_another_version_is_named(
    prefect_server: str, monkeypatch: pytest.MonkeyPatch, version: str, said: str
) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    def api_version(client: Any) -> str:
        return version

    monkeypatch.setattr(SyncPrefectClient, "api_version", api_version)
    with (
        temporary_settings({PREFECT_API_URL: prefect_server}),
        pytest.raises(ConfigError, match=rf"PREFECT_API_URL=.* cannot be used\. {said}.* 'prefect server start'"),
        local_api(),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["status", "--root", ""], "--root is empty"),
        (["status", "--root="], "--root is empty"),
        (["report", "small", "--out", ""], "--out is empty"),
        (["init", "digits", "--to", ""], "--to is empty"),
        (["run", ""], "An argument is empty"),
        (["store", "cp", "small", ""], "An argument is empty"),
        (["run", "digits", "--set", ""], "--set is empty"),
    ],
)
def test_what_is_empty_names_nothing(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}: it names nothing"):
        refuse_empty(given)


def test_an_empty_root_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_empty(["run", "digits", "--set", "prompts.heldout=", "--set", "model.negative_prompt=''"])
    for asked in (default_root, existing_root, lambda root: as_overrides(root, None)):
        with pytest.raises(ConfigError, match="The root of the store is empty"):
            asked("")
    with pytest.raises(StoreError, match=r"store\.root is empty"):
        open_backend(StoreSection(root=""))
    # An empty variable is one that is not set.
    monkeypatch.setenv("FLOWMILL_ROOT", "")
    assert default_root(None) == "flowmill-store"
