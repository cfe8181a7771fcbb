"""Lists deployments with their run, config, schedule and next start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse

from configs.errors import ConfigError
from configs.load import load_config
from flows.schedule_parser import next_start, schedule_text

#: Prefixes of the tags that flowmill sets; all other tags are the user's.
OWN_TAGS = ("run:", "config:")
#: Shown in place of a missing value.
UNKNOWN = "-"
_PAGE = 100
_MODULE = "flows."
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


def listed(client: SyncPrefectClient, names: Sequence[str] | None) -> list[Listed]:
    """Return the named deployments, or all deployments of flowmill's flows when ``names`` is None."""
    if names is not None:
        return [_row(name, client.read_deployment_by_name(name)) for name in names]
    found: list[DeploymentResponse] = []
    while len(page := client.read_deployments(limit=_PAGE, offset=len(found))) == _PAGE:
        found += page
    own = [each for each in [*found, *page] if (each.entrypoint or "").startswith(_MODULE)]
    flows = {each.flow_id: "" for each in own}
    for flow in flows:
        flows[flow] = client.read_flow(flow).name
    return sorted((_row(f"{flows[each.flow_id]}/{each.name}", each) for each in own), key=lambda row: row.name)


def tags(asked: Mapping[str, Any]) -> list[str]:
    """Return tags with the run and config of a deployment, for searches in Prefect's UI."""
    found = {"run:": _run(asked), "config:": asked.get("config")}
    return [f"{key}{value}" for key, value in found.items() if value]


def requested(there: DeploymentResponse) -> Mapping[str, Any]:
    """Return the request parameters of a deployment's flow."""
    found = (there.parameters or {}).get("request")
    return found if isinstance(found, dict) else {}


def shown_schedule(schedule: DeploymentSchedule) -> str:
    """Return a schedule as a text; '(off)' follows an inactive one."""
    return schedule_text(schedule.schedule) + ("" if schedule.active else " (off)")


def _run(asked: Mapping[str, Any]) -> str:
    """Return the name of a deployment's run, as far as it is known on this machine."""
    named = asked.get("run") or asked.get("name")
    config = asked.get("config")
    if named or not config:
        return str(named or "")
    try:
        return str(load_config(config, asked.get("overrides") or ()).run.name)
    # Only the worker can read this config.
    except (ConfigError, OSError):
        return Path(config).stem


def _row(name: str, there: DeploymentResponse) -> Listed:
    asked = requested(there)
    return Listed(
        name=name,
        run=_run(asked) or UNKNOWN,
        config=str(asked.get("config") or UNKNOWN),
        schedule="; ".join(map(shown_schedule, there.schedules)) or UNKNOWN,
        next_start="paused" if there.paused else _next(there.schedules),
        pool=there.work_pool_name or UNKNOWN,
    )


def _next(schedules: Sequence[DeploymentSchedule]) -> str:
    due = next_start(*(each.schedule for each in schedules if each.active))
    return UNKNOWN if due is None else due.strftime(_MINUTE)
