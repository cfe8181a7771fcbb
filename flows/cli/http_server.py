"""Serves an application over HTTP until stopped: the part that commands with a server of their own share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.exits import StopSignal
from flowmill.configs.gc_tuning import collect_as_usual
from flowmill.flows.cli.error_reporting import say

#: Seconds to finish pending requests after the server is to stop.
_GRACE_S = 10


def serve(app: Any, *, host: str, port: int, labels: Mapping[str, str], quiet: bool = False) -> None:
    """Serve until stopped; once the server answers, print a line for each label: it and the address, with its path."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                for label, path in labels.items():
                    say(f"{label} answers at http://{shown}:{port}{path}", quiet=quiet)

    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    server = Server(config)
    collect_as_usual()
    try:
        server.run()
    except SystemExit as end:
        if server.started or isinstance(end, StopSignal):
            raise
        raise ConfigError(
            f"nothing can listen on {host}:{port}, which may be taken. Choose another with --port."
        ) from None
