"""Which model a run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.identities.identity import Identity
from tasks.identities.nodes import Node

#: Raised when builders write other files for equal options. 3: CLIP's tokenizer is the same every time.
_BUILDERS = 3


class BaseIdentity(Identity):
    """A model that is built here, or the content of a folder or hub snapshot."""

    name = "base"
    kind = "bases"

    def options(self) -> Mapping[str, Any]:
        """The builder and its options, or the content of the model."""
        section = self.config.model
        if section.path is not None:
            return {"identity": self.facts.model_identity}
        build = None if section.build is None else section.build.model_dump(mode="json")
        return {"build": build, "builders": _BUILDERS}

    def upstream(self) -> tuple[Node, ...]:
        """None."""
        return ()
