"""Deploying leaves alone what it was not asked to change, on a real server: whatever a person set there is theirs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.deployments.runner import RunnerDeployment
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flowmill.configs.errors import ConfigError, PromptError, StoreError
from flowmill.configs.load import load_config
from flowmill.flows.cli import app
from flowmill.flows.cli.deploy import deploy, list_deployments
from flowmill.flows.deployments import DeployRequest, apply_plan, every_deployment, plan, pool_type
from flowmill.flows.requests import GPU_SLOTS, ContinueRequest
from flowmill.flows.schedule_parser import read_schedule, schedule_text
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.specs.stages import STAGES
from tests.conftest import FlowmillCommand

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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to deploy in, whose store holds the run 'small'."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWMILL_ROOT", raising=False)
    add_run(tmp_path / "flowmill-store", "small")
    return tmp_path


def add_run(root: Path, name: str) -> None:
    """Begin a run in a store, as far as that can be seen."""
    store = ArtifactStore(str(root))
    config = load_config("digits", [f"run.name={name}"]).model_dump(mode="json")
    assert RunFolder(store, name).create({"config": config})


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
    apply_plan(plan(request(name, config="digits", advance=1, schedule="0 2 * * *")))
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
            work_pool_name="flowmill",
            work_queue_name="large",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": "/"}}, {"prefect.mine": {}}],
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
    more = [
        DeploymentScheduleCreate(schedule=read_schedule("every 6 h", "UTC"), slug="mine"),
        DeploymentScheduleCreate(schedule=read_schedule("every 5 h", "UTC")),
    ]
    client.create_deployment_schedules(made.id, more)
    return there(client, name)


def test_what_was_set_by_hand_stays(client: SyncPrefectClient, name: str, by_hand: dict[str, Any]) -> None:
    assert by_hand["description"] == "mine"
    assert len(by_hand["schedules"]) == 3
    for asked in (request(name), request(name, config="digits")):
        planned = plan(asked)
        assert [*planned.changes] == []
        apply_plan(planned)
        assert there(client, name) == by_hand


def test_what_a_command_names_is_asked_about_and_changes_alone(
    client: SyncPrefectClient, name: str, by_hand: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = request(name, advance=1, schedule="0 3 * * *")
    with pytest.raises(ConfigError, match="nothing is changed yet") as refused:
        deploy(asked, sure=False)
    assert f"pipeline/{name}: advance 3 -> 1" in str(refused.value)
    assert f"pipeline/{name}: schedule 30 4 * * * UTC (off) -> 0 3 * * * UTC (off)" in str(refused.value)
    assert there(client, name) == by_hand
    deploy(asked, sure=True)
    assert "advance 3 -> 1" in capsys.readouterr().out
    now = there(client, name)
    changed = {key for key in now if now[key] != by_hand[key]}
    assert changed == {"parameters", "schedules", "tags"}
    assert now["tags"] == ["team:signs", "run:digits", "config:digits"]
    before = by_hand["parameters"]["request"]
    assert now["parameters"]["request"] == {**before, "advance": 1}
    rules = client.read_deployment_by_name(f"pipeline/{name}").schedules
    assert {(schedule_text(each.schedule), each.active) for each in rules} == {
        ("0 3 * * * UTC", False),
        ("every 6 h", True),
        ("every 5 h", True),
    }
    again = plan(asked)
    assert [*again.changes] == []
    apply_plan(again)
    assert there(client, name) == now


def test_deployments_of_one_flow_live_side_by_side_and_are_listed(
    client: SyncPrefectClient, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = name, f"{name} b"
    apply_plan(plan(request(first, config="digits", schedule="0 2 * * *")))
    before = there(client, first)
    apply_plan(plan(request(second, config="digits_crd", schedule="0 3 * * *")))
    assert there(client, first) == before
    rows = {row.name: row for row in every_deployment()}
    for which, config, hour in ((first, "digits", 2), (second, "digits_crd", 3)):
        row = rows[f"pipeline/{which}"]
        assert (row.run, row.config, row.schedule) == (config, config, f"0 {hour} * * * UTC")
        assert f" 0{hour}:00 UTC" in row.next_start
        assert {f"run:{config}", f"config:{config}"} <= set(there(client, which)["tags"])
    list_deployments()
    shown = capsys.readouterr().out
    assert all(word in shown for word in (first, second, "digits_crd", "next start"))


@pytest.mark.parametrize("entrypoint", ["flows.pipeline.pipeline", "flows.etl.pipeline"])
def test_a_deployment_of_before_is_listed_with_the_command_that_makes_it_run(
    entrypoint: str, client: SyncPrefectClient, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its flow has another name by now; a package ``flows`` of others is theirs."""
    apply_plan(plan(request(name, config="digits", schedule="0 2 * * *")))
    asked = client.read_deployment_by_name(f"pipeline/{name}").parameters
    made = RunnerDeployment(name=name, flow_name="pipeline", entrypoint=entrypoint, parameters=asked)
    made.apply(work_pool_name="flowmill")
    list_deployments()
    shown = capsys.readouterr().out
    if "etl" in entrypoint:
        assert name not in shown
        return
    again = f"flowmill deploy --only pipeline --name '{name}'"
    assert f"pipeline/{name} cannot start: an earlier flowmill deployed it" in shown.replace("\n", " ")
    assert again in shown.replace("\n", " ")
    deploy(request(name), sure=True)
    assert client.read_deployment_by_name(f"pipeline/{name}").entrypoint == "flowmill.flows.pipeline.pipeline"
    capsys.readouterr()
    list_deployments()
    assert again not in capsys.readouterr().out.replace("\n", " ")


