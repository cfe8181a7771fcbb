"""The user's folders for files outside any store."""

from __future__ import annotations

import os
from pathlib import Path

from flowmill.configs.errors import ConfigError


def user_cache() -> Path:
    """Return the folder of reproducible files: flowmill/ in XDG_CACHE_HOME or ~/.cache."""
    return _folder("XDG_CACHE_HOME", ".cache")


def user_state() -> Path:
    """Return the folder of logs and notes: flowmill/ in XDG_STATE_HOME or ~/.local/state."""
    return _folder("XDG_STATE_HOME", ".local/state")


def user_path(path: str | Path) -> Path:
    """Return a path with the home folder in place of ``~`` or ``~user``; raise ConfigError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"'{path}' begins with the home folder of a user that this machine does not know. Write the folder in full."
        ) from None


def possible_path(path: str | Path) -> Path:
    """Return a path with ``~`` and ``~user`` expanded, where that user exists; otherwise no file has this path."""
    return Path(os.path.expanduser(path))


def _folder(variable: str, below: str) -> Path:
    """Return a user folder; raise ConfigError if the user has no home."""
    named = os.environ.get(variable)
    try:
        return Path(named or Path.home() / below) / "flowmill"
    except RuntimeError:
        raise ConfigError(f"This user has no home folder, and HOME names none. Set HOME, or {variable}.") from None
