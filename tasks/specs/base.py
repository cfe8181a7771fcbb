"""Which model a run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.model import ModelSection
from tasks.inputs.renderer import render_of
from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node

#: Raised when builders write other files for equal options. 3: CLIP's tokenizer is the same every time.
_BUILDERS = 3


class BaseSpec(StageSpec):
    """A model that is built here, or the content of a folder or hub snapshot; the slot says whether it is the one that
    draws texts instead of the one that is trained."""

    name = "base"
    kind = "bases"

    def options(self) -> Mapping[str, Any]:
        """The builder and its options, or the content of the model."""
        section = self.section
        if section.path is not None:
            held = {"single_file": self.facts.single_file_identity(section, self.slot)} if section.single_files else {}
            return {"identity": self.facts.renderer_identity if self.slot else self.facts.model_identity, **held}
        build = None if section.build is None else section.build.model_dump(mode="json")
        return {"build": build, "builders": _BUILDERS}

    @property
    def section(self) -> ModelSection:
        """What the config says of it."""
        return render_of(self.config).model if self.slot else self.config.model

    def upstream(self) -> tuple[Node, ...]:
        """None."""
        return ()
