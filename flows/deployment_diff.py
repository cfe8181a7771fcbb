"""Differences between a deployment on the server and a request, and an update of only those settings."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from flowmill.flows.deployment_list import OFF, OWN_TAGS, requested, shown_schedule, tags
from flowmill.flows.requests import DeployRequest
from flowmill.flows.schedule_parser import Rule, schedule_text
from flowmill.flows.subjects import SUBJECTS

#: Slug of the schedule that ``deploy`` sets; the user or ``prefect.yaml`` set all others.
SLUG = "flowmill"
#: The working directory of flows in containers, which see no folder of this machine.
IN_CONTAINERS = "/"
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
        return f"{self.deployment}: {self.label} {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A deployment as it is on the server."""

    name: str
    there: DeploymentResponse
    entry: Mapping[str, Any]
    """Its entry in ``prefect.yaml``."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Its flow's request parameters."""
        return requested(self.there)

    @property
    def folder(self) -> str | None:
        """Its working directory; None if its pull steps are customized."""
        steps = self.there.pull_steps or []
        only = steps[0] if len(steps) == 1 and isinstance(steps[0], dict) else {}
        place = only.get(_FOLDER) or {}
        return place.get("directory") if isinstance(place, dict) else None

    def new_folder(self, request: DeployRequest) -> str | None:
        """Return the working directory that a request gives it, whose ``kind`` is the type of its pool; None: its own.

        That of the command, if it names the config, run or root, whose paths are relative to it, or another pool.
        Customized pull steps stay, and without a named pool those of containers.
        """
        named, pool = taken(self.entry, request.parameters), request.pool
        if self.folder is None or (pool is None and IN_CONTAINERS in (self.folder, request.folder or IN_CONTAINERS)):
            return None
        moves = request.folder is None or pool not in (None, self.there.work_pool_name)
        folder = (request.folder or IN_CONTAINERS) if moves or any(each in named for each in SUBJECTS) else None
        return None if folder == self.folder else folder

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
class Edit:
    """The changes that a request makes to a deployment on the server; all other settings stay."""

    deployed: Deployed
    changes: Sequence[Change]
    update: Mapping[str, Any]
    """Fields to send; the server keeps all others."""
    rule: Rule | None
    """Rule that neither an active schedule nor the own one has yet."""

    def apply(self, client: SyncPrefectClient) -> None:
        """Send the update, and the rule apart: with it the server would delete all schedules if one has no slug."""
        there, own = self.deployed.there, self.deployed.own_schedule
        client.update_deployment(there.id, DeploymentUpdate(**self.update))
        if self.rule is None:
            return
        if own is None:
            client.create_deployment_schedules(there.id, [DeploymentScheduleCreate(schedule=self.rule, slug=SLUG)])
        else:
            client.update_deployment_schedule(there.id, own.id, active=own.active, schedule=self.rule, slug=SLUG)


@functools.cache
def _form(entrypoint: str) -> dict[str, Any]:
    return parameter_schema(load_flow_from_entrypoint(entrypoint)).model_dump(exclude_unset=True)


def request_fields(entry: Mapping[str, Any]) -> Collection[str]:
    """Return the request fields of the flow of an entry of ``prefect.yaml``."""
    (form,) = _form(entry["entrypoint"])["definitions"].values()
    return form["properties"]  # type: ignore[no-any-return]


def taken(entry: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that the flow of an entry takes."""
    fields = request_fields(entry)
    return {name: value for name, value in values.items() if name in fields}


def edit(current: Deployed, request: DeployRequest, *, rule: Rule | None) -> Edit:
    """Compare a deployment with a request, whose ``kind`` is the type of its pool, and its schedule.

    The file's values are no user's choice while no schedule is active. The form is always that of the flow.
    """
    there, entrypoint, usual = current.there, current.entry["entrypoint"], current.entry["parameters"]["request"]
    parameters = taken(current.entry, request.parameters)
    lines: list[Change] = []
    update: dict[str, Any] = {"parameter_openapi_schema": _form(entrypoint), "entrypoint": entrypoint}
    for name, value in parameters.items():
        before = current.parameters.get(name)
        if before != value:
            chosen = before is not None and (current.scheduled or before != usual.get(name))
            lines.append(
                Change(current.name, name, _MISSING if before is None else str(before), str(value), asks=chosen)
            )
    after = {**(current.parameters or usual), **parameters}
    if after != current.parameters:
        others = [tag for tag in there.tags if not tag.startswith(OWN_TAGS)]
        update |= {"parameters": {**(there.parameters or {}), "request": after}, "tags": [*others, *tags(after)]}
    own = current.own_schedule
    # A schedule that was switched off stays off.
    off = "" if own is None or own.active else OFF
    before = _MISSING if own is None else shown_schedule(own)
    if rule is not None and (
        schedule_text(rule) + off == before or schedule_text(rule) in map(shown_schedule, there.schedules)
    ):
        rule = None
    if rule is not None:
        lines.append(Change(current.name, "schedule", before, schedule_text(rule) + off, asks=own is not None))
    variables = there.job_variables or {}
    folder = current.new_folder(request)
    for label, now, then, sent in (
        ("pool", there.work_pool_name, request.pool, {"work_pool_name": request.pool}),
        ("image", variables.get("image"), request.image, {"job_variables": {**variables, "image": request.image}}),
        ("folder", current.folder, folder, {"pull_steps": [{_FOLDER: {"directory": folder}}]}),
    ):
        if then is not None and now != then:
            asks = now is not None and (label != "folder" or current.scheduled)
            lines.append(Change(current.name, label, now or _MISSING, then, asks=asks))
            update |= sent
    return Edit(deployed=current, changes=lines, update=update, rule=rule)
