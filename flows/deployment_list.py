"""Lists deployments with their run, config, schedule and next start."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.flows.schedule_parser import next_start, schedule_text

#: Prefixes of the tags that flowmill sets; all other tags are the user's.
OWN_TAGS = ("run:", "config:")
#: Shown in place of a missing value.
UNKNOWN = "-"
#: Follows an inactive schedule.
OFF = " (off)"
_PAGE = 100
_MODULE = "flowmill.flows."
#: Modules of flows before all code was named flowmill; other projects have a package of this name, too.
_OLD_MODULES = ("flows.pipeline.", "flows.stages.")
_MINUTE = "%Y-%m-%d %H:%M %Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One deployment."""

    name: str
    """As 'flow/deployment'."""
    run: str
    config: str
    schedule: str
    """All schedules; '(off)' follows an inactive one."""
    next_start: str
    pool: str
    again: str
    """The command that deploys it again, if its flow has another name by now and cannot start; else empty."""


def listed(client: SyncPrefectClient, names: Sequence[str] | None) -> list[Listed]:
    """Return the named deployments, or all deployments of flowmill's flows when ``names`` is None."""
    if names is not None:
        return [_row(name, client.read_deployment_by_name(name)) for name in names]
    deployments: list[DeploymentResponse] = []
    while len(page := client.read_deployments(limit=_PAGE, offset=len(deployments))) == _PAGE:
        deployments += page
    own = [each for each in [*deployments, *page] if (each.entrypoint or "").startswith((_MODULE, *_OLD_MODULES))]
    flows = {each.flow_id: "" for each in own}
    for flow in flows:
        flows[flow] = client.read_flow(flow).name
    return sorted((_row(f"{flows[each.flow_id]}/{each.name}", each) for each in own), key=lambda row: row.name)


def tags(parameters: Mapping[str, Any]) -> list[str]:
    """Return tags with the run and config of a deployment, for searches in Prefect's UI."""
    values = {"run:": _run(parameters), "config:": parameters.get("config")}
    return [f"{key}{value}" for key, value in values.items() if value]


def requested(there: DeploymentResponse) -> Mapping[str, Any]:
    """Return the request parameters of a deployment's flow."""
    parameters = (there.parameters or {}).get("request")
    return parameters if isinstance(parameters, dict) else {}


def shown_schedule(schedule: DeploymentSchedule) -> str:
    """Return a schedule as a text; '(off)' follows an inactive one."""
    return schedule_text(schedule.schedule) + ("" if schedule.active else OFF)


def _run(parameters: Mapping[str, Any]) -> str:
    """Return the name of a deployment's run, as far as this machine can tell."""
    named = parameters.get("run") or parameters.get("name")
    config = parameters.get("config")
    if named or not config:
        return str(named or "")
    try:
        return str(load_config(config, parameters.get("overrides") or ()).run.name)
    # Only the worker can read this config.
    except (ConfigError, OSError):
        return Path(config).stem


def redeploy_notes(rows: Sequence[Listed]) -> list[str]:
    """Return a line for every deployment that cannot start before it is deployed again."""
    return [
        f"{row.name} cannot start: an earlier flowmill deployed it, whose flows had other names. Deploy it again: "
        f"{row.again}"
        for row in rows
        if row.again
    ]


def _row(name: str, there: DeploymentResponse) -> Listed:
    parameters = requested(there)
    old = (there.entrypoint or "").startswith(_OLD_MODULES)
    command = ["flowmill", "deploy", "--only", name.partition("/")[0], "--name", there.name]
    return Listed(
        name=name,
        run=_run(parameters) or UNKNOWN,
        config=str(parameters.get("config") or UNKNOWN),
        schedule="; ".join(map(shown_schedule, there.schedules)) or UNKNOWN,
        next_start="paused" if there.paused else _next(there.schedules),
        pool=there.work_pool_name or UNKNOWN,
        again=shlex.join(command) if old else "",
    )


def _next(schedules: Sequence[DeploymentSchedule]) -> str:
    due = next_start(*(each.schedule for each in schedules if each.active))
    return UNKNOWN if due is None else due.strftime(_MINUTE)
