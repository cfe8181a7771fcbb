"""Which variable of the environment sends a request through a proxy: a failure there names neither."""

from __future__ import annotations

import os
from urllib.parse import urlsplit
from urllib.request import proxy_bypass


def by_proxy(url: str) -> str:
    """Return a sentence on the proxy that clients use for an address, to append to an error; '' without one.

    Args:
        url: the address, or that of its server.
    """
    parts = urlsplit(url)
    # Clients read the lower one first, and the one for all if there is none for the scheme.
    names = [f"{scheme}_proxy" for scheme in (parts.scheme, "all")]
    found = next((name for lower in names for name in (lower, lower.upper()) if os.environ.get(name)), None)
    if found is None or not parts.hostname or proxy_bypass(parts.hostname):
        return ""
    proxy = os.environ[found].rpartition("@")[2]
    return (
        f" {found} of the environment sends this through the proxy {proxy.partition('://')[2] or proxy}: check that it "
        f"is right and that it answers, or add {parts.hostname} to NO_PROXY."
    )
