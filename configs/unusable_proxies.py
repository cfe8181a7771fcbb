"""Allows HTTP clients to be created although the environment names a proxy that they cannot use.

httpx raises when a client is created, even for requests to this machine. With this patch only a request through the
proxy fails.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

#: The HTTP library of Prefect and flowmill, and its successor, which the Hub's client uses.
_LIBRARIES = ("httpx", "httpx2")
#: Placeholder host of an unusable proxy; the domain is reserved and never resolves (RFC 2606).
_NOWHERE = "proxy.invalid"


def tolerate(usable: Callable[[str], bool]) -> None:
    """Make clients accept any proxy in the environment.

    Args:
        usable: returns whether clients can use the proxy at an address.
    """
    for name in _LIBRARIES:
        if find_spec(name) is not None:
            _tolerate(import_module(name), usable)


def _tolerate(library: Any, usable: Callable[[str], bool]) -> None:
    proxies = library._client.get_environment_proxies
    if getattr(proxies, "tolerant", False):
        return

    def tolerant() -> dict[str, str | None]:
        return {key: url if url is None or usable(url) else f"http://{_NOWHERE}" for key, url in proxies().items()}

    tolerant.tolerant = True  # type: ignore[attr-defined]
    library._client.get_environment_proxies = tolerant
    transport = _unusable(library)
    for kind in (library.Client, library.AsyncClient):
        kind._init_proxy_transport = _with(transport, kind._init_proxy_transport)


def _with(unusable: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    def made(client: Any, proxy: Any, *given: Any, **more: Any) -> Any:
        return unusable if proxy.url.host == _NOWHERE else make(client, proxy, *given, **more)

    return made


def _unusable(library: Any) -> Any:
    """Return a transport that fails for every request."""

    class Unusable(library.BaseTransport, library.AsyncBaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            raise library.ProxyError("the proxy of the environment cannot be used", request=request)

        async def handle_async_request(self, request: Any) -> Any:
            return self.handle_request(request)

    return Unusable()
