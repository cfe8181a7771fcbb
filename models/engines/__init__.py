"""Engines, which draw the tokens or chains of rollouts, one file each.

A new engine is one file here with a class that implements ``base.Engine`` (tokens) or ``chains.ChainEngine`` (chains of
denoisers), and one line in the table. Options of the engines in the tables set their address, calls and checks and
never change the policy's log-probs, so a server can move within a rollout. Options of a custom engine are part of the
rollout's identity.
"""

from __future__ import annotations

from typing import Any

from flowmill.configs.base import Component
from flowmill.configs.registry import Table, chosen

ENGINES = Table(
    {"local": "flowmill.models.engines.local:LocalEngine", "openai": "flowmill.models.engines.openai:OpenAI"},
    like="flowmill.models.engines.base:Engine",
)
CHAIN_ENGINES = Table(
    {
        "local": "flowmill.models.engines.in_process:InProcess",
        "sglang": "flowmill.models.engines.sglang:SGLang",
    },
    like="flowmill.models.engines.chains:ChainEngine",
    removed={
        "flowmill": "Remove rollout.engine: ranks (execution.processes), Dask, Ray or a Prefect work pool share shards."
    },
)
#: The default engine.
LOCAL = "local"
#: Engines of earlier versions that drew the samples of the local one are no part of a rollout's identity either.
_SAME = (LOCAL, *CHAIN_ENGINES.removed)


def make_engine(section: Component) -> Any:
    """Return the engine that a config names; no request is sent yet. Raises ConfigError if there is none of this name,
    or an option is invalid."""
    return chosen(ENGINES, section, label="rollout.tokens.engine")


def make_chain_engine(section: Component) -> Any:
    """Return the engine of chains that a config names, None if the policy in this process draws them; no request is
    sent yet. Raises ConfigError if there is none of this name, or an option is invalid."""
    engine = chosen(CHAIN_ENGINES, section, label="rollout.engine")
    return None if section.name == LOCAL else engine


def engine_identity(section: Component) -> dict[str, Any]:
    """Return the options of an engine that are part of a rollout's identity; the local engine has none."""
    if section.name in _SAME:
        return {}
    options = {} if section.name in (*ENGINES, *CHAIN_ENGINES) else {"options": section.options}
    return {"engine": {"name": section.name, **options}}
