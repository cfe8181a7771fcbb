"""Which prompts a run has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node


class PreprocessSpec(StageSpec):
    """The prompt table of a run."""

    name = "preprocess"
    kind = "prompts"

    def options(self) -> Mapping[str, Any]:
        """The prompts themselves."""
        return {"prompts": self.facts.prompts_identity}

    def upstream(self) -> tuple[Node, ...]:
        """The embedding cache."""
        return (Node(0, "encode"),)
