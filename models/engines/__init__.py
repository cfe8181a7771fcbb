"""Engines, which draw the tokens of rollouts, one file each.

A new engine is one file here with a class that implements ``base.Engine``, and one line in the table. Options of the
engines in the table set their address, calls and checks and never change the policy's log-probs, so a server can move
within a rollout. Options of a custom engine are part of the rollout's identity.
"""

from __future__ import annotations

from typing import Any

from configs.base import Component
from configs.registry import Table, chosen

ENGINES = Table(
    {"local": "models.engines.local:Local", "openai": "models.engines.openai:OpenAI"}, like="models.engines.base:Engine"
)
#: The default engine.
LOCAL = "local"


def make_engine(section: Component) -> Any:
    """Return the engine that a config names; no request is sent yet. Raises ConfigError if there is none of this name,
    or an option is invalid."""
    return chosen(ENGINES, section, label="rollout.tokens.engine")


def engine_identity(section: Component) -> dict[str, Any]:
    """Return the options of an engine that are part of a rollout's identity; the local engine has none."""
    if section.name == LOCAL:
        return {}
    options = {} if section.name in ENGINES else {"options": section.options}
    return {"engine": {"name": section.name, **options}}
