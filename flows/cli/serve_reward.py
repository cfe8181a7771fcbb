"""``flowmill serve-reward``: one reward over HTTP, for runs in other processes."""

from __future__ import annotations

from typing import Any

from configs.errors import ConfigError
from configs.gc_tuning import collect_as_usual
from flows.cli.error_reporting import say
from flows.cli.options import Quiet
from tasks.execution.serve_reward import ServeRequest, reward_app

#: Seconds to finish pending requests after the server is asked to stop.
_GRACE_S = 10


def serve_reward_command(request: ServeRequest, *, quiet: Quiet = False) -> None:
    """Serve a reward until stopped; print the address once it answers.

    Raises:
        ConfigError: the reward cannot be built, it would be public without a token, or the address is taken.
    """
    say(f"loading reward '{request.name}'", quiet=quiet)
    app = reward_app(request)
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                say(f"reward '{request.name}' answers at http://{shown}:{port}", quiet=quiet)

    config = uvicorn.Config(
        app,
        host=request.host,
        port=request.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = Server(config)
    collect_as_usual()
    try:
        server.run()
    except SystemExit:
        if server.started:
            raise
        raise ConfigError(
            f"nothing can listen on {request.host}:{request.port}, which may be taken. Choose another with --port."
        ) from None
