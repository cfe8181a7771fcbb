"""What all sections of a config have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings are the documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Component(Section):
    """A table entry (or ``"package.module:Class"`` of your own) and its options."""

    name: str
    """A name from the component's table, or an import string "package.module:Class"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the component; its own class says which exist."""
