"""An HTTP server that draws rollouts for runs in other processes, with its access rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from configs.command_options import CommandLine
from configs.extras import require_extra
from configs.load import load_config
from tasks.execution.guard import App, OwnPagesOnly, access_token

if TYPE_CHECKING:
    from models.engines.rollout_service import DrawsChains

_MODULES = ("fastapi", "uvicorn", "msgpack", "prometheus_client")


class ServeRolloutRequest(BaseModel):
    """The config to serve, and its server settings: the options of ``flowmill serve-rollout``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    config: Annotated[str, CommandLine("CONFIG", "CONFIG")]
    """The config of the run, as the run has it: its model is loaded, and its policy comes over HTTP."""
    overrides: Annotated[list[str], CommandLine("--set", "KEY=VALUE")] = Field(default_factory=list)
    """Settings laid over the config, 'section.key=value' each, such as 'execution.device=cuda:1'."""
    root: Annotated[str | None, CommandLine(metavar="URI")] = None
    """Store for a base model that the config builds or converts; the config's when absent."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8700, ge=0, le=65535)
    """Port; 0 takes a free one."""
    max_mb: int = Field(default=256, ge=1)
    """Largest request, in MB."""


def rollout_app(request: ServeRolloutRequest) -> App:
    """Load the models of a config and return the app that draws with them.

    Raises:
        ConfigError: the config has no policy that an engine can draw, or other machines could use it without a token.
    """
    require_extra("reward-server", *_MODULES, label="'flowmill serve-rollout'")
    from models.engines.chain_wire import TOKEN
    from models.engines.rollout_service import make_app

    token = access_token(request.host, TOKEN, where="where runs are started")
    app = make_app(served_policy(request), token=token, max_bytes=request.max_mb * 1_000_000)
    # Without a token callers are on this machine, and may be web pages in a browser.
    return app if token else OwnPagesOnly(app)


def served_policy(request: ServeRolloutRequest) -> DrawsChains:
    """Load the models of a config, after building or converting its base model where needed; see ``rollout_app``."""
    from storage.artifacts.commit import ArtifactStore
    from storage.artifacts.lineage import RunFolder
    from tasks.execution.execution import Execution
    from tasks.modalities.modality import make_kind
    from tasks.runs.context import RunContext
    from tasks.runs.locks import run_name
    from tasks.runs.opening import begin_run
    from tasks.stages.stage_run import StageRun

    root = [] if request.root is None else [f"store.root={request.root}"]
    config = load_config(request.config, [*request.overrides, *root])
    store = ArtifactStore(config.store)
    execution = Execution(RunContext(store, config, RunFolder(store, run_name(config))))
    base = execution.stage("base", 0)
    if base.on_ranks and execution.context.chain.find(0, "base") is None:
        execution = Execution(begin_run(config))
        StageRun(execution.stage("base", 0)).execute()
    return make_kind(config).served(execution.host)
