"""Finds the environment variable that sends a request through a proxy; HTTP errors name neither of them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from urllib.parse import SplitResult, urlsplit

_SCHEMES = ("http", "https", "all")
_SOCKS = ("socks5", "socks5h")


def by_proxy(url: str) -> str:
    """Return a sentence about the proxy that clients use for an address, to append to an error; '' without a proxy.

    Args:
        url: the address, or its server's address.
    """
    # Every command imports this module, and few of them need HTTP.
    from urllib.request import proxy_bypass

    parts = urlsplit(url)
    # Clients fall back to ALL_PROXY.
    found = next((name for scheme in (parts.scheme, "all") if (name := _variable(scheme))), None)
    if found is None or not parts.hostname or proxy_bypass(parts.hostname):
        return ""
    proxy = os.environ[found]
    shown = proxy.rpartition("@")[2]
    sends = f" {found} of the environment sends this through the proxy {shown.partition('://')[2] or shown}"
    remedy = f"or add {parts.hostname} to NO_PROXY."
    if usable(proxy):
        return f"{sends}: check that it is right and that it answers, {remedy}"
    scheme = proxy.partition("://")[0]
    if scheme in _SOCKS:
        return (
            f"{sends}, which speaks {scheme}. That needs two packages (pip install socksio PySocks), and stores on S3 "
            f"cannot use it: install them, name an HTTP proxy, {remedy}"
        )
    return f"{sends}, whose address cannot be used: write it as http://HOST:PORT or socks5://HOST:PORT, {remedy}"


def usable(proxy: str) -> bool:
    """Return whether httpx can use a proxy."""
    try:
        parts = _parts(proxy)
        place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return place and (
        parts.scheme in ("http", "https") or (parts.scheme in _SOCKS and find_spec("socksio") is not None)
    )


def accept_proxies() -> None:
    """Allow clients to be created with any proxy in the environment; an unusable one fails on use."""
    named = (_variable(scheme) for scheme in _SCHEMES)
    if all(usable(os.environ[name]) for name in named if name):
        return
    from configs.unusable_proxies import tolerate

    tolerate(usable)


def _variable(scheme: str) -> str | None:
    """Return the variable that names the proxy of a scheme; None without one."""
    lower = f"{scheme}_proxy"
    # Clients read the lowercase name first.
    return next((name for name in (lower, lower.upper()) if os.environ.get(name)), None)


def _parts(proxy: str) -> SplitResult:
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")
