"""Base classes of all sections of a config."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from configs.addresses import check_passwords


class Section(BaseModel):
    """Base of all sections: frozen, refuses unknown keys, documents fields with docstrings.

    Only the documentation page reads the docstrings; pydantic would parse the source again in every process.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _no_password(cls, value: Any, info: ValidationInfo) -> Any:
        check_passwords(info.field_name or "", value)
        return value


class Component(Section):
    """A table entry (or your own ``"package.module:Class"``) and its options; the name alone is enough."""

    name: str
    """A name from the component's table, or an import string "package.module:Class"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the component, defined by its class."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("options")
    @classmethod
    def _finite(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if not _is_finite(value):
                raise ValueError(f"option '{name}' holds a number that is not finite")
        return options


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
