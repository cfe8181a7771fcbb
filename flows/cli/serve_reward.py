"""``flowmill serve-reward``: one reward over HTTP, for runs in other processes."""

from __future__ import annotations

from flowmill.flows.cli.error_reporting import say
from flowmill.flows.cli.http_server import serve
from flowmill.flows.cli.options import Quiet
from flowmill.tasks.execution.serve_reward import ServeRequest, reward_app


def serve_reward_command(request: ServeRequest, *, quiet: Quiet = False) -> None:
    """Serve a reward until stopped; print the address once it answers."""
    say(f"loading reward '{request.name}'", quiet=quiet)
    app = reward_app(request)
    serve(app, host=request.host, port=request.port, labels={f"reward '{request.name}'": ""}, quiet=quiet)
