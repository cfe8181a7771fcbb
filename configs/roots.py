"""The store that a command without --root opens, and the option that names another one."""

from __future__ import annotations

import os
from pathlib import Path

from flowmill.configs.errors import ConfigError
from flowmill.configs.user_directories import user_path


def default_root(root: str | Path | None) -> str:
    """Return the requested root, else FLOWMILL_ROOT, else the default folder."""
    if root == "":
        raise ConfigError("The root of the store is empty: it names nothing. Leave it out, or give a folder or URI.")
    return str(root or "") or os.environ.get("FLOWMILL_ROOT") or "flowmill-store"


def root_option(root: str) -> list[str]:
    """Return the words that a suggested command needs to open a store: none for the one that it opens anyway."""
    return [] if _place(root) == _place(default_root(None)) else ["--root", short_place(root)]


def short_place(place: str) -> str:
    """Return a path inside the working directory as a relative path, and any other location unchanged."""
    path = Path(place)
    inside = "://" not in place and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if inside else place


def _place(root: str) -> str:
    return root.rstrip("/") if "://" in root else str(user_path(root).resolve())
