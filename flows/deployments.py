"""Deployments on a Prefect server: ``prefect.yaml`` next to this file, merged with the user's settings.

An existing deployment keeps every setting that the request does not name, such as those made in Prefect's UI.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runner.storage import LocalStorage
from prefect.schedules import Cron

from flowmill.configs.errors import ConfigError
from flowmill.configs.suggestions import did_you_mean
from flowmill.flows.api import named_server
from flowmill.flows.deployment_diff import IN_CONTAINERS, SLUG, Change, Deployed, Edit, edit, request_fields, taken
from flowmill.flows.deployment_list import UNKNOWN, Listed, listed, tags
from flowmill.flows.requests import GPU_SLOTS, DeployRequest
from flowmill.flows.schedule_parser import Rule, read_schedule
from flowmill.flows.subjects import Subject, check_subjects, usual_subject

_FILE = Path(__file__).parent / "prefect.yaml"
_POOL, _KIND = "flowmill", "process"
_LONGEST = 100
#: An entry of the file, with the existing deployment if there is one.
Entry = tuple[Mapping[str, Any], Deployed | None]
_NAME = re.compile(rf"(?!\s)[^\x00-\x1f/%&<>]{{1,{_LONGEST}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """The changes that a request makes on a server."""

    request: DeployRequest
    schedule: Rule | None
    edits: Sequence[tuple[Mapping[str, Any], Edit | None]]
    """Entries of the file, with the changes of existing deployments."""
    changes: Sequence[Change]
    """Settings that would change."""
    left_out: Sequence[str] = ()
    """Deployments that cannot be created without a config."""


def plan(request: DeployRequest) -> DeploymentPlan:
    """Compare a request with the server and return the changes, without making them."""
    entries = _chosen(request.only)
    _check_used(request, entries)
    schedule = None if request.schedule is None else read_schedule(request.schedule, request.timezone or "UTC")
    with named_server() as client:
        pool = request.pool or _POOL
        kind = _pool_type(client, pool, request.kind)
        here = kind == _KIND
        if here and request.image is not None:
            raise ConfigError(
                f"--image is for containers, and work pool '{pool}' is of type '{_KIND}'. Name a pool of "
                "containers with --pool, or a new one with --pool and --type docker or kubernetes."
            )
        deployed: list[Entry] = [(entry, _deployed(client, entry, request)) for entry in entries]
        usual = usual_subject(_subjects(deployed, request), here=here)
        request = request.model_copy(update={"defaults": {**request.defaults, **usual}, "kind": kind})
        deployed, left_out = _with_config(deployed, request)
        check_subjects(_subjects(deployed, request), here=here)
        edits = [(entry, edit(there, request, rule=schedule) if there else None) for entry, there in deployed]
        changed = [each for _, change in edits if change for each in change.changes]
        changed += _slots(client, request)
        return DeploymentPlan(request=request, schedule=schedule, edits=edits, changes=changed, left_out=left_out)


def plan_slots(request: DeployRequest) -> DeploymentPlan:
    """Compare the GPUs that all flow runs share with the server, for a request that names no deployments."""
    with named_server() as client:
        return DeploymentPlan(request=request, schedule=None, edits=(), changes=_slots(client, request))


def apply_plan(planned: DeploymentPlan) -> list[Listed]:
    """Create or change deployments and their pool; return the resulting deployments."""
    request = planned.request
    with named_server() as client:
        if request.pool is not None or any(change is None for _, change in planned.edits):
            with contextlib.suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=request.pool or _POOL, type=request.kind or _KIND))
        if request.gpu_slots is not None:
            client.upsert_global_concurrency_limit_by_name(GPU_SLOTS, request.gpu_slots)
        for entry, change in planned.edits:
            if change is None:
                _make(entry, request, planned.schedule)
            else:
                change.apply(client)
        return listed(client, [_full_name(entry, request) for entry, _ in planned.edits])


def workers(rows: Sequence[Listed]) -> list[str]:
    """Return the worker commands that execute deployments, one per pool; a worker finds the type of its pool."""
    pools = {row.pool for row in rows} - {UNKNOWN}
    return [shlex.join(["flowmill", "worker", "--pool", pool]) for pool in sorted(pools)]


def pool_type(pool: str, kind: str | None) -> str:
    """Return the type of a pool, which is the requested one or 'process' if the pool does not exist yet."""
    _check_name("--pool", pool)
    with named_server() as client:
        return _pool_type(client, pool, kind)


def every_deployment() -> list[Listed]:
    """Return all deployments of flowmill's flows on the server."""
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


