"""What only a store says is not carried out."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import TrustError
from configs.load import override_config
from flows import runtime
from flows.cli.track import track_command
from flows.requests import PipelineRequest
from tasks.inputs.trust import carried_out, check_trusted, remember
from tasks.runs.opening import begin_run, open_run
from tests.conftest import ROOT, ConfigFactory, FlowmillCommand

OWN = """
import os
from pathlib import Path

Path(os.environ["WITNESS"]).touch()

def brightness(media, prompts, metadata):
    return [float(image.mean()) for image in media]
"""
REWARD = "rewards=[{name: 'own_reward_under_test:brightness', label: bright}]"
READING = (
    ("status",),
    ("status", "small"),
    ("status", "small", "--why", "advantage@1"),
    ("store", "ls"),
    ("store", "verify", "--deep"),
    ("store", "gc"),
    ("store", "export", "small", "EXPORTED"),
    ("store", "cp", "small", "COPIED"),
    ("store", "digest", "small"),
)


@pytest.mark.slow
def test_a_stranger_s_store_is_read_without_running_its_code(
    flowmill: FlowmillCommand, config_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "own_reward_under_test.py").write_text(OWN)
    witness, path = tmp_path / "witness", f"{tmp_path}:{ROOT}"
    here = {"PYTHONPATH": path, "WITNESS": str(witness)}
    elsewhere = {**here, "XDG_STATE_HOME": str(tmp_path / "other-machine")}
    root = ("--root", str(tmp_path / "store"))
    made = flowmill("run", str(config_file), "--set", REWARD, "--set", "run.epochs=1", **here)
    assert made.returncode == 0, made.stderr
    assert witness.exists()
    witness.unlink()
    for command in READING:
        words = [str(tmp_path / word) if word in ("EXPORTED", "COPIED") else word for word in command]
        found = flowmill(*words, *root, **elsewhere)
        assert found.returncode == 0, (command, found.stderr)
        assert not witness.exists(), command
    score = ("stage", "score", "--run", "small", "--epoch", "1", *root)
    refused = flowmill(*score, **elsewhere)
    assert refused.returncode == 1
    assert "rewards.0: own_reward_under_test:brightness" in refused.stderr
    assert "--trust-store" in refused.stderr
    assert "Traceback" not in refused.stderr
    measured = flowmill("benchmark", "digits", "--model", "small@1", *root, "--out", str(tmp_path), **elsewhere)
    assert measured.returncode == 1
    assert "own_reward_under_test:brightness" in measured.stderr
    assert not witness.exists(), "refused before it was imported"
    assert flowmill(*score, "--force", "--trust-store", **elsewhere).returncode == 0
    assert witness.exists()
    assert flowmill(*score, "--force", **elsewhere).returncode == 1, "trusted once is not trusted for good"
    assert flowmill(*score, "--force", **here).returncode == 0, "the config was given on this machine"


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.sampler={name: 'mine:Kernel'}",
        "optimize.algorithm={name: 'mine:Loss'}",
        "monitors=[{name: 'mine:watched'}]",
        "evaluate.judges=[{name: 'mine:judged'}]",
        "model.policy='mine:Family'",
        "execution.launcher={name: agents, options: {endpoint: 'n:1', prefixes: [[touch, x]]}}",
        "execution.runner={name: dask, options: {cluster_class: os.system}}",
        "tracking.uri=sqlite:////tmp/mine:db",
        "rewards=[{name: digits, server: 'http://mine:8600'}]",
    ],
)
def test_what_runs_code_or_commands_must_have_been_given_here(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plain, stored = make_config(), make_config(setting)
    check_trusted(plain, plain, run="small")
    with pytest.raises(TrustError, match=r"no config given on this machine has named:\n  .*(mine:|touch|os\.system)"):
        check_trusted(stored, stored, run="small")
    # Given now, in place of what the store says or beside it.
    check_trusted(plain, stored, run="small")
    remember(stored)
    check_trusted(stored, stored, run="small")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").rglob("trusted")} == {0o700}
    assert len(list(carried_out(stored))) == 1


def test_an_override_replaces_what_a_store_says(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = make_config("monitors=[{name: 'mine:watched'}]")
    begin_run(config)
    root = str(tmp_path / "store")
    with pytest.raises(TrustError, match=r"monitors\.0: mine:watched"):
        open_run(root, "small")
    open_run(root, "small", reads=True)
    open_run(root, "small", overrides=["monitors=[]"])
    open_run(root, "small", trusted=True)
    assert override_config(config, ["monitors=[]"]).monitors == ()


def test_a_config_that_is_run_is_remembered(
    make_config: ConfigFactory, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    given = runtime.configured(
        PipelineRequest(config=str(config_file), name="small", overrides=["monitors=[{name: 'mine:watched'}]"])
    )
    check_trusted(given, given, run="small")


def test_nothing_is_sent_to_a_tracker_that_only_a_store_names(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    planted = tmp_path / "planted.db"
    # Code the store names besides is not carried out by tracking, so it is not asked about.
    begin_run(make_config(f"tracking.uri=sqlite:///{planted}", "monitors=[{name: 'mine:watched'}]"))
    with pytest.raises(TrustError, match=r"tracking\.uri: sqlite:///") as error:
        track_command("small", uri=None, root=str(tmp_path / "store"))
    assert "mine:watched" not in str(error.value)
    assert not planted.exists()
