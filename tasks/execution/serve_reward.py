"""An HTTP server for a reward, with its access rules. Needs neither torch nor Prefect unless the reward does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from configs.addresses import is_loopback
from configs.errors import ConfigError
from configs.escaping import quoted
from configs.extras import require_extra
from configs.overrides import apply_overrides
from models.rewards.factory import make_reward
from tasks.execution.guard import App, OwnPagesOnly

_MODULES = ("fastapi", "uvicorn", "msgpack", "prometheus_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """The reward to serve, and its server settings."""

    name: str
    """Name of the reward."""
    options: Sequence[str] = ()
    """Options of the reward, ``key=value``."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8600
    """Port; 0: any free port."""
    device: str | None = None
    """Torch device of the reward."""
    batch_size: int | None = None
    """Samples per call of the reward."""
    waiting: int = 4096
    """Most samples in the queue."""
    max_mb: int = 256
    """Largest request, in MB."""


def reward_app(request: ServeRequest) -> App:
    """Make a reward and return the app that serves it.

    Raises:
        ConfigError: the reward cannot be made, or other machines could use it without a token.
    """
    require_extra("reward-server", *_MODULES, label="'flowmill serve-reward'")
    from models.rewards.service.app import Served, make_app
    from models.rewards.service.batching import Limits
    from models.rewards.service.wire import TOKEN

    token = os.environ.get(TOKEN) or None
    if token is None and not is_loopback(request.host):
        raise ConfigError(
            f"--host {quoted(request.host)} gives other machines access, but {TOKEN} is not set. Set it here and where "
            "runs are started, or listen on 127.0.0.1 and forward the port."
        )
    options = apply_overrides({}, request.options)
    served = Served(
        reward=make_reward(request.name, options, device=request.device),
        name=request.name,
        options=options,
        token=token,
        max_bytes=request.max_mb * 1_000_000,
        limits=Limits(batch_size=request.batch_size, waiting=request.waiting),
    )
    app = make_app(served)
    # Without a token callers are on this machine, and may be web pages in a browser.
    return app if token else OwnPagesOnly(app)
