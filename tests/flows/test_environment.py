"""Variables of the environment that a command reads and sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, product
from typing import Any

import pytest

from flowmill.configs.errors import ConfigError
from flowmill.flows.environment import prepare_environment
from tests.conftest import ROOT

LIBRARIES: list[Any] = [import_module(name) for name in ("httpx", "httpx2") if find_spec(name)]
UNUSABLE = ("socks5://127.0.0.1:9", "socks5h://me:secret@127.0.0.1:9", "socks://127.0.0.1:9", "ftp://h", "http://h:x")
USABLE = ("http://127.0.0.1:9", "127.0.0.1:9")
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def settings_of(kinds: Sequence[str]) -> pytest.MarkDecorator:
    """Try each kind of proxy and each variable with every change, and the other pairs of them in campaigns."""
    quick = [*zip(kinds, cycle(PROXIES), strict=False)]
    others = [pytest.param(*pair, marks=pytest.mark.campaign) for pair in product(kinds, PROXIES) if pair not in quick]
    return pytest.mark.parametrize(("proxy", "variable"), [*quick, *others])


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without proxies."""
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "intern.example")


@settings_of(USABLE)
def test_no_proxy_captures_what_is_on_this_machine(
    variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    """Whichever variable names it, of whichever kind it is, and whichever client asks."""
    monkeypatch.setenv(variable, proxy)
    prepare_environment()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "intern.example,127.0.0.1,localhost,::1"
    hosts = ("127.0.0.1", "localhost")
    assert all(map(urllib.request.proxy_bypass_environment, hosts))
    for library in LIBRARIES:
        for client in (library.Client(), library.AsyncClient()):
            for host in hosts:
                assert client._transport_for_url(library.URL(f"http://{host}:4200/api")) is client._transport


@settings_of(UNUSABLE)
def test_a_proxy_that_no_client_can_use_is_one_message(
    variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    monkeypatch.setenv(variable, proxy)
    with pytest.raises(ConfigError, match=r"A proxy of the environment cannot be used: .* Correct or unset HTTP_PROXY"):
        prepare_environment()


def test_a_command_says_so_without_traceback(monkeypatch: pytest.MonkeyPatch, no_proxies: None) -> None:
    monkeypatch.setenv("HTTPS_PROXY", UNUSABLE[0])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    line = [sys.executable, "-m", "flowmill.flows.cli", "presets"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("flowmill: A proxy of the environment cannot be used: ")


def test_without_a_proxy_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    prepare_environment()
    assert "no_proxy" not in os.environ


def test_the_import_sets_what_a_command_sets() -> None:
    """Other than its log level and threads, which are the program's own; a variable that the user set stays."""
    code = "import flowmill, json, os, sys; print(json.dumps([dict(os.environ), 'prefect' in sys.modules]))"
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "true"}

    def after(code: str) -> Any:
        done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    found, imported = after(code)
    command, _ = after(
        code.replace("; print", "; from flowmill.flows.environment import *; prepare_environment(); print")
    )
    assert not imported
    assert found["TOKENIZERS_PARALLELISM"] == "true"
    assert float(found["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"]) == 300
    assert set(command) - set(found) == {"PREFECT_LOGGING_LEVEL", "OMP_NUM_THREADS"}
