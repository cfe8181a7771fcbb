"""What a flow run shows in the Prefect UI: progress, evaluations, and the way to MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.runtime import flow_run

from flows.server import has_lasting_api

_EVERY_S = 5.0


class Progress:
    """A progress bar in the UI, updated every few seconds at most."""

    def __init__(self) -> None:
        """Create the bar at zero."""
        self._id = cast(UUID, create_progress_artifact(0.0, description="epochs"))
        self._last = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Set the bar."""
        if done == total or time.monotonic() - self._last > _EVERY_S:
            update_progress_artifact(self._id, progress=100.0 * done / max(total, 1))
            self._last = time.monotonic()


def evaluation_table(run: str, epoch: int, figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Show the figures of an evaluation, one row per split and reward."""
    rows: list[dict[str, Any]] = [
        {"epoch": epoch, "split": split, "reward": slot, **values}
        for split, rewards in figures.items()
        for slot, values in rewards.items()
    ]
    create_table_artifact(table=rows, key="evaluation", description=f"{run}, epoch {epoch}")


def tracking_link(run: str, uri: str, url: str | None) -> None:
    """Show where the MLflow run is."""
    if url is None:
        return
    link = f"[MLflow run]({url})" if url.startswith("http") else f"MLflow run `{url}` in `flowmill ui` (store `{uri}`)"
    create_markdown_artifact(markdown=f"**{run}**: {link}", key="mlflow", description="Experiment tracking")


def flow_run_tags() -> dict[str, str]:
    """Return the tags that link an MLflow run to this flow run."""
    tags = {"prefect.flow_run_id": str(flow_run.id or "")}
    # The temporary API of a run without a server serves no UI that a link could open.
    url = flow_run.ui_url if has_lasting_api() else None
    return {**tags, "prefect.flow_run_url": str(url)} if url else tags
