"""``flowmill serve-rollout``: rollouts over HTTP, for runs in other processes."""

from __future__ import annotations

from flows.cli.error_reporting import say
from flows.cli.http_server import serve
from flows.cli.options import Quiet
from tasks.execution.serve_rollout import ServeRolloutRequest, rollout_app


def serve_rollout_command(request: ServeRolloutRequest, *, quiet: Quiet = False) -> None:
    """Draw rollouts until stopped; print the address once the server answers.

    Raises:
        ConfigError: the config cannot be served, it would be public without a token, or the address is taken.
    """
    say(f"loading the model of '{request.config}'", quiet=quiet)
    app = rollout_app(request)
    serve(app, host=request.host, port=request.port, label=f"rollouts of '{request.config}'", quiet=quiet)
