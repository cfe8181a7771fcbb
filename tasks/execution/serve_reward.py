"""An HTTP server for a reward, with its access rules. Needs neither torch nor Prefect unless the reward does."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from flowmill.configs.command_options import CommandLine
from flowmill.configs.extras import require_extra
from flowmill.configs.overrides import apply_overrides
from flowmill.models.rewards.factory import make_reward
from flowmill.tasks.execution.guard import App, OwnPagesOnly, access_token

_MODULES = ("fastapi", "uvicorn", "msgpack", "prometheus_client")


class ServeRequest(BaseModel):
    """The reward to serve, and its server settings: the options of ``flowmill serve-reward``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, CommandLine("NAME", "NAME")]
    """Reward: a name, or your own package.module:name."""
    options: Annotated[list[str], CommandLine("--set", "KEY=VALUE")] = Field(default_factory=list)
    """Option of the reward: key=value."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8600, ge=0, le=65535)
    """Port; 0 takes a free one."""
    device: str | None = None
    """Torch device of the reward."""
    batch_size: Annotated[int | None, CommandLine(metavar="N")] = Field(default=None, ge=1)
    """Samples per call of the reward."""
    waiting: int = Field(default=4096, ge=1)
    """Samples that may wait; further requests are asked to retry later."""
    max_mb: int = Field(default=256, ge=1)
    """Largest request, in MB."""


def reward_app(request: ServeRequest) -> App:
    """Make a reward and return the app that serves it."""
    require_extra("reward-server", *_MODULES, label="'flowmill serve-reward'")
    from flowmill.models.rewards.service.app import Served, make_app
    from flowmill.models.rewards.service.batching import Limits
    from flowmill.models.rewards.service.wire import TOKEN

    token = access_token(request.host, TOKEN, where="where runs are started")
    options = apply_overrides({}, request.options)
    served = Served(
        reward=make_reward(request.name, options, device=request.device),
        name=request.name,
        options=options,
        token=token,
        max_bytes=request.max_mb * 1_000_000,
        batch_size=request.batch_size,
        limits=Limits(waiting=request.waiting),
    )
    app = make_app(served)
    # Without a token callers are on this machine, and may be web pages in a browser.
    return app if token else OwnPagesOnly(app)
