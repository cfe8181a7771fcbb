"""Deployments on a Prefect server: ``prefect.yaml`` next to this file, merged with the user's settings.

An existing deployment keeps every setting that the request does not name, such as those made in Prefect's UI.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.runner.storage import LocalStorage
from prefect.utilities.callables import parameter_schema

from configs.errors import ConfigError
from configs.escaping import quoted
from configs.suggestions import did_you_mean
from flows.api import named_server
from flows.deployment_diff import SLUG, Change, Found, RequestedSettings, change, changes
from flows.deployment_list import UNKNOWN, Listed, listed, tags
from flows.requests import GPU_SLOTS, DeployRequest
from flows.schedule_parser import Rule, read_schedule
from flows.subjects import Wanted, check_subjects, usual_subject

_FILE = Path(__file__).parent / "prefect.yaml"
_POOL, _KIND = "flowmill", "process"
_LONGEST = 100
#: An entry of the file, with the existing deployment if there is one.
Entry = tuple[Mapping[str, Any], Found | None]
_NAME = re.compile(rf"(?!\s)[^\x00-\x1f/%&<>]{{1,{_LONGEST}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes that a request makes on a server."""

    request: DeployRequest
    schedule: Rule | None
    entries: Sequence[Entry]
    changes: Sequence[Change]
    """Settings that would change."""
    left_out: Sequence[str] = ()
    """Deployments that cannot be created because no config is given."""


def plan(request: DeployRequest) -> Plan:
    """Compare a request with the server and return the changes, without making them.

    Raises:
        ConfigError: no lasting server is named or it does not answer; there is no such deployment, or none that takes
            an option; the schedule cannot be read; a config cannot run, or the run is ambiguous.
        StoreError: a run does not exist.
    """
    entries = _chosen(request.only)
    _check_used(request, entries)
    schedule = None if request.schedule is None else read_schedule(request.schedule, request.timezone)
    with named_server() as client:
        here = _check_pool(client, request) == _KIND
        found: list[Entry] = [(entry, _found(client, entry, request)) for entry in entries]
        usual = usual_subject(_wanted(found, request), here=here)
        request = request.model_copy(update={"defaults": {**request.defaults, **usual}})
        found, left_out = _with_config(found, request)
        check_subjects(_wanted(found, request), here=here)
        differ = [each for entry, there in found if there for each in changes(there, _goal(entry, request, schedule))]
        changed = [*differ, *_slots(client, request)]
        return Plan(request=request, schedule=schedule, entries=found, changes=changed, left_out=left_out)


def apply_plan(planned: Plan) -> list[Listed]:
    """Create or change deployments and their pool; return the resulting deployments.

    Raises:
        ConfigError: the server does not answer, or refuses something.
    """
    request = planned.request
    with named_server() as client:
        if request.pool is not None or any(there is None for _, there in planned.entries):
            _make_pool(client, request)
        if request.gpu_slots is not None:
            client.upsert_global_concurrency_limit_by_name(GPU_SLOTS, request.gpu_slots)
        for entry, there in planned.entries:
            if there is None:
                _make(entry, request, planned.schedule)
            else:
                change(client, there, _goal(entry, request, planned.schedule))
        return listed(client, [_full_name(entry, request) for entry, _ in planned.entries])


def workers(rows: Sequence[Listed]) -> list[str]:
    """Return the worker commands that execute deployments, one per pool.

    Raises:
        ConfigError: no lasting server is named, or it does not answer.
    """
    with named_server() as client:
        kinds = {row.pool: client.read_work_pool(row.pool).type for row in rows if row.pool != UNKNOWN}
    usual: dict[str, list[str]] = {_KIND: []}
    return [
        shlex.join(["flowmill", "worker", "--pool", pool, *usual.get(kind, ["--type", kind])])
        for pool, kind in sorted(kinds.items())
    ]


def every_deployment() -> list[Listed]:
    """Return all deployments of flowmill's flows on the server.

    Raises:
        ConfigError: no lasting server is named, or it does not answer.
    """
    with named_server() as client:
        return listed(client, None)


def _chosen(names: Sequence[str]) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {
        entry["name"]: entry for entry in yaml.safe_load(_FILE.read_text())["deployments"]
    }
    for name in names:
        if name not in entries:
            raise ConfigError(f"There is no deployment '{name}'. {did_you_mean(name, list(entries))}")
    return [entry for name, entry in entries.items() if not names or name in names]


def _full_name(entry: Mapping[str, Any], request: DeployRequest) -> str:
    # A flow has the name of its entry.
    return f"{entry['name']}/{request.name or entry['name']}"


def _found(client: SyncPrefectClient, entry: Mapping[str, Any], request: DeployRequest) -> Found | None:
    name = _full_name(entry, request)
    try:
        there: DeploymentResponse = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None
    return Found(name=name, there=there, entry=entry)


def _wanted(found: Sequence[Entry], request: DeployRequest) -> list[Wanted]:
    return [
        Wanted(
            usual=entry["parameters"]["request"],
            there=None if there is None else there.asked,
            given=_taken(entry, request.parameters),
            defaults=_taken(entry, request.defaults),
        )
        for entry, there in found
    ]


