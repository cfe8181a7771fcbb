"""Prefect's worker, whose log says once, not at every attempt, that a flow run waits for another of its deployment.

``python -m flowmill.flows.worker ARGUMENTS`` is ``python -m prefect ARGUMENTS``.
"""

from __future__ import annotations

import logging
import runpy

#: The logger of a worker for its flow runs, and its messages of an attempt.
LOGGER, ATTEMPTS = "prefect.flow_runs.worker", ("submitting flow run", "Aborted submission of flow run")


class SaidOnce(logging.Filter):
    """Drops a message of an attempt that was logged before."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        text = record.getMessage()
        if not any(each in text for each in ATTEMPTS):
            return True
        is_new = text not in self._said
        self._said.add(text)
        return is_new


if __name__ == "__main__":
    logging.getLogger(LOGGER).addFilter(SaidOnce())
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
