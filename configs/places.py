"""Folders of the user's own that files outside any store go to."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return where things are kept that can be made again: XDG_CACHE_HOME or ~/.cache, below flowmill/."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowmill"


def user_state() -> Path:
    """Return where logs and notes are kept: XDG_STATE_HOME or ~/.local/state, below flowmill/."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "flowmill"