def _with_config(found: Sequence[Entry], request: DeployRequest) -> tuple[list[Entry], list[str]]:
    """Return the entries to deploy, and the names of new ones whose default config belongs to another run."""
    run = request.parameters.get("run") or request.defaults.get("run")
    kept, left_out = [], []
    for entry, there in found:
        config = entry["parameters"]["request"].get("config")
        foreign = config is not None and "config" not in request.parameters and run not in (None, config)
        if foreign and there is None and not request.only:
            left_out.append(_full_name(entry, request))
        else:
            kept.append((entry, there))
    return kept, left_out


def _goal(entry: Mapping[str, Any], request: DeployRequest, schedule: Rule | None) -> RequestedSettings:
    """Return the requested settings of an existing deployment, and its flow's current parameter schema."""
    return RequestedSettings(
        parameters=_taken(entry, request.parameters),
        schedule=schedule,
        pool=request.pool,
        image=request.image,
        folder=str(Path.cwd()) if request.kind in (None, "process") else None,
        form=parameter_schema(_flow(entry)).model_dump(exclude_unset=True),
    )


def _slots(client: SyncPrefectClient, request: DeployRequest) -> list[Change]:
    if request.gpu_slots is None:
        return []
    try:
        before = client.read_global_concurrency_limit_by_name(GPU_SLOTS).limit
    except ObjectNotFound:
        return []
    after = request.gpu_slots
    return [] if before == after else [Change("limit", GPU_SLOTS, str(before), str(after), asks=True)]


def _check_pool(client: SyncPrefectClient, request: DeployRequest) -> str:
    """Return the type of the pool; refuse a requested type that differs from an existing pool's."""
    pool = request.pool or _POOL
    try:
        found = client.read_work_pool(pool)
    except ObjectNotFound:
        return request.kind or _KIND
    if request.kind not in (None, found.type):
        raise ConfigError(
            f"Work pool '{pool}' is of type '{found.type}', not '{request.kind}'. Name another with --pool, or say "
            f"--type {quoted(found.type)}."
        )
    return found.type


def _make_pool(client: SyncPrefectClient, request: DeployRequest) -> None:
    pool = request.pool or _POOL
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=pool, type=request.kind or _KIND))


def _make(entry: Mapping[str, Any], request: DeployRequest, schedule: Rule | None) -> None:
    """Create a deployment."""
    given = _taken(entry, {**request.defaults, **request.parameters})
    parameters = {**entry["parameters"]["request"], **given}
    common = entry["work_pool"]["job_variables"]
    deployment = RunnerDeployment.from_entrypoint(
        entry["entrypoint"],
        name=request.name or entry["name"],
        description=entry["description"],
        tags=tags(parameters),
        parameters={"request": parameters},
        concurrency_limit=ConcurrencyLimitConfig.model_validate(entry["concurrency_limit"]),
        job_variables=dict(common) if request.image is None else {**common, "image": request.image},
    )
    own = [DeploymentScheduleCreate(schedule=schedule, slug=SLUG)] if schedule else _of_file(entry)
    # Otherwise a worker would copy its whole working directory, including the store, for every flow run.
    deployment.storage = LocalStorage(str(Path.cwd()) if request.kind in (None, "process") else "/")
    deployment.apply(
        schedules=[each.model_dump(exclude_unset=True) for each in own], work_pool_name=request.pool or _POOL
    )


def _of_file(entry: Mapping[str, Any]) -> list[DeploymentScheduleCreate]:
    return [
        DeploymentScheduleCreate(
            schedule=read_schedule(about["cron"], about["timezone"]), active=about["active"], slug=about["slug"]
        )
        for about in entry.get("schedules", ())
    ]


def _flow(entry: Mapping[str, Any]) -> Flow[..., Any]:
    return load_flow_from_entrypoint(entry["entrypoint"])


def _fields(entry: Mapping[str, Any]) -> Collection[str]:
    """Return the request fields of a deployment's flow."""
    (form,) = (parameter_schema(_flow(entry)).definitions or {}).values()
    return form["properties"]  # type: ignore[no-any-return]


def _taken(entry: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given parameters that a deployment's flow takes."""
    fields = _fields(entry)
    return {name: value for name, value in given.items() if name in fields}


def _check_used(request: DeployRequest, entries: Sequence[Mapping[str, Any]]) -> None:
    """Check that at least one deployment takes each option."""
    for name in request.parameters:
        if not any(name in _fields(entry) for entry in entries):
            raise ConfigError(f"--{name} is for none of the deployments {', '.join(each['name'] for each in entries)}.")
    if request.schedule is not None and not request.only:
        raise ConfigError("--schedule is for deployments named with --only: all at once would block each other.")
    if request.image is not None and request.kind in (None, "process"):
        raise ConfigError("--image is for containers; give --type docker or kubernetes too.")
    if request.name is not None and not _NAME.fullmatch(request.name):
        raise ConfigError(
            f"--name '{request.name[:_LONGEST]}' is no name of a deployment: it has up to {_LONGEST} characters, none "
            "of them / % & < > or a line break."
        )