def _deployed(client: SyncPrefectClient, entry: Mapping[str, Any], request: DeployRequest) -> Deployed | None:
    name = _full_name(entry, request)
    try:
        return Deployed(name=name, there=client.read_deployment_by_name(name), entry=entry)
    except ObjectNotFound:
        return None


def _subjects(entries: Sequence[Entry], request: DeployRequest) -> list[Subject]:
    return [
        Subject(
            usual=entry["parameters"]["request"],
            there=None if there is None else there.parameters,
            requested=taken(entry, request.parameters),
            defaults=taken(entry, request.defaults),
            moved=there is not None and there.new_folder(request) is not None,
        )
        for entry, there in entries
    ]


def _with_config(candidates: Sequence[Entry], request: DeployRequest) -> tuple[list[Entry], list[str]]:
    """Return the entries to deploy, and the names of new ones whose default config belongs to another run."""
    run = request.parameters.get("run") or request.defaults.get("run")
    remaining, left_out = [], []
    for entry, there in candidates:
        config = entry["parameters"]["request"].get("config")
        foreign = config is not None and "config" not in request.parameters and run not in (None, config)
        if foreign and there is None and not request.only:
            left_out.append(_full_name(entry, request))
        else:
            remaining.append((entry, there))
    return remaining, left_out


def _slots(client: SyncPrefectClient, request: DeployRequest) -> list[Change]:
    if request.gpu_slots is None:
        return []
    try:
        before = client.read_global_concurrency_limit_by_name(GPU_SLOTS).limit
    except ObjectNotFound:
        return []
    after = request.gpu_slots
    return [] if before == after else [Change("limit", GPU_SLOTS, str(before), str(after), asks=True)]


def _pool_type(client: SyncPrefectClient, pool: str, kind: str | None) -> str:
    """Return the type of the pool; refuse a requested type that differs from an existing pool's."""
    try:
        work_pool = client.read_work_pool(pool)
    except ObjectNotFound:
        return kind or _KIND
    if kind not in (None, work_pool.type):
        raise ConfigError(
            f"Work pool '{pool}' is of type '{work_pool.type}', not '{kind}'. Name another with --pool, or leave out "
            "--type."
        )
    return work_pool.type


def _make(entry: Mapping[str, Any], request: DeployRequest, schedule: Rule | None) -> None:
    """Create a deployment. Prefect's own deploy resets the settings of an existing one."""
    values = taken(entry, {**request.defaults, **request.parameters})
    parameters = {**entry["parameters"]["request"], **values}
    usual = [
        Cron(each["cron"], each["timezone"], active=each["active"], slug=each["slug"])
        for each in entry.get("schedules", ())
    ]
    deployment = RunnerDeployment.from_entrypoint(
        entry["entrypoint"],
        name=request.name or entry["name"],
        description=entry["description"],
        tags=tags(parameters),
        parameters={"request": parameters},
        concurrency_limit=ConcurrencyLimitConfig.model_validate(entry["concurrency_limit"]),
        job_variables=dict(entry["work_pool"]["job_variables"]),
        schedules=[DeploymentScheduleCreate(schedule=schedule, slug=SLUG)] if schedule else usual,
    )
    # Otherwise a worker would copy its whole working directory, including the store, for every flow run.
    deployment.storage = LocalStorage(request.folder or IN_CONTAINERS)
    try:
        deployment.apply(work_pool_name=request.pool or _POOL, image=request.image)
    except DeploymentApplyError as error:
        # The server's error, of which ``named_server`` makes a message.
        raise error.__cause__ or error from None


def _check_used(request: DeployRequest, entries: Sequence[Mapping[str, Any]]) -> None:
    """Check that at least one deployment takes each option."""
    for name in request.parameters:
        if not any(name in request_fields(entry) for entry in entries):
            raise ConfigError(f"--{name} is for none of the deployments {', '.join(each['name'] for each in entries)}.")
    if request.schedule is not None and not request.only:
        raise ConfigError("--schedule is for deployments named with --only: all at once would block each other.")
    if request.timezone is not None and request.schedule is None:
        raise ConfigError("--timezone is of a schedule: give --schedule too.")
    for option, given in (("--name", request.name), ("--pool", request.pool)):
        if given is not None:
            _check_name(option, given)


def _check_name(option: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{option} '{name[:_LONGEST]}' is no name for Prefect: it has up to {_LONGEST} characters, none of them "
            "/ % & < > or a line break."
        )
