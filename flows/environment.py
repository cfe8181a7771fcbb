"""Process-wide settings that must be in place before Prefect, MLflow or torch are imported."""

from __future__ import annotations

import os

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
    # Spinning OpenMP threads slow small models many times over on a busy machine.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


def prepare_environment(threads: int = 1) -> None:
    """Set what the user has not set."""
    for name, value in {**_DEFAULTS, "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(name, value)
