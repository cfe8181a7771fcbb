"""Variables of the environment that a command reads and sets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.proxies import by_proxy
from flows.environment import prepare_environment
from tests.conftest import ROOT

LIBRARIES: list[Any] = [import_module(name) for name in ("httpx", "httpx2") if find_spec(name)]
UNUSABLE = (
    "socks5://127.0.0.1:9",
    "socks5h://me:secret@127.0.0.1:9",
    "socks://127.0.0.1:9",
    "ftp://h",
    "http://[h",
    "http://h:x",
)
KINDS = ("http://127.0.0.1:9", "127.0.0.1:9", *UNUSABLE)
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def settings_of(kinds: Sequence[str]) -> pytest.MarkDecorator:
    """Try each kind of proxy and each variable with every change, and the other pairs of them in campaigns."""
    quick = [*zip(kinds, cycle(PROXIES), strict=False)]
    others = [pytest.param(*pair, marks=pytest.mark.campaign) for pair in product(kinds, PROXIES) if pair not in quick]
    return pytest.mark.parametrize(("proxy", "variable"), [*quick, *others])


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without proxies, no package for SOCKS, and clients as they were afterwards."""
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "intern.example")
    monkeypatch.setattr("configs.proxies.find_spec", lambda name: None)
    for library in LIBRARIES:
        monkeypatch.setattr(library._client, "get_environment_proxies", library._client.get_environment_proxies)
        for kind in (library.Client, library.AsyncClient):
            monkeypatch.setattr(kind, "_init_proxy_transport", kind._init_proxy_transport)


@settings_of(KINDS)
def test_no_proxy_captures_what_is_on_this_machine(
    variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch, unpatched: None
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
def test_a_proxy_that_cannot_be_used_is_named_where_it_is_asked(
    variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch, unpatched: None
) -> None:
    monkeypatch.setenv(variable, proxy)
    prepare_environment()
    url = "https://node.example/a" if "https" in variable.lower() else "http://node.example/a"
    for library in LIBRARIES:
        with library.Client() as client, pytest.raises(library.ProxyError, match="cannot be used"):
            client.get(url)
        with pytest.raises(library.ProxyError, match="cannot be used"):
            asyncio.run(library.AsyncClient().get(url))
    said = by_proxy(url)
    assert said.startswith(f" {variable} of the environment sends this through the proxy ")
    assert "secret" not in said
    assert ("pip install socksio" in said) == proxy.startswith("socks5")


def test_a_proxy_that_can_be_used_stays(monkeypatch: pytest.MonkeyPatch, unpatched: None) -> None:
    """Together with one that cannot."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    prepare_environment()
    with httpx.Client() as client, pytest.raises(httpx.ConnectError):
        client.get("https://node.example")
    assert by_proxy("https://node.example").endswith(
        "check that it is right and that it answers, or add node.example to NO_PROXY."
    )


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["ALL_PROXY", "http_proxy"])
def test_a_command_that_asks_a_server_is_one_message(variable: str, tmp_path: Path) -> None:
    """Where no client can use the proxy; nothing of httpx appears."""
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    address = {"PREFECT_API_URL": "http://node.example/api", variable: "socks5h://127.0.0.1:9"}
    command = [sys.executable, "-m", "flows.cli", "deploy", "--list"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**variables, "PYTHONPATH": str(ROOT), **address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("flowmill: ")]
    assert f"{variable} of the environment sends this through the proxy 127.0.0.1:9, which speaks socks5h" in said
    assert "Traceback" not in done.stderr


def test_without_a_proxy_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    prepare_environment()
    assert "no_proxy" not in os.environ
