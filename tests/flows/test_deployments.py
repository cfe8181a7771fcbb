"""Deploying leaves alone what it was not told to change, on a real server: whatever a person set there is theirs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.settings import PREFECT_API_URL, temporary_settings

from configs.errors import ConfigError
from flows.cli.deploy import deploy_command, list_command
from flows.deployments import DeployRequest, carry_out, every_deployment, plan
from flows.requests import ContinueRequest
from flows.schedule_parser import read_schedule, told

pytestmark = pytest.mark.slow

#: What the server itself keeps up to date, and what `deploy` says of its own code.
_SERVERS = {"updated", "last_polled", "status", "parameter_openapi_schema", "entrypoint", "next_scheduled_run"}


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: prefect_server}), get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def name() -> str:
    """Other tests deploy to the same server."""
    return f"night {uuid4().hex[:6]}"


def request(name: str, *only: str, schedule: str | None = None, **given: Any) -> DeployRequest:
    return DeployRequest(only=only or ("pipeline",), name=name, parameters=given, schedule=schedule)


def there(client: SyncPrefectClient, name: str, flow: str = "pipeline") -> dict[str, Any]:
    """Return everything the server has of a deployment."""
    found = client.read_deployment_by_name(f"{flow}/{name}").model_dump(mode="json")
    for schedule in found["schedules"]:
        schedule.pop("updated")
    return {key: value for key, value in found.items() if key not in _SERVERS}


@pytest.fixture
def by_hand(client: SyncPrefectClient, name: str) -> dict[str, Any]:
    """A deployment of which a person has changed all that can be, and what the server has of it."""
    carry_out(plan(request(name, config="digits", advance=1, schedule="0 2 * * *")))
    made = client.read_deployment_by_name(f"pipeline/{name}")
    asked = {**made.parameters["request"], "advance": 3, "overrides": ["run.seed=7"], "gpu_slots": 1}
    client.update_deployment(
        made.id,
        DeploymentUpdate(
            description="mine",
            tags=["team:signs", "run:digits"],
            parameters={"request": asked},
            paused=True,
            version="7",
            work_queue_name="large",
            job_variables={"env": {"MINE": "1"}},
            enforce_parameter_schema=False,
            concurrency_limit=3,
            concurrency_options=ConcurrencyLimitConfig(limit=3, collision_strategy="CANCEL_NEW").model_dump(
                exclude={"limit"}
            ),
        ),
    )
    (own,) = made.schedules
    client.update_deployment_schedule(made.id, own.id, active=False, schedule=read_schedule("30 4 * * *", "UTC"))
    more = DeploymentScheduleCreate(schedule=read_schedule("every 6 h", "UTC"), slug="mine")
    client.create_deployment_schedules(made.id, [more])
    return there(client, name)


def test_what_was_set_by_hand_stays(client: SyncPrefectClient, name: str, by_hand: dict[str, Any]) -> None:
    assert by_hand["description"] == "mine"
    assert len(by_hand["schedules"]) == 2
    for asked in (request(name), request(name, config="digits")):
        planned = plan(asked)
        assert [*planned.changes] == []
        carry_out(planned)
        assert there(client, name) == by_hand


def test_what_a_command_names_is_asked_about_and_changes_alone(
    client: SyncPrefectClient, name: str, by_hand: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = request(name, advance=1, schedule="0 3 * * *")
    with pytest.raises(ConfigError, match="nothing is changed yet") as refused:
        deploy_command(asked, sure=False)
    assert f"pipeline/{name}: advance 3 -> 1" in str(refused.value)
    assert f"pipeline/{name}: schedule 30 4 * * * UTC (off) -> 0 3 * * * UTC" in str(refused.value)
    assert there(client, name) == by_hand
    deploy_command(asked, sure=True)
    assert "advance 3 -> 1" in capsys.readouterr().out
    now = there(client, name)
    changed = {key for key in now if now[key] != by_hand[key]}
    assert changed == {"parameters", "schedules", "tags"}
    assert now["tags"] == ["team:signs", "run:digits", "config:digits"]
    before = by_hand["parameters"]["request"]
    assert now["parameters"]["request"] == {**before, "advance": 1}
    rules = client.read_deployment_by_name(f"pipeline/{name}").schedules
    assert {(told(each.schedule), each.active) for each in rules} == {("0 3 * * * UTC", True), ("every 6 h", True)}


def test_deployments_of_one_flow_live_side_by_side_and_are_listed(
    client: SyncPrefectClient, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = name, f"{name} b"
    carry_out(plan(request(first, config="digits", schedule="0 2 * * *")))
    before = there(client, first)
    carry_out(plan(request(second, config="digits_crd", schedule="0 3 * * *")))
    assert there(client, first) == before
    rows = {row.name: row for row in every_deployment()}
    for which, config, hour in ((first, "digits", 2), (second, "digits_crd", 3)):
        row = rows[f"pipeline/{which}"]
        assert (row.run, row.config, row.schedule) == (config, config, f"0 {hour} * * * UTC")
        assert f" 0{hour}:00 UTC" in row.next_start
        assert {f"run:{config}", f"config:{config}"} <= set(there(client, which)["tags"])
    list_command()
    shown = capsys.readouterr().out
    assert all(word in shown for word in (first, second, "digits_crd", "next start"))


def test_the_command_that_goes_on_names_the_deployment_it_is_of(client: SyncPrefectClient, name: str) -> None:
    carry_out(plan(request(name, "continue", run="small")))
    asked = ContinueRequest(run="it's", advance=2)
    *words, full_name, _, parameters = shlex.split(asked.command("continue", name))
    assert words == ["prefect", "deployment", "run"]
    assert client.read_deployment_by_name(full_name).name == name
    key, _, value = parameters.partition("=")
    made = client.create_flow_run_from_deployment(
        client.read_deployment_by_name(full_name).id, parameters={key: json.loads(value)}
    )
    assert ContinueRequest.model_validate(made.parameters["request"]) == asked
    client.delete_flow_run(made.id)
    assert shlex.split(asked.command("continue"))[3] == "continue/continue"


def test_a_pool_of_containers_is_worked_on_by_a_worker_of_its_type(
    name: str, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = name.replace(" ", "-")
    deploy_command(DeployRequest(only=["score"], name=name, parameters={}, pool=pool, kind="docker"), sure=True)
    deploy_command(request(name, "score", run="small"), sure=True)
    assert capsys.readouterr().out.count(f"flowmill worker --pool {pool} --type docker") == 2
