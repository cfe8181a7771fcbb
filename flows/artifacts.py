"""Artifacts of a flow run in the Prefect UI (progress, links to MLflow and the report), and its events."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.events import emit_event
from prefect.runtime import deployment, flow_run

from flowmill.configs.escaping import command, in_code, in_link, in_markdown
from flowmill.configs.fingerprint import fingerprint
from flowmill.flows.server import has_lasting_api
from flowmill.tasks.tracking.locations import REPORT, ui_page

if TYPE_CHECKING:
    from flowmill.storage.artifacts.lineage import RunFolder

_EVERY_S = 5.0
#: Series of records with the events that a run has emitted, each by a digest of its facts.
_ANNOUNCED = "announced"
_EVENTS = "events"


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


def announce(label: str, run: RunFolder, *, artifact: str = "", **payload: Any) -> None:
    """Emit an event of a run for automations, related to the deployment that executes the run.

    Automations act on every event, also on one whose id Prefect has stored, and a continued run comes to its events
    again. So the run records which it has emitted to a lasting server.

    Args:
        label: name of the event.
        run: the run.
        artifact: what the event is about, if there may be others with the same facts.
        payload: facts of the event.
    """
    if not has_lasting_api():
        return
    recorded = (run.newest(_ANNOUNCED) or {}).get(_EVENTS)
    earlier = [str(each) for each in recorded] if isinstance(recorded, list) else []
    event = fingerprint([label, artifact, payload])
    if event in earlier:
        return
    related = []
    if deployment.id:
        related = [
            {"prefect.resource.id": f"prefect.deployment.{deployment.id}", "prefect.resource.role": "deployment"}
        ]
    resource = {"prefect.resource.id": f"flowmill.run.{run.name}", "prefect.resource.name": run.name}
    emit_event(f"flowmill.{label}", resource=resource, related=related, payload=payload)
    run.add(_ANNOUNCED, {_EVENTS: [*earlier, event]})


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
