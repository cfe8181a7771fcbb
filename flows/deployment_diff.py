"""Differences between a deployment on the server and a request, and an update of only those settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse

from flows.deployment_list import OWN_TAGS, tags
from flows.schedule_parser import Rule, schedule_text

#: Slug of the schedule that ``deploy`` sets; the user or ``prefect.yaml`` set all others.
SLUG = "flowmill"
_FOLDER = "prefect.deployments.steps.set_working_directory"
_MISSING = "-"


@dataclass(frozen=True, slots=True)
class Change:
    """One setting of a deployment that would change."""

    deployment: str
    label: str
    before: str
    after: str
    asks: bool
    """Whether the change replaces a user's setting and therefore needs confirmation."""

    def __str__(self) -> str:
        """Return the change as one readable line."""
        return f"{self.deployment}: {self.label} {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A deployment as it is on the server."""

    name: str
    there: DeploymentResponse
    entry: Mapping[str, Any]
    """Its entry in ``prefect.yaml``."""

    @property
    def asked(self) -> Mapping[str, Any]:
        """Its flow's request parameters."""
        found = (self.there.parameters or {}).get("request")
        return found if isinstance(found, dict) else {}

    @property
    def folder(self) -> str | None:
        """Its working directory; None if its pull steps are customized."""
        steps = self.there.pull_steps or []
        only = steps[0] if len(steps) == 1 and isinstance(steps[0], dict) else {}
        place = only.get(_FOLDER) or {}
        return place.get("directory") if isinstance(place, dict) else None

    @property
    def scheduled(self) -> bool:
        """Whether one of its schedules is active."""
        return any(each.active for each in self.there.schedules)

    @property
    def own_schedule(self) -> DeploymentSchedule | None:
        """The schedule that ``deploy`` set; earlier versions set it without a slug."""
        schedules = self.there.schedules
        named = [each for each in schedules if each.slug == SLUG]
        unnamed = [each for each in schedules if each.slug is None]
        return named[0] if named else unnamed[0] if len(unnamed) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSettings:
    """Requested settings of a deployment; None leaves a setting unchanged."""

    parameters: Mapping[str, Any]
    schedule: Rule | None
    pool: str | None
    image: str | None
    folder: str | None
    form: Mapping[str, Any]
    """Schema of the flow's parameters."""


def changes(found: Found, wanted: RequestedSettings) -> Iterator[Change]:
    """Yield the settings that would change; the file's values are no user's choice while no schedule is active."""
    usual = found.entry["parameters"]["request"]
    for name, value in wanted.parameters.items():
        before = found.asked.get(name)
        if before != value:
            chosen = before is not None and (found.scheduled or before != usual.get(name))
            yield Change(found.name, name, _MISSING if before is None else str(before), str(value), asks=chosen)
    yield from _schedule_changes(found, wanted.schedule)
    image = (found.there.job_variables or {}).get("image")
    for label, now, then in (
        ("pool", found.there.work_pool_name, wanted.pool),
        ("image", image, wanted.image),
        ("folder", found.folder, wanted.folder),
    ):
        if then is not None and now != then and (now is not None or label != "folder"):
            asks = now is not None and (label != "folder" or found.scheduled)
            yield Change(found.name, label, now or _MISSING, then, asks=asks)


def _schedule_changes(found: Found, rule: Rule | None) -> Iterator[Change]:
    if rule is None or _is_due_by(found, rule):
        return
    own = found.own_schedule
    if own is None or not isinstance(own.schedule, Rule):
        yield Change(found.name, "schedule", _MISSING, schedule_text(rule), asks=False)
    else:
        now = schedule_text(own.schedule) + ("" if own.active else " (off)")
        yield Change(found.name, "schedule", now, schedule_text(rule), asks=True)


def _is_due_by(found: Found, rule: Rule) -> bool:
    """Return whether any active schedule of a deployment already has this rule."""
    return any(
        each.active and isinstance(each.schedule, Rule) and schedule_text(each.schedule) == schedule_text(rule)
        for each in found.there.schedules
    )


def change(client: SyncPrefectClient, found: Found, wanted: RequestedSettings) -> None:
    """Apply the requested settings and the flow's current parameter schema to a deployment; keep all others."""
    there = found.there
    parameters = {**(found.asked or found.entry["parameters"]["request"]), **wanted.parameters}
    given: dict[str, Any] = {"parameter_openapi_schema": wanted.form, "entrypoint": found.entry["entrypoint"]}
    if parameters != found.asked:
        others = [tag for tag in there.tags if not tag.startswith(OWN_TAGS)]
        given["parameters"] = {**(there.parameters or {}), "request": parameters}
        given["tags"] = [*others, *tags(parameters)]
    if wanted.pool is not None and wanted.pool != there.work_pool_name:
        given["work_pool_name"] = wanted.pool
    if wanted.image is not None:
        given["job_variables"] = {**(there.job_variables or {}), "image": wanted.image}
    if wanted.folder is not None and found.folder not in (None, wanted.folder):
        given["pull_steps"] = [{_FOLDER: {"directory": wanted.folder}}]
    client.update_deployment(there.id, DeploymentUpdate(**given))
    if wanted.schedule is not None and not _is_due_by(found, wanted.schedule):
        _give_schedule(client, found, wanted.schedule)


def _give_schedule(client: SyncPrefectClient, found: Found, rule: Rule) -> None:
    own = found.own_schedule
    if own is None:
        client.create_deployment_schedules(found.there.id, [DeploymentScheduleCreate(schedule=rule, slug=SLUG)])
    else:
        client.update_deployment_schedule(found.there.id, own.id, active=True, schedule=rule, slug=SLUG)
