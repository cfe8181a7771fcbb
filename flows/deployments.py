"""Deployments on a Prefect server: ``prefect.yaml`` beside this file, with a person's settings laid over it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import construct_schedule
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.runner.storage import LocalStorage
from prefect.schedules import Cron, Interval, RRule, Schedule
from prefect.settings import get_current_settings
from prefect.utilities.callables import parameter_schema

from configs.errors import ConfigError
from configs.suggest import did_you_mean
from flows.requests import GPU_SLOTS

_FILE = Path(__file__).parent / "prefect.yaml"
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_EVERY = re.compile(r"every (\d+) ?(s|min|h|d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployRequest:
    """What a person wants deployed."""

    only: Sequence[str] = ()
    """Names of deployments; all when empty."""
    parameters: Mapping[str, Any]
    """Fields of the flows' requests; each flow takes those it has."""
    schedule: str | None = None
    """Cron, 'every 30 s', or an RRULE; None: those of the file, which rest until they are switched on."""
    timezone: str = "UTC"
    """Of the schedule."""
    pool: str = "flowmill"
    """Work pool; made if there is none."""
    kind: str = "process"
    """Type of a pool that is made: process, docker or kubernetes."""
    image: str | None = None
    """Image of containers."""
    gpu_slots: int | None = None
    """Size to give the limit that all flow runs share."""


def deploy(request: DeployRequest) -> list[str]:
    """Make or change deployments, and their pool; return their names, as ``flow/deployment``.

    Raises:
        ConfigError: no lasting server is named or it does not answer; there is no such deployment, or none that takes
            what is given; the schedule cannot be read.
    """
    entries = _chosen(request.only)
    _check_used(request, entries)
    schedules = None if request.schedule is None else [read_schedule(request.schedule, request.timezone)]
    if not get_current_settings().api.url:
        raise ConfigError(
            "Deployments live on a Prefect server, and PREFECT_API_URL names none. Start one with 'prefect server "
            "start', or 'flowmill ui', and set PREFECT_API_URL=http://127.0.0.1:4200/api."
        )
    try:
        _make_pool(request)
        return [_apply(entry, request, schedules) for entry in entries]
    except httpx.TransportError as error:
        url = get_current_settings().api.url
        raise ConfigError(f"Prefect's server at PREFECT_API_URL={url} does not answer ({error}).") from None


def read_schedule(text: str, timezone: str) -> Schedule:
    """Return a schedule: five cron fields, 'every 30 s' (s, min, h, d), or an RRULE.

    Raises:
        ConfigError: it is none of them, or the time zone is not known.
    """
    every = _EVERY.fullmatch(text.strip())
    try:
        if every:
            seconds = int(every[1]) * _UNITS[every[2]]
            # Anchored now: the first tick is one interval away, on every server alike.
            return Interval(timedelta(seconds=seconds), anchor_date=datetime.now(UTC), timezone=timezone)
        kind = RRule if text.startswith(("FREQ=", "RRULE:", "DTSTART")) else Cron
        found: Schedule = kind(text, timezone=timezone)
        # What the server would refuse is refused here.
        construct_schedule(cron=found.cron, rrule=found.rrule, timezone=found.timezone)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"--schedule '{text}' cannot be read ({error}). Write five cron fields ('0 2 * * *'), 'every 30 s' (s, "
            "min, h, d) or an RRULE ('FREQ=WEEKLY;BYDAY=SU')."
        ) from None
    return found


def _chosen(names: Sequence[str]) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {
        entry["name"]: entry for entry in yaml.safe_load(_FILE.read_text())["deployments"]
    }
    for name in names:
        if name not in entries:
            raise ConfigError(f"There is no deployment '{name}'. {did_you_mean(name, list(entries))}")
    return [entry for name, entry in entries.items() if not names or name in names]


def _make_pool(request: DeployRequest) -> None:
    with get_client(sync_client=True) as client:
        try:
            found = client.read_work_pool(request.pool)
        except ObjectNotFound:
            client.create_work_pool(WorkPoolCreate(name=request.pool, type=request.kind))
        else:
            if found.type != request.kind:
                raise ConfigError(
                    f"Work pool '{request.pool}' is of type '{found.type}', not '{request.kind}'. Name another with "
                    f"--pool, or say --type {found.type}."
                )
        if request.gpu_slots is not None:
            client.upsert_global_concurrency_limit_by_name(GPU_SLOTS, request.gpu_slots)


def _apply(entry: Mapping[str, Any], request: DeployRequest, schedules: list[Schedule] | None) -> str:
    taken = _fields(entry)
    given = {name: value for name, value in request.parameters.items() if name in taken}
    deployment = RunnerDeployment.from_entrypoint(
        entry["entrypoint"],
        name=entry["name"],
        description=entry["description"],
        parameters={"request": {**entry["parameters"]["request"], **given}},
        schedules=[_of_file(each) for each in entry.get("schedules", ())] if schedules is None else schedules,
        concurrency_limit=ConcurrencyLimitConfig.model_validate(entry["concurrency_limit"]),
        job_variables=_job_variables(entry["work_pool"]["job_variables"], request),
    )
    # Else a worker would copy its whole working directory, and the store in it, for every flow run.
    deployment.storage = LocalStorage("/" if request.kind != "process" else str(Path.cwd()))
    deployment.apply(work_pool_name=request.pool)
    return f"{deployment.flow_name}/{entry['name']}"


def _fields(entry: Mapping[str, Any]) -> Collection[str]:
    """Return what can be asked of a deployment's flow."""
    flow: Flow[..., Any] = load_flow_from_entrypoint(entry["entrypoint"])
    (form,) = (parameter_schema(flow).definitions or {}).values()
    return form["properties"]  # type: ignore[no-any-return]


def _check_used(request: DeployRequest, entries: Sequence[Mapping[str, Any]]) -> None:
    """Check that what is given is taken by something.

    Raises:
        ConfigError: it is not.
    """
    for name in request.parameters:
        if not any(name in _fields(entry) for entry in entries):
            raise ConfigError(f"--{name} is for none of the deployments {', '.join(each['name'] for each in entries)}.")
    if request.schedule is not None and not request.only:
        raise ConfigError("--schedule is for deployments named with --only: all at once would be in each other's way.")
    if request.image is not None and request.kind == "process":
        raise ConfigError("--image is for containers; give --type docker or kubernetes too.")


def _of_file(about: Mapping[str, Any]) -> Schedule:
    found = read_schedule(about["cron"], about["timezone"])
    return replace(found, active=about["active"], slug=about["slug"])


def _job_variables(common: Mapping[str, Any], request: DeployRequest) -> dict[str, Any]:
    return dict(common) if request.image is None else {**common, "image": request.image}
