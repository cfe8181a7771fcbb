"""Which prompts a run has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.identities.identity import Identity
from tasks.identities.nodes import Node


class PreprocessIdentity(Identity):
    """The prompt table of a run."""

    name = "preprocess"
    kind = "prompts"

    def options(self) -> Mapping[str, Any]:
        """The prompts themselves."""
        return {"prompts": self.facts.prompts_identity}

    def upstream(self) -> tuple[Node, ...]:
        """The embedding cache."""
        return (Node(0, "encode"),)
