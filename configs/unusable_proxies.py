"""Lets HTTP clients be made though a proxy of the environment is of a kind that they cannot use.

httpx raises while a client is made, even of one that asks this machine alone. Here a request through the proxy fails.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

#: The client of Prefect and of flowmill, and its successor, which the Hub's client uses.
_LIBRARIES = ("httpx", "httpx2")
#: Stands for a proxy that cannot be used; no name server knows it (RFC 2606).
_NOWHERE = "proxy.invalid"


def tolerate(usable: Callable[[str], bool]) -> None:
    """Have clients take any proxy of the environment.

    Args:
        usable: of the address of a proxy, whether they can use it.
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
