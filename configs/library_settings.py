"""Environment variables that Prefect, MLflow, torch and others read when they are imported.

``import flowmill`` sets them, so that a user's program, a worker and a command have the same. A variable that the user
set stays.
"""

from __future__ import annotations

import os

_DEFAULTS = {
    # Telemetry of the libraries; MLflow reads only the word "true".
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A busy machine may need minutes to start the API server; Prefect's own limit is 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
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


def set_library_settings() -> None:
    """Set the variables that the user has not set."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    _spare_loopback()


def _spare_loopback() -> None:
    """Exclude this machine's own addresses from the environment's proxies, for every HTTP client."""
    if not any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in os.environ):
        return
    own = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    hosts = [host.strip() for host in ",".join([*own, *_LOOPBACK]).split(",")]
    # Some clients read the lowercase name, others the uppercase name.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys(filter(None, hosts)))
