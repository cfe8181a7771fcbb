"""Environment variables of commands, and their stores."""

from __future__ import annotations

import os
from pathlib import Path

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.library_settings import set_library_settings
from flowmill.configs.override_quoting import text_override
from flowmill.configs.roots import default_root
from flowmill.configs.suggestions import near_path
from flowmill.configs.user_directories import user_path
from flowmill.storage.layout import RUNS, STAGING


def prepare_environment(threads: int = 1) -> None:
    """Set the variables of a command that the user has not set, and torch's threads."""
    set_library_settings()
    _check_proxies()
    # Commands print what they do themselves.
    for name, value in {"PREFECT_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(name, value)


def _check_proxies() -> None:
    if not any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in os.environ):
        return
    import httpx

    try:
        httpx.Client().close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"A proxy of the environment cannot be used: {error} Correct or unset HTTP_PROXY, HTTPS_PROXY and "
            "ALL_PROXY, also in lower case; a SOCKS proxy needs pip install 'flowmill[socks]'."
        ) from None


def wants_traceback() -> bool:
    """Return whether FLOWMILL_TRACEBACK asks for tracebacks of errors."""
    return os.environ.get("FLOWMILL_TRACEBACK", "") not in ("", "0")


def chosen_root(root: str | Path | None) -> str | None:
    """Return the requested root, else FLOWMILL_ROOT, else None: that of a config."""
    return default_root(root) if root is not None or os.environ.get("FLOWMILL_ROOT") else None


def as_overrides(root: str | Path | None, name: str | None) -> list[str]:
    """Return a root, else FLOWMILL_ROOT, and a name as overrides of a config."""
    return place_overrides(chosen_root(root), name)


def place_overrides(root: str | None, name: str | None) -> list[str]:
    """Return root and name as overrides of a config."""
    places = {"store.root": root, "run.name": name}
    return [text_override(key, value) for key, value in places.items() if value is not None]


def existing_root(root: str | Path | None) -> str:
    """Return the location of an existing store; commands that only read create no folder."""
    chosen = default_root(root)
    if "://" in chosen:
        return chosen
    folder = user_path(chosen).absolute()
    if any((folder / name).is_dir() for name in (RUNS, STAGING)):
        return str(folder)
    if folder.is_dir():
        raise StoreError(f"'{folder}' holds no store: it has no folder '{RUNS}'. Name the store's folder with --root.")
    near = near_path(chosen, (Path(),), only_folders=True)
    hint = f"Did you mean '{near}'? " if near else ""
    raise StoreError(
        f"There is no store at '{folder}'. {hint}Name one with --root or FLOWMILL_ROOT, or make one with "
        "'flowmill run CONFIG'."
    )
