"""Addresses that nobody answers at: messages name the variable that led there, a proxy's included."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from configs.errors import ConfigError, FlowmillError, StoreError
from configs.proxies import by_proxy
from configs.rewards import ServerSection
from configs.schema import StoreSection
from flows.api import named_server
from flows.cli.error_reporting import refuse_empty
from flows.environment import as_overrides, default_root, existing_root, prepare_environment
from flows.server import local_api
from models.rewards.remote import RemoteReward
from storage.backends import open_backend
from tests.conftest import ROOT

#: A port without a listener, as a proxy and as a server.
NO_LISTENER = "http://127.0.0.1:9"
SAID = (
    " of the environment sends this through the proxy 127.0.0.1:9: check that it is right and that it answers, or add "
)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def a_reward_server() -> None:
    about = ServerSection(url="http://rewards.example:8600", timeout_s=1, patience_s=0)
    RemoteReward(about, "constant", {}).introduce()


def prefects_server() -> None:
    with temporary_settings({PREFECT_API_URL: "http://prefect.example:4200/api"}), named_server() as client:
        client.read_work_pools(limit=1)


def mlflows_server() -> None:
    from tasks.tracking.client import open_client, reaching

    with reaching("http://mlflow.example:5000", "The report"):
        open_client("", "http://mlflow.example:5000").search_experiments()


def the_hub() -> None:
    from tasks.inputs.hub import _failed

    raise _failed("owner/model", ConnectionError("refused"))


def a_judge() -> None:
    import numpy as np

    from models.rewards.vlm import VlmJudge

    judge = VlmJudge(model="m", endpoint="http://judge.example/v1", timeout_s=1)
    judge.answer(np.zeros((8, 8, 3), np.uint8), "what?")


@pytest.mark.parametrize(
    ("asks", "variable", "host"),
    [
        (a_reward_server, "http_proxy", "rewards.example"),
        (a_reward_server, "HTTP_PROXY", "rewards.example"),
        (a_reward_server, "ALL_PROXY", "rewards.example"),
        (prefects_server, "HTTP_PROXY", "prefect.example"),
        (mlflows_server, "http_proxy", "mlflow.example"),
        (the_hub, "HTTPS_PROXY", "huggingface.co"),
        (a_judge, "HTTP_PROXY", "judge.example"),
    ],
)
def test_a_proxy_that_fails_is_named_by_its_variable(
    asks: Callable[[], None], variable: str, host: str, no_proxy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its password is nobody's to read.
    monkeypatch.setenv(variable, "http://somebody:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("models.rewards.vlm._RETRIES", 0)
    with pytest.raises((FlowmillError, ConnectionError)) as failed:
        asks()
    assert f"{variable}{SAID}{host} to NO_PROXY." in str(failed.value)
    assert "secret" not in str(failed.value)


@pytest.mark.slow
def test_a_proxy_before_s3_is_named(no_proxy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://s3.example",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "HTTP_PROXY": NO_LISTENER,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("storage.backends.connection._OPENED_S", 0.5)
    with pytest.raises(StoreError) as failed:
        open_backend(StoreSection(root="s3://bucket/x", cache=str(tmp_path)))
    assert f"HTTP_PROXY{SAID}s3.example to NO_PROXY." in str(failed.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8600", "http://localhost/x", "http://[::1]:1/", "sqlite:///a.db"])
def test_what_is_on_this_machine_goes_through_no_proxy(
    url: str, no_proxy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name.upper(), NO_LISTENER)
    monkeypatch.setenv("no_proxy", "")
    prepare_environment()
    assert by_proxy(url) == ""
    assert "HTTP_PROXY" in by_proxy("http://elsewhere.example")
    monkeypatch.setenv("no_proxy", f"{os.environ['no_proxy']},.example")
    assert by_proxy("http://elsewhere.example") == ""


def test_a_prefect_server_that_does_not_answer_is_named_before_a_run_begins() -> None:
    where = r"Prefect's server at PREFECT_API_URL=http://127\.0\.0\.1:9/api does not answer"
    with (
        temporary_settings({PREFECT_API_URL: f"{NO_LISTENER}/api"}),
        pytest.raises(ConfigError, match=where),
        local_api(),
    ):
        pass


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
        "import sys\nfrom configs.errors import ConfigError\nfrom flows import server\n"
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


def test_a_prefect_server_of_another_version_is_named(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    def api_version(client: Any) -> str:
        return "2.20.0"

    monkeypatch.setattr(SyncPrefectClient, "api_version", api_version)
    with (
        temporary_settings({PREFECT_API_URL: prefect_server}),
        pytest.raises(ConfigError, match=r"PREFECT_API_URL=.* cannot be used\. Found incompatible versions"),
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
