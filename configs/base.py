"""Base classes of all sections of a config."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from flowmill.configs.addresses import check_passwords


class Later:
    """Marks a setting that was added after runs existed: at its default it is left out of fingerprints."""


class Section(BaseModel):
    """Base of all sections: frozen, refuses unknown keys, documents fields with docstrings.

    Only the documentation page reads the docstrings; pydantic would parse the source again in every process.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    removed: ClassVar[Mapping[str, str]] = {}
    """Settings that no longer exist, and what to do instead."""
    former: ClassVar[Mapping[str, Any]] = {}
    """Defaults of removed settings: stored configs name them, and fingerprints of older runs hold them."""
    former_later: ClassVar[Mapping[str, Any]] = {}
    """Defaults of removed settings that were marked as ``Later``: fingerprints do not hold them."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, value: Any) -> Any:
        # Stored configs name all settings of their time, most of them without a value.
        if cls.removed and isinstance(value, Mapping):
            former = {**cls.former, **cls.former_later}
            unset = {name for name in cls.removed if not value.get(name) or value[name] == former.get(name)}
            return {name: each for name, each in value.items() if name not in unset}
        return value

    @field_validator("*")
    @classmethod
    def _no_password(cls, value: Any, info: ValidationInfo) -> Any:
        check_passwords(info.field_name or "", value)
        return value

    def fingerprinted(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """Return the settings that results depend on, as plain JSON values.

        Settings marked as ``Later`` are left out at their defaults, so that results from before they existed keep
        their fingerprints.

        Args:
            exclude: settings that change no result.
        """
        unset = {
            name
            for name, field in type(self).model_fields.items()
            if any(isinstance(each, Later) for each in field.metadata) and getattr(self, name) == field.get_default()
        }
        values = self.model_dump(mode="json", exclude=unset | set(exclude))
        sections = {name: value for name in values if isinstance(value := getattr(self, name), Section)}
        former = {name: value for name, value in self.former.items() if name not in exclude}
        return {**values, **{name: value.fingerprinted() for name, value in sections.items()}, **former}


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
