"""Samples of data, as kinds of policies read and store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowmill.tasks.inputs.data_file import DataFile
from flowmill.tasks.inputs.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSample:
    """One sample of a row of data."""

    file: DataFile
    """Its content."""
    prompt: Prompt
    name: str
    """Its sample id."""
    group: str
    """Samples of one group are compared: the two of a pair, or rated ones of one prompt."""
    first: DataFile
    """The first sample of its row, whose shape decides the size of all."""
    replica: int
    """Its position within the row: 0 for a single or chosen sample, 1 for a rejected one."""

    window: tuple[float, float] = (0.5, 0.5)
    """Where the window of a crop is, across and down: 0 is the left or upper end, 1 the other."""
    mirrored: bool = False
    """Whether left and right are exchanged."""

    def columns(self) -> dict[str, Any]:
        """Return the fields of its ``Sample`` that do not depend on the kind of policy."""
        return {
            "sample_id": self.name,
            "prompt_id": self.prompt.id,
            "group_id": self.group,
            "prompt": self.prompt.text,
            "metadata": self.prompt.metadata,
            "epoch": 0,
            "replica": self.replica,
            "seed": 0,
            # No policy of the run drew it.
            "policy": "given",
        }
