"""Engines, which draw the tokens of rollouts, one file each.

A new engine is one file here with a class that fulfills ``base.Engine``, and one line in the table. No option of an
engine in the table changes the policy's log-probs of a text: they say where it is and how it is called and checked,
so that moving a server is no other rollout. Options of a user's own engine are part of the identity.
"""

from __future__ import annotations

from typing import Any

from configs.base import Component
from configs.registry import Table, chosen

ENGINES = Table(
    {
        "local": "models.engines.local:Local",
        "openai": "models.engines.openai:OpenAI",
    },
    like="models.engines.base:Engine",
)
#: The default engine.
LOCAL = "local"


def make_engine(section: Component) -> Any:
    """Return the engine that a config names; nothing is asked of it yet.

    Raises:
        ConfigError: there is none of this name, or an option cannot work.
    """
    return chosen(ENGINES, section, label="rollout.tokens.engine")


def engine_identity(section: Component) -> dict[str, Any]:
    """Return the options of an engine that are part of a rollout's identity: none of the local one's."""
    if section.name == LOCAL:
        return {}
    options = {} if section.name in ENGINES else {"options": section.options}
    return {"engine": {"name": section.name, **options}}
