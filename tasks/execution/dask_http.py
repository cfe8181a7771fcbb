"""A preload of Dask: its schedulers and workers close their HTTP server, which answers any host name and any page.

See https://docs.dask.org/en/stable/how-to/customize-initialization.html. Work travels over other sockets.
"""

from __future__ import annotations

from typing import Any


def dask_setup(node: Any) -> None:
    """Close the HTTP server of a scheduler or worker that starts."""
    server = getattr(node, "http_server", None)
    if server is not None:
        server.stop()


def close_http_servers() -> None:
    """Have the nodes of clusters that this process starts load this module."""
    import dask.config
    import distributed  # noqa: F401 - sets the defaults of what is read here

    for kind in ("scheduler", "worker"):
        name = f"distributed.{kind}.preload"
        known = [each for each in dask.config.get(name) if each != __name__]
        dask.config.set({name: [*known, __name__]})
