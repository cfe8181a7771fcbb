"""Artifacts of a flow run in the Prefect UI (progress, links to MLflow and the report), and its events."""

from __future__ import annotations

import re
import time
from typing import Any, cast
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.events import emit_event
from prefect.runtime import deployment, flow_run

from flowmill.configs.escaping import command, in_code, in_link, in_markdown
from flowmill.configs.fingerprint import canonical_json, fingerprint
from flowmill.flows.server import has_lasting_api
from flowmill.tasks.tracking.locations import REPORT, ui_page

_EVERY_S = 5.0


class Progress:
    """A progress bar in the UI, updated at most every few seconds."""

    def __init__(self) -> None:
        self._id = cast(UUID, create_progress_artifact(0.0, description="epochs"))
        self._last = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Set the bar."""
        if done == total or time.monotonic() - self._last > _EVERY_S:
            update_progress_artifact(self._id, progress=100.0 * done / max(total, 1))
            self._last = time.monotonic()


def tracking_link(run: str, uri: str, url: str | None) -> None:
    """Show a link to the MLflow run."""
    if url is None:
        return
    markdown = f"**{in_markdown(run)}**: {_mlflow_run(uri, url)}"
    create_markdown_artifact(markdown=markdown, key=_key(run, "mlflow"), description="Experiment tracking")


def report_link(run: str, uri: str, url: str | None) -> None:
    """Show the location of a run's report."""
    logged = f"`{REPORT}` among the artifacts of the {_mlflow_run(uri, url)}" if url else None
    place = logged or in_code(command("flowmill", "report", run, "--root", uri))
    create_markdown_artifact(markdown=f"**{in_markdown(run)}**: {place}", key=_key(run, "report"), description="Report")


def _mlflow_run(uri: str, url: str) -> str:
    """Return a link to an MLflow run; for the store's own tracker, to the pages that 'flowmill ui' serves."""
    if url.startswith("http"):
        return in_link("MLflow run", url)
    return (
        f"{in_link('MLflow run', ui_page(uri, url))}, which {in_code(command('flowmill', 'ui', '--root', uri))} serves"
    )


def announce(label: str, run: str, *, once: str | None = None, **payload: Any) -> None:
    """Emit an event of a run for automations, related to the deployment that executes the run.

    Args:
        label: name of the event.
        run: name of the run.
        once: address of the run's store, for an event that a continued run announces again: Prefect stores an event of
            an id that it has seen once.
        payload: facts of the event.
    """
    if not has_lasting_api():
        return
    related = []
    if deployment.id:
        related = [
            {"prefect.resource.id": f"prefect.deployment.{deployment.id}", "prefect.resource.role": "deployment"}
        ]
    resource = {"prefect.resource.id": f"flowmill.run.{run}", "prefect.resource.name": run}
    event_id = None if once is None else uuid5(NAMESPACE_URL, canonical_json([once, label, run, payload]))
    emit_event(f"flowmill.{label}", resource=resource, related=related, payload=payload, id=event_id)


def _key(run: str, label: str) -> str:
    """Return the key of an artifact; Prefect allows only these characters, so names with others get a digest."""
    name = re.sub("[^a-z0-9]+", "-", run.lower()).strip("-")
    return "-".join(filter(None, [name, "" if name == run else fingerprint(run)[:6], label]))


def flow_run_tags() -> dict[str, str]:
    """Return the tags that link an MLflow run to this flow run."""
    tags = {"prefect.flow_run_id": str(flow_run.id or "")}
    # The temporary API of a run without a server has no UI to link to.
    url = flow_run.ui_url if has_lasting_api() else None
    return {**tags, "prefect.flow_run_url": str(url)} if url else tags
