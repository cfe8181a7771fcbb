"""Environment variables that must be set before Prefect, MLflow or torch is imported, and the default store."""

from __future__ import annotations

import os
from pathlib import Path

from configs.errors import ConfigError, StoreError
from configs.override_quoting import text_override
from configs.proxies import accept_proxies
from configs.suggestions import near_path
from storage.layout import RUNS, STAGING

_DEFAULTS = {
    # Telemetry of the libraries; MLflow reads only the word "true".
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A busy machine may need minutes to start the API server; Prefect's own limit is 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    # Spinning OpenMP threads slow small models down several times on a busy machine.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    # The failing tasks report the errors of clusters.
    "DASK_LOGGING__DISTRIBUTED": "critical",
    "RAY_USAGE_STATS_ENABLED": "0",
}

#: Hosts of this machine.
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def prepare_environment(threads: int = 1) -> None:
    """Set the variables that the user has not set."""
    for name, value in {**_DEFAULTS, "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(name, value)
    _spare_loopback()
    accept_proxies()


def _spare_loopback() -> None:
    """Exclude this machine's own addresses from the environment's proxies, for every HTTP client."""
    if not any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in os.environ):
        return
    given = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    hosts = [host.strip() for host in ",".join([*given, *_LOOPBACK]).split(",")]
    # Some clients read the lowercase name, others the uppercase name.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys(filter(None, hosts)))


def wants_traceback() -> bool:
    """Return whether FLOWMILL_TRACEBACK asks for tracebacks of errors."""
    return os.environ.get("FLOWMILL_TRACEBACK", "") not in ("", "0")


def default_root(root: str | None) -> str:
    """Return the given root, else FLOWMILL_ROOT, else the default folder.

    Raises:
        ConfigError: the given root is empty.
    """
    if root == "":
        raise ConfigError("The root of the store is empty: it names nothing. Leave it out, or give a folder or URI.")
    return root or os.environ.get("FLOWMILL_ROOT") or "flowmill-store"


def chosen_root(root: str | None) -> str | None:
    """Return the given root, else FLOWMILL_ROOT, else None: that of a config.

    Raises:
        ConfigError: the given root is empty.
    """
    return default_root(root) if root is not None or os.environ.get("FLOWMILL_ROOT") else None


def as_overrides(root: str | None, name: str | None) -> list[str]:
    """Return a given root, else FLOWMILL_ROOT, and a given name as overrides of a config."""
    return place_overrides(chosen_root(root), name)


def place_overrides(root: str | None, name: str | None) -> list[str]:
    """Return a given root and name as overrides of a config."""
    given = {"store.root": root, "run.name": name}
    return [text_override(key, value) for key, value in given.items() if value is not None]


def existing_root(root: str | None) -> str:
    """Return the location of an existing store; commands that only read create no folder.

    Raises:
        StoreError: there is no such folder, or it holds no store.
    """
    chosen = default_root(root)
    if "://" in chosen:
        return chosen
    folder = Path(chosen).expanduser().absolute()
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