def test_the_command_that_goes_on_names_the_deployment_it_is_of(client: SyncPrefectClient, name: str) -> None:
    apply_plan(plan(request(name, "continue", run="small")))
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
    deploy(DeployRequest(only=["score"], name=name, parameters={"run": "theirs"}, pool=pool, kind="docker"), sure=True)
    deploy(request(name, "score", run="small"), sure=True)
    assert capsys.readouterr().out.count(f"run the worker: flowmill worker --pool {pool}\n") == 2
    assert pool_type(pool, None) == "docker"
    deploy(DeployRequest(only=["judge"], name=name, parameters={"run": "theirs"}, pool=pool), sure=True)
    for flow in ("score", "judge"):
        (step,) = there(client, name, flow)["pull_steps"]
        assert [*step.values()] == [{"directory": "/"}]


def test_a_deployment_moves_to_the_folder_of_a_command_that_names_its_subject_or_another_pool(
    client: SyncPrefectClient, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after(asked: DeployRequest) -> str:
        apply_plan(plan(asked))
        (step,) = there(client, name, "score")["pull_steps"]
        return str(step["prefect.deployments.steps.set_working_directory"]["directory"])

    pool = name.replace(" ", "-")
    asked = DeployRequest(only=["score"], name=name)
    assert after(request(name, "score", run="small")) == str(folder)
    (other := folder / "other").mkdir()
    monkeypatch.chdir(other)
    assert after(request(name, "score", schedule="every 6 h")) == str(folder)
    assert after(asked.model_copy(update={"pool": "flowmill"})) == str(folder)
    with pytest.raises(StoreError, match=r"no store at .*other"):
        plan(asked.model_copy(update={"pool": pool}))
    add_run(other / "flowmill-store", "small")
    assert after(asked.model_copy(update={"pool": pool})) == str(other)
    monkeypatch.chdir(folder)
    assert after(request(name, "score", run="small")) == str(folder)
    assert after(asked.model_copy(update={"pool": f"{pool}-boxes", "kind": "docker"})) == "/"
    assert after(request(name, "score", run="small")) == "/"
    assert after(asked.model_copy(update={"pool": pool})) == str(folder)


def test_a_pool_of_a_type_that_flowmill_makes_none_of_is_used_as_it_is(
    name: str, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = name.replace(" ", "-")
    client.create_work_pool(WorkPoolCreate(name=pool, type="ecs"))
    asked = DeployRequest(only=["score"], name=name, parameters={"run": "theirs"}, pool=pool, image="registry/mine:1")
    deploy(asked, sure=True)
    assert f"run the worker: flowmill worker --pool {pool}\n" in capsys.readouterr().out
    assert pool_type(pool, None) == "ecs"
    with pytest.raises(ConfigError, match=r"is of type 'ecs', not 'docker'\..*leave out --type"):
        pool_type(pool, "docker")


def test_a_pool_that_the_server_refuses_is_a_message(name: str, client: SyncPrefectClient) -> None:
    refused = DeployRequest(only=["score"], name=name, parameters={"run": "small"}, pool="prefect-mine")
    with pytest.raises(ConfigError, match=r"refuses POST /api/work_pools/ \(403\): .*reserved"):
        deploy(refused, sure=True)
    with pytest.raises(ConfigError, match="--pool 'team/gpu' is no name"):
        pool_type("team/gpu", None)


def test_the_gpus_that_flow_runs_share_are_set_alone(client: SyncPrefectClient, name: str) -> None:
    for count in ("3", "2"):
        done = CliRunner().invoke(app, ["deploy", "--gpu-slots", count, "--yes"])
        assert f"All flow runs share {count} GPUs." in done.stdout
    try:
        assert client.read_global_concurrency_limit_by_name(GPU_SLOTS).limit == 2
        changed = CliRunner().invoke(app, ["deploy", "--gpu-slots", "4"])
        assert str(changed.exception).endswith("limit: flowmill-gpu 2 -> 4. Give --yes to replace them.")
        other = CliRunner().invoke(app, ["deploy", "--gpu-slots", "4", "--pool", "mine"])
        assert "Say which deployments" in str(other.exception)
    finally:
        client.delete_global_concurrency_limit_by_name(GPU_SLOTS)


def test_a_refused_deployment_is_a_message(name: str, client: SyncPrefectClient) -> None:
    pool = name.replace(" ", "-")
    template = {
        "job_configuration": {"env": "{{ env }}"},
        "variables": {"type": "object", "properties": {"env": {"type": "string"}}},
    }
    client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
    with pytest.raises(ConfigError, match=r"refuses POST .*422.*field 'env'"):
        deploy(DeployRequest(only=["score"], name=name, parameters={"run": "small"}, pool=pool), sure=True)


def asked_of(client: SyncPrefectClient, name: str, flow: str) -> dict[str, Any]:
    found: dict[str, Any] = client.read_deployment_by_name(f"{flow}/{name}").parameters["request"]
    return found


def deployed(client: SyncPrefectClient, name: str) -> set[str]:
    """Return the flows with a deployment of a name."""
    return {each.name.partition("/")[0] for each in every_deployment() if each.name.endswith(f"/{name}")}


#: Configs that cannot be deployed, and what is said.
CONFIGS: dict[str, tuple[str | None, str]] = {
    "not there": (None, "config.yaml"),
    "no YAML": ("run: {", "config.yaml"),
    "no settings": ("- 3", "config.yaml"),
    "an unknown setting": ("run: {epoch: 3}", "epoch"),
    "what check refuses": (load_config("digits", ["rollout.sampler.name=ode"]).to_yaml(), "'ode'"),
    "prompts that are not there": (load_config("digits", ["prompts.train=nosuch.txt"]).to_yaml(), "nosuch.txt"),
}


@pytest.mark.parametrize(("label", "only"), [*((label, ("pipeline",)) for label in CONFIGS), ("not there", ())])
def test_a_config_that_cannot_run_is_not_deployed(
    label: str, only: tuple[str, ...], client: SyncPrefectClient, name: str, folder: Path
) -> None:
    text, said = CONFIGS[label]
    if text is not None:
        (folder / "config.yaml").write_text(text)
    with pytest.raises((ConfigError, PromptError), match=said):
        deploy(DeployRequest(only=only, name=name, parameters={"config": "config.yaml"}), sure=True)
    assert deployed(client, name) == set()


@pytest.mark.parametrize(
    ("only", "given", "said"),
    [
        (("evaluate",), {"run": "nosuch"}, "There is no run 'nosuch'"),
        (("continue", "score"), {"run": "smal"}, "Did you mean 'small'"),
        ((), {"run": "small", "root": "elsewhere"}, "no store at .*elsewhere"),
    ],
)
def test_a_run_that_is_not_there_is_not_deployed(
    only: tuple[str, ...], given: dict[str, str], said: str, client: SyncPrefectClient, name: str
) -> None:
    with pytest.raises(StoreError, match=said):
        deploy(DeployRequest(only=only, name=name, parameters=given), sure=True)
    assert deployed(client, name) == set()


def test_a_deployment_that_is_there_is_not_moved_to_a_run_that_is_not(client: SyncPrefectClient, name: str) -> None:
    apply_plan(plan(request(name, "score", run="small")))
    before = there(client, name, "score")
    for given in ({"run": "nosuch"}, {"root": "elsewhere"}):
        with pytest.raises(StoreError):
            plan(request(name, "score", **given))
    # What names nothing of it looks at nothing.
    apply_plan(plan(request(name, "score", schedule="every 6 h")))
    assert there(client, name, "score")["parameters"] == before["parameters"]


def test_all_deployments_are_for_the_only_run(
    client: SyncPrefectClient, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy(DeployRequest(name=name, parameters={}), sure=True)
    assert f"pipeline/{name} is left out: it trains from a config" in capsys.readouterr().out
    flows = deployed(client, name)
    assert flows == {*STAGES, "continue"}
    assert {asked_of(client, name, flow)["run"] for flow in flows} == {"small"}


def test_all_deployments_of_a_config_are_for_its_run(client: SyncPrefectClient, name: str, folder: Path) -> None:
    """Whatever else the store holds: the first flow run of the pipeline begins it."""
    add_run(folder / "flowmill-store", "other")
    given = {"config": "digits_crd"}
    planned = {entry["name"] for entry, _ in plan(DeployRequest(name=name, parameters=given)).edits}
    assert planned == {*STAGES, "continue", "pipeline"}
    deploy(DeployRequest(only=["pipeline", "continue", "score"], name=name, parameters=given), sure=True)
    assert asked_of(client, name, "pipeline")["config"] == "digits_crd"
    assert {asked_of(client, name, flow)["run"] for flow in ("continue", "score")} == {"digits_crd"}


def test_where_a_store_holds_no_run_or_several_one_is_asked_for(
    client: SyncPrefectClient, name: str, folder: Path
) -> None:
    add_run(folder / "flowmill-store", "other")
    for only in ((), ("rollout",)):
        with pytest.raises(ConfigError, match=r"holds 2 runs: other, small. Say with --run"):
            deploy(DeployRequest(only=only, name=name, parameters={}), sure=True)
    (folder / "empty" / "runs").mkdir(parents=True)
    with pytest.raises(ConfigError, match="empty' holds no run"):
        deploy(DeployRequest(name=name, parameters={"root": "empty"}), sure=True)
    with pytest.raises(StoreError, match=r"no store at .*nowhere"):
        deploy(DeployRequest(name=name, parameters={"root": "nowhere"}), sure=True)
    assert deployed(client, name) == set()
    deploy(DeployRequest(only=["rollout"], name=name, parameters={"run": "other"}), sure=True)
    assert {asked_of(client, name, flow)["run"] for flow in deployed(client, name)} == {"other"}


def test_what_containers_read_is_taken_as_it_is(client: SyncPrefectClient, name: str) -> None:
    """A path in an image is no path here; a preset is the same everywhere."""
    pool = {"pool": name.replace(" ", "-"), "kind": "docker"}
    given = {"config": "/in/the/image.yaml", "run": "theirs"}
    deploy(DeployRequest(only=["pipeline", "score"], name=name, parameters=given, **pool), sure=True)
    assert asked_of(client, name, "pipeline")["config"] == "/in/the/image.yaml"
    with pytest.raises(ConfigError, match="Say with --run"):
        plan(DeployRequest(only=["score"], name=f"{name} b", parameters={}, **pool))
    with pytest.raises(ConfigError, match=r"run\.epochs"):
        plan(
            DeployRequest(
                only=["pipeline"], name=name, parameters={"config": "digits", "overrides": ["run.epochs=x"]}, **pool
            )
        )


@pytest.mark.parametrize(
    "given",
    [
        ["--only", "pipeline", "--config", "nope.yaml"],
        ["--only", "score", "--run", "nosuch"],
        ["--all", "--run", "nosuch"],
    ],
)
def test_the_command_ends_with_one_message(given: list[str], flowmill: FlowmillCommand, folder: Path) -> None:
    done = flowmill("deploy", *given, "--yes", "--name", "never", "--root", str(folder / "flowmill-store"))
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if given[-1] in line]
    assert "Traceback" not in done.stderr
