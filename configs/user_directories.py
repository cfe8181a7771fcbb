"""Folders of the user's own that files outside any store go to."""

from __future__ import annotations

import os
from pathlib import Path

from configs.errors import ConfigError


def user_cache() -> Path:
    """Return where things are kept that can be made again: XDG_CACHE_HOME or ~/.cache, below flowmill/."""
    return _folder("XDG_CACHE_HOME", ".cache")


def user_state() -> Path:
    """Return where logs and notes are kept: XDG_STATE_HOME or ~/.local/state, below flowmill/."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, below: str) -> Path:
    """Return a folder of the user's own.

    Raises:
        ConfigError: this user has no home.
    """
    named = os.environ.get(variable)
    try:
        return Path(named or Path.home() / below) / "flowmill"
    except RuntimeError:
        raise ConfigError(f"This user has no home folder, and HOME names none. Set HOME, or {variable}.") from None
