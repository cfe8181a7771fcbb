"""What a command finds in its environment, and sets of it."""

from __future__ import annotations

import os
import urllib.request

import httpx
import pytest

from flows.environment import prepare_environment

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@pytest.mark.parametrize("variable", PROXIES)
def test_no_proxy_captures_what_is_on_this_machine(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever variable names it, and whichever client asks."""
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intern.example")
    prepare_environment()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "intern.example,127.0.0.1,localhost,::1"
    for host in ("127.0.0.1", "localhost"):
        assert urllib.request.proxy_bypass_environment(host)
        with httpx.Client() as client:
            assert client._transport_for_url(httpx.URL(f"http://{host}:4200/api")) is client._transport


def test_without_a_proxy_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    prepare_environment()
    assert "no_proxy" not in os.environ
