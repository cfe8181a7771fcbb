"""Where a preset comes from, and what is stated there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Where a preset comes from and what is stated there."""

    title: str
    """Method and model."""
    paper: str | None
    """arXiv number."""
    files: Mapping[str, str]
    """Addresses of the files, by a short name."""
    settings: Mapping[str, Mapping[str, Any]]
    """Published values by the short name of the file, then by setting."""
    remark: str = ""
    """What the table cannot say."""

    def values(self) -> dict[str, tuple[Any, str]]:
        """Return value and file by setting; later files overrule earlier ones."""
        found: dict[str, tuple[Any, str]] = {}
        for name, settings in self.settings.items():
            found |= {key: (value, name) for key, value in settings.items()}
        return found
