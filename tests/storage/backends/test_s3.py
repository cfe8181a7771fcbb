"""Whole runs on S3: the same digest as on disk, with any fault of server and network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import s3fs

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.storage.maintenance.verify import verify_store
from flowmill.tasks.runs.opening import open_run
from tests.conftest import ROOT, ConfigFactory, FlowmillCommand
from tests.support.inside import evaluate, prepare, run_epoch
from tests.support.s3 import Faults, Server, make_bucket, unreliable, use


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    use(monkeypatch, {**s3_server.variables(), "XDG_CACHE_HOME": str(tmp_path / "xdg")})
    return make_bucket()


def train(make_config: ConfigFactory, root: str, *overrides: str) -> str:
    """Train two epochs in this process and return the run's digest."""
    context = prepare(make_config(f"store.root={root}", *overrides))
    for epoch in (1, 2):
        run_epoch(context, epoch)
        evaluate(context, epoch)
    assert verify_store(context.store, deep=True)["problems"] == []
    return context.chain.digest()


@pytest.mark.campaign_cases("webdataset")
@pytest.mark.slow
@pytest.mark.parametrize("store", ["webdataset", "parquet"])
def test_a_run_on_s3_equals_one_on_disk(make_config: ConfigFactory, bucket: str, tmp_path: Path, store: str) -> None:
    chosen = f"rollout.store={store}"
    on_disk = train(make_config, str(tmp_path / "store"), chosen)
    assert train(make_config, f"s3://{bucket}/x", chosen) == on_disk


@pytest.mark.campaign
def test_a_run_survives_faults_on_every_operation(
    make_config: ConfigFactory, bucket: str, tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(make_config, str(tmp_path / "store"))
    faults = Faults(0.15, seed=3)
    with unreliable(s3_server, faults) as endpoint:
        use(monkeypatch, s3_server.variables(endpoint))
        s3fs.S3FileSystem.clear_instance_cache()
        assert train(make_config, f"s3://{bucket}/x") == expected
    assert set(faults.counts) == {"503", "reset", "lost", "slow", "truncated"}
    assert sum(faults.counts.values()) > 30


@pytest.mark.campaign
def test_a_run_moves_between_disk_and_s3(make_config: ConfigFactory, bucket: str, tmp_path: Path) -> None:
    expected = train(make_config, str(tmp_path / "store"))
    here, there = ArtifactStore(str(tmp_path / "store")), ArtifactStore(f"s3://{bucket}/x")
    copy_run(here, there, "small", progress=lambda ref, done, total: None)
    back = ArtifactStore(str(tmp_path / "back"))
    copy_run(there, back, "small", progress=lambda ref, done, total: None)
    assert open_run(back.root.uri, "small").chain.digest() == expected
    # Training goes on there, from what lies on S3 only.
    context = open_run(there.root.uri, "small")
    run_epoch(context, 3)
    assert context.chain.find(3, "optimize") is not None


@pytest.mark.campaign
@pytest.mark.slow
def test_an_epoch_takes_at_most_56_requests(
    flowmill: FlowmillCommand, config_file: Path, tmp_path: Path, s3_server: Server, bucket: str
) -> None:
    """Two shards, one reward, no evaluation: what is committed takes 30, and finding that nothing is there the rest."""
    requests = []
    with unreliable(s3_server, faults := Faults(0.0)) as endpoint:
        environment = {**s3_server.variables(endpoint), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        for epochs in (1, 3):
            before = faults.requests
            settings = [f"run.epochs={epochs}", "evaluate.every=9", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}"]
            arguments = [part for setting in settings for part in ("--set", setting)]
            done = flowmill("run", str(config_file), "--root", f"s3://{bucket}/{epochs}", *arguments, **environment)
            assert done.returncode == 0, done.stdout + done.stderr
            requests.append(faults.requests - before)
    assert (requests[1] - requests[0]) / 2 <= 56, requests


@pytest.mark.campaign
@pytest.mark.slow
def test_the_command_line_on_s3(
    bucket: str, flowmill: FlowmillCommand, config_file: Path, tmp_path: Path, s3_server: Server
) -> None:
    secrets = {"FLOWMILL_REWARD_TOKEN": "a-token-of-rewards", "OPENAI_API_KEY": "a-key-of-a-judge"}
    environment = {**s3_server.variables(), **secrets, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    root = f"s3://{bucket}/x"
    tracking = f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}"
    first = flowmill("run", str(config_file), "--root", root, "--set", tracking, **environment)
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"in sqlite:///{tmp_path / 'mlflow.db'}" in first.stdout
    assert "flowmill ui" not in first.stdout, "it serves the store's own database alone"
    again = flowmill("run", str(config_file), "--root", root, "--set", tracking, **environment)
    assert "No model was run" in again.stdout
    reported = {"the console": (first.stdout + first.stderr + again.stdout + again.stderr).encode()}
    for folder in (tmp_path, Path(os.environ["PREFECT_HOME"])):
        # Caches, MLflow's database, Prefect's with the parameters and logs of every flow.
        reported |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    server = s3fs.S3FileSystem(use_listings_cache=False)
    reported |= {name: server.cat_file(name) for name in server.find(bucket)}
    assert any(name.endswith("prefect.db") for name in reported)
    for secret in (*secrets.values(), environment["AWS_SECRET_ACCESS_KEY"]):
        assert [name for name, content in reported.items() if secret.encode() in content] == []
    missing = flowmill("store", "ls", "--root", "s3://flowmill-absent/x", **environment)
    assert missing.returncode == 1
    assert "there is no bucket 'flowmill-absent'" in missing.stderr + missing.stdout
    assert "Traceback" not in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", pytest.param("s3", marks=pytest.mark.campaign)])
def test_killed_writers_lose_nothing(place: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if place == "disk":
        root, pause, variables = str(tmp_path / "store"), "0.15", {}
    else:
        root, pause = f"s3://{request.getfixturevalue('bucket')}/x", "1.2"
        variables = request.getfixturevalue("s3_server").variables()
    # In a process of its own: this one has threads by now, and what is forked from it may be anything.
    command = [sys.executable, "-m", "tools.chaos.writers", "--kills", "12", "--pause", pause, "--root", root]
    environment = {**os.environ, **variables, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 kills" in done.stdout
