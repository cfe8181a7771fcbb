"""Prefect for real: the server imports, and a scheduled deployment is carried out by a worker."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flowmill.configs.schema import RunConfig
from flowmill.tasks.runs.opening import begin_run, open_run
from tests.conftest import ROOT, FlowmillCommand
from tests.support.clusters import prefect_api, prefect_worker, running, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.campaign
def test_the_server_imports_with_the_declared_dependencies() -> None:
    code = "import prefect.server.api.server as s; s.create_app()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_every_flow_is_deployed_with_a_form_for_what_it_takes() -> None:
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    from flowmill.flows.stages import FLOWS

    deployments = yaml.safe_load((ROOT / "flows" / "prefect.yaml").read_text())["deployments"]
    assert {entry["name"] for entry in deployments} == {"pipeline", "continue", *FLOWS}
    for entry in deployments:
        flow = load_flow_from_entrypoint(entry["entrypoint"])
        assert flow.name == entry["name"]
        flow.validate_parameters(entry["parameters"])
        (form,) = parameter_schema(flow).definitions.values()
        assert all(field["description"] and field["title"] for field in form["properties"].values()), form
        assert list(form["properties"])[-2:] == ["wait_minutes", "gpu_slots"]
    (form,) = parameter_schema(FLOWS["score"]).definitions.values()
    assert form["properties"]["epoch"]["anyOf"] == [
        {"type": "integer", "title": "number", "minimum": 0},
        {"type": "string", "title": "by progress", "enum": ["next", "latest"]},
    ]
    assert "pickscore" in form["properties"]["slot"]["anyOf"][0]["enum"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "Say which deployments"),
        (["--all", "--only", "score"], "Say which deployments"),
        (["--list", "--only", "score"], "Say which deployments"),
        (["--list", "--pool", "mine"], "--list shows all deployments, with no other option"),
        (["--list", "--yes"], "--list shows all deployments, with no other option"),
        (["--only", "scores"], "Did you mean 'score'"),
        (["--only", "score", "--advance", "1"], "--advance is for none of the deployments score"),
        (["--only", "pipeline", "--run", "r"], "--run is for none of the deployments pipeline"),
        (["--all", "--schedule", "every 1 h"], "--schedule is for deployments named with --only"),
        (["--only", "score", "--schedule", "hourly"], "--schedule 'hourly' cannot be read"),
        (["--only", "score", "--schedule", "0 2 * * *", "--timezone", "Mars/Olympus"], "cannot be read"),
        (["--only", "score", "--timezone", "Europe/Vienna"], "--timezone is of a schedule: give --schedule too"),
        (["--only", "score", "--image", "i"], "--image is for containers"),
        (["--only", "score", "--pool", "team/gpu"], "--pool 'team/gpu' is no name"),
    ],
)
def test_what_cannot_be_deployed(flowmill: FlowmillCommand, given: list[str], said: str) -> None:
    done = flowmill("deploy", *given)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


@pytest.fixture
def scheduling_server(prefect_home: Path) -> Iterator[dict[str, str]]:
    """A server with its scheduler, and the environment that names it."""
    with running(prefect_api({**os.environ, "PREFECT_HOME": str(prefect_home)})) as server:
        yield dict(server.environment)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_schedule_trains_on_and_catches_up_once(
    scheduling_server: dict[str, str],
    make_config: Callable[..., RunConfig],
    flowmill: FlowmillCommand,
    tmp_path: Path,
) -> None:
    """Each tick that begins trains one epoch more, through a killed worker; those missed are made up for by one.

    They come faster than a process starts: that must not keep any from working.
    """
    config = tmp_path / "small.yaml"
    config.write_text(make_config("evaluate.every=9").to_yaml())
    root = str(make_config().store.root)
    with client_of(scheduling_server["PREFECT_API_URL"]) as client:
        others = {run.id for run in client.read_flow_runs()}
    given = ["--config", str(config), "--root", root, "--advance", "1", "--schedule", "every 4 s"]
    deployed = flowmill("deploy", "--only", "pipeline", *given, **scheduling_server)
    assert "pipeline/pipeline" in deployed.stdout, deployed.stdout + deployed.stderr

    def done() -> int:
        return open_run(root, "small", reads=True).chain.trained() if (Path(root) / "runs" / "small").exists() else 0

    with worker(scheduling_server) as first:
        wait_until(lambda: done() >= 1, 300)
        # A run can be deployed once it is there.
        flowmill("deploy", "--only", "optimize", "--root", root, "--run", "small", **scheduling_server)
        first.kill()
        first.wait()
    # What it had begun goes on or is dead; either way several ticks pass.
    time.sleep(12)
    before = done()
    with (
        client_of(scheduling_server["PREFECT_API_URL"]) as client,
        worker(scheduling_server),
    ):
        mistaken = client.read_deployment_by_name("optimize/optimize").id
        asked = {"request": {"run": "small", "root": root, "epoch": 99, "wait_minutes": 30}}
        failed = client.create_flow_run_from_deployment(mistaken, parameters=asked).id
        # What was killed keeps its deployment's slot until its lease ends.
        wait_until(lambda: done() >= before + 2, 480)
        wait_until(lambda: client.read_flow_run(failed).state.is_final(), 240)
        runs = [run for run in client.read_flow_runs() if run.id not in others]
    states = [run.state.name for run in runs if run.state and run.id != failed]
    (message,) = (run.state.message for run in runs if run.id == failed)
    assert re.search(r"has no optimize for epoch 98: \d of its \d epochs are trained", message)
    assert f"To go on: flowmill stage optimize --run small --root {root} --epoch 99" in message
    assert states.count("Skipped") >= 2, states
    said = [run.state.message for run in runs if run.state and run.state.name == "Failed" and run.id != failed]
    assert said == [], states
    chain = open_run(root, "small", reads=True).chain
    rollouts = [chain.require(epoch, "rollout").artifact for epoch in range(1, 4)]
    assert len(set(rollouts)) == 3


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_shard_that_fails_is_tried_again_and_its_run_goes_on_by_the_command_it_names(
    scheduling_server: dict[str, str],
    make_config: Callable[..., RunConfig],
    flowmill: FlowmillCommand,
    tmp_path: Path,
) -> None:
    note, config = tmp_path / "unreachable", tmp_path / "small.yaml"
    note.touch()
    rewards = f"rewards=[{{name: 'tests.support.rewards:Unreachable', options: {{note: '{note}'}}}}]"
    config.write_text(make_config(rewards, "run.epochs=1", "execution.retries=1").to_yaml())
    root = str(make_config().store.root)
    given = ["--config", str(config), "--root", root]
    deployed = flowmill("deploy", "--only", "pipeline", *given, **scheduling_server)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    with (
        client_of(scheduling_server["PREFECT_API_URL"]) as client,
        worker(scheduling_server),
    ):
        begun = client.create_flow_run_from_deployment(client.read_deployment_by_name("pipeline/pipeline").id).id
        wait_until(lambda: client.read_flow_run(begun).state.is_final(), 300)
        state = client.read_flow_run(begun).state
        wait_until(lambda: "failed" in "".join(each.message for each in client.read_logs()), 30)
        logged = "\n".join(each.message for each in client.read_logs())
    assert state.name == "Failed"
    assert note.read_text().count("lost") >= 2, "it was tried again"
    assert re.search(r"shard 00000\d-00000\d of score", logged), logged
    _, command = state.message.split("To go on: flowmill ")
    before = open_run(root, "small", reads=True).chain.require(1, "rollout").artifact
    note.unlink()
    done = flowmill(*shlex.split(command.splitlines()[0]), **scheduling_server)
    assert done.returncode == 0, done.stderr
    run = open_run(root, "small", reads=True)
    assert (run.chain.trained(), run.chain.require(1, "rollout").artifact) == (1, before)


@pytest.mark.campaign
def test_a_suspicion_pauses_the_deployment_that_trains(
    scheduling_server: dict[str, str],
    flowmill: FlowmillCommand,
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The automations of the docs, on a real server."""
    from flowmill.flows import artifacts

    context = begin_run(make_config())
    root = str(context.config.store.root)
    flowmill("deploy", "--only", "continue", "--run", "small", "--root", root, **scheduling_server)
    create = [sys.executable, "-m", "prefect", "automation", "create", "--from-file"]
    file = str(ROOT / "docs" / "templates" / "automations.yaml")
    made = subprocess.run([*create, file], env=scheduling_server, capture_output=True, text=True, check=False)
    assert "Created 4 automation(s)" in made.stdout, made.stderr
    with client_of(scheduling_server["PREFECT_API_URL"]) as client:
        deployment = client.read_deployment_by_name("continue/continue")
        assert not deployment.paused
        monkeypatch.setattr(artifacts, "deployment", deployment)
        artifacts.announce("suspicion", context.run, monitor="m", epoch=3, text="it fell")
        wait_until(lambda: client.read_deployment_by_name("continue/continue").paused, 60)


def test_what_a_run_shows(
    prefect_server: str, make_config: Callable[..., RunConfig], flowmill: FlowmillCommand, tmp_path: Path
) -> None:
    config = tmp_path / "shown.yaml"
    config.write_text(make_config("run.name=shown").to_yaml())
    done = flowmill("run", str(config))
    assert done.returncode == 0, done.stderr
    with client_of(prefect_server) as client:
        shown = {each.key for each in client.read_latest_artifacts() if (each.key or "").startswith("shown-")}
    assert shown == {"shown-mlflow", "shown-report"}


@contextlib.contextmanager
def client_of(url: str) -> Iterator[SyncPrefectClient]:
    """Give a client of a server, which is that of flows in this process inside."""
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        yield client


@contextlib.contextmanager
def worker(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Give a worker, which ends by SIGTERM."""
    with running(prefect_worker(environment)) as started:
        assert started.process is not None
        yield started.process
        if started.process.poll() is None:
            started.process.terminate()
            started.process.wait(20)
