"""A Dask preload: schedulers and workers close their HTTP server, which answers any host name and any web page.

See https://docs.dask.org/en/stable/how-to/customize-initialization.html. Dask's work uses other sockets.
"""

from __future__ import annotations

from typing import Any


def dask_setup(node: Any) -> None:
    """Close the HTTP server of a starting scheduler or worker."""
    server = getattr(node, "http_server", None)
    if server is not None:
        server.stop()


def close_http_servers() -> None:
    """Add this module to the preloads of clusters that this process starts."""
    import dask.config
    import distributed  # noqa: F401 - sets the defaults that are read here

    for kind in ("scheduler", "worker"):
        name = f"distributed.{kind}.preload"
        known = [each for each in dask.config.get(name) if each != __name__]
        dask.config.set({name: [*known, __name__]})
