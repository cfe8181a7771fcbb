"""What prompts are encoded with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.specs.base_spec import StageSpec
from tasks.specs.graph import Node
from tasks.specs.modalities import modality_spec


class EncodeSpec(StageSpec):
    """The cache of an encoder: prompts are encoded once ever."""

    name = "encode"
    #: 3: rows are read where they lie, bfloat16 as it is.
    version = 3
    kind = "embeddings"
    grows = True

    def options(self) -> Mapping[str, Any]:
        """What identifies the encoder."""
        return modality_spec(self.config).encoding_options(self.config)

    def upstream(self) -> tuple[Node, ...]:
        """The base model."""
        return (Node(0, "base"),)
