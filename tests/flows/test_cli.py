"""The command line as a user meets it: real processes, real Prefect, real MLflow, a tiny real model."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FlowmillCommand

pytestmark = pytest.mark.slow


def refused(result: subprocess.CompletedProcess[str], expected: str) -> None:
    """Assert one message, no traceback, exit code 1."""
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.startswith("flowmill: ")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr + result.stdout


@pytest.fixture
def arguments(config_file: Path, tmp_path: Path) -> list[str]:
    return [str(config_file), "--root", str(tmp_path / "store")]


def test_a_run_from_nothing_to_an_export_and_again(
    flowmill: FlowmillCommand, arguments: list[str], tmp_path: Path
) -> None:
    build = [
        "--set",
        "model.path=null",
        "--set",
        "model.build={name: digits, options: {steps: 3, vae_steps: 3, images: 99}}",
    ]
    first = flowmill("run", *arguments, *build)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "orchestration + commits + tracking" in first.stdout
    assert "exported model:" in first.stdout
    assert re.search(r"best epoch: \d.*mean jpeg_compressibility on held-out prompts .* of 3 evaluations", first.stdout)
    again = flowmill("run", *arguments, *build, "--epochs", "2", "--show", "1")
    assert "No model was run" in again.stdout
    assert again.stdout.count(" held-out prompts:\n") == 3
    root = ["--root", str(tmp_path / "store")]
    digests = [flowmill("store", "digest", "small", *root).stdout.strip() for _ in range(2)]
    assert len(digests[0]) == 32
    assert digests[0] == digests[1]

    status = json.loads(flowmill("status", "small", *root, "--json").stdout)
    assert set(status["evaluations"]) == {"0", "1", "2"}
    assert status["finished_epochs"] == 2
    assert status["tracking"]["mlflow_run_id"]
    mean = status["advantages"]["2"]["reward_mean"]
    # Followed by the time, or by the share of it that waited for rewards.
    said = rf"epoch 2/2  reward jpeg_compressibility {mean:.3f}(  |, \d+% of the time waited for rewards)"
    assert re.search(said, first.stdout), "that of the whole epoch"
    assert "small" in flowmill("status", *root).stdout
    shown = flowmill("status", "small", *root).stdout
    assert "Evaluations" in shown
    before, last = ([a["artifact"] for a in status["artifacts"] if (a["epoch"] == 2) is of] for of in (False, True))
    assert all(artifact in shown for artifact in last)
    assert f"(--long lists {len(before)} more, of other epochs)" in shown
    assert all(artifact in flowmill("status", "small", "--long", *root).stdout for artifact in before)

    listed = json.loads(flowmill("store", "ls", *root, "--json").stdout)
    kinds = {item["artifact"].split("/")[0] for item in listed}
    assert kinds >= {"bases", "prompts", "embeddings", "trajectories", "rewards", "advantages", "policies", "exports"}
    trajectories = next(item["artifact"] for item in listed if item["artifact"].startswith("trajectories"))
    shown = json.loads(flowmill("store", "show", trajectories[:30], *root, "--json").stdout)
    assert "sample_id: string" in shown["schema"]["samples.parquet"]
    assert shown["options"]["rollout"]["group_size"] == 4
    assert "0 problems" in flowmill("store", "verify", "--deep", *root).stdout

    tar = next((tmp_path / "store" / "trajectories").rglob("samples.tar"))
    tar.write_bytes(tar.read_bytes()[:-1])
    verified = flowmill("store", "verify", *root)
    assert verified.returncode == 1
    assert "samples.tar" in verified.stdout


@pytest.mark.campaign
def test_one_stage_alone_with_another_reward(flowmill: FlowmillCommand, arguments: list[str], tmp_path: Path) -> None:
    assert flowmill("run", *arguments, "--quiet").returncode == 0
    root = ["--root", str(tmp_path / "store")]
    other = "rewards=[{name: jpeg_compressibility, label: kb, options: {scale: 1}}]"
    result = flowmill("stage", "score", "--run", "small", "--epoch", "1", "--set", other, *root)
    assert result.returncode == 0, result.stderr
    assert "score[kb]@1 rewards/" in result.stdout
    assert "the result is a side result" in result.stdout
    status = json.loads(flowmill("status", "small", *root, "--json").stdout)
    (side,) = status["side_results"]
    assert side["label"] == "reward 'kb' is not in the run's config"
    mean = status["rewards"]["1"]["jpeg_compressibility"]["mean"]
    assert side["figures"]["mean"] == pytest.approx(500 * mean, rel=1e-5)
    assert f"mean {side['figures']['mean']:.3f}" in result.stdout
    forced = flowmill("stage", "advantage", "--run", "small", "--epoch", "1", "--force", *root)
    assert "-a2" in forced.stdout
    assert "Nothing of the run is due because of it." in forced.stdout
    assert flowmill("status", "small", "--check", *root).returncode == 0
    assert "is fresh" in flowmill("status", "small", "--why", "optimize@2", *root).stdout
    refused(flowmill("status", "small", "--why", "optimise@2", *root), "At epoch 2 it has rollout, score")


@pytest.mark.campaign
def test_what_became_due_is_said_and_done(flowmill: FlowmillCommand, arguments: list[str], tmp_path: Path) -> None:
    root = ["--root", str(tmp_path / "store")]
    restless = ["--set", "rewards=[{name: 'tests.support.rewards:Restless'}]"]
    dry = flowmill("run", *arguments, *restless, "--dry")
    assert dry.returncode == 0, dry.stderr
    assert "small: 19 artifacts to compute" in dry.stdout
    assert not (tmp_path / "store" / "runs").exists()
    assert flowmill("run", *arguments, *restless, "--quiet").returncode == 0
    forced = flowmill("stage", "score", "--run", "small", "--epoch", "2", "--force", *root)
    assert "due now: advantage@2 (stale), optimize@2 (stale)" in forced.stdout, forced.stdout + forced.stderr
    stale = flowmill("status", "small", "--check", *root)
    assert stale.returncode == 1
    assert "stale epochs" in stale.stdout
    why = flowmill("status", "small", "--why", "export@2", *root).stdout
    assert "root cause: score[tests.support.rewards:Restless]@2: made again with --force, and came out different" in why
    assert (
        "advantage@2: input score[tests.support.rewards:Restless]@2 changed"
        in flowmill("run", *arguments, *restless, "--dry").stdout
    )
    done = flowmill("stage", "score", "--run", "small", "--epoch", "1", "--force", "--downstream", *root)
    assert done.returncode == 0, done.stderr
    assert "is up to date" in done.stdout
    assert flowmill("status", "small", "--check", *root).returncode == 0


@pytest.mark.campaign
def test_an_evaluation_of_its_own_name(flowmill: FlowmillCommand, arguments: list[str], tmp_path: Path) -> None:
    root = ["--root", str(tmp_path / "store")]
    assert flowmill("run", *arguments, "--set", "run.epochs=1", "--quiet").returncode == 0
    (tmp_path / "other.txt").write_text('"55"\n')
    settings = ["--set", f"prompts.heldout={tmp_path / 'other.txt'}", "--set", "evaluate.samples=2"]
    made = flowmill("stage", "evaluate", "--run", "small", "--epoch", "1", "--name", "drawbench", *settings, *root)
    assert made.returncode == 0, made.stderr
    assert "judge[jpeg_compressibility@drawbench]@1 rewards/" in made.stdout
    shown = flowmill("status", "small", *root).stdout
    assert "drawbench" in shown
    again = flowmill("run", *arguments, "--set", "run.epochs=1")
    assert "No model was run" in again.stdout


def test_check_prints_the_config_and_the_cost(flowmill: FlowmillCommand, config_file: Path) -> None:
    result = flowmill("check", str(config_file), "--set", "run.seed=5")
    assert "seed: 5" in result.stdout
    assert "samples generated" in result.stdout
    data: dict[str, Any] = json.loads(flowmill("check", str(config_file), "--json").stdout)
    assert data["cost"]["samples_per_epoch"] == 16
    assert data["config"]["rollout"]["steps"] == 3


def test_bad_input_is_one_message(flowmill: FlowmillCommand, arguments: list[str], tmp_path: Path) -> None:
    refused(flowmill("run", str(tmp_path / "no.yaml")), "does not exist")
    refused(flowmill("run", *arguments, "--set", "rollout.sampler.name=ode"), "needs log-probs of stochastic steps")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{oops\n')
    refused(flowmill("run", *arguments, "--set", f"prompts.train={tmp_path / 'bad.jsonl'}"), "line 2 is not JSON")
    (tmp_path / "file").write_text("")
    refused(flowmill("run", arguments[0], "--root", str(tmp_path / "file" / "store")), "cannot be used")
    refused(flowmill("status", "nope", "--root", str(tmp_path / "store")), "There is no run 'nope'")


def test_the_number_of_epochs_is_an_option(flowmill: FlowmillCommand, arguments: list[str]) -> None:
    option, setting = [
        flowmill("run", *arguments, "--dry", *more).stdout for more in (["--epochs", "7"], ["--set", "run.epochs=7"])
    ]
    assert option == setting
    assert re.search(r"^optimize\t.*\b7\b", option, re.MULTILINE)
    for other in (["--advance", "1"], ["--rewind"]):
        refused(flowmill("run", *arguments, "--epochs", "7", *other), "--epochs is the length of a run")


@pytest.mark.campaign
def test_a_nan_reward_is_one_message_and_the_next_try_keeps_the_rollouts(
    flowmill: FlowmillCommand, arguments: list[str], tmp_path: Path
) -> None:
    broken = flowmill("run", *arguments, "--set", "rewards=[{name: 'tests.support.rewards:NotANumber'}]")
    refused(broken, "returned nan for prompt '\"00\"' (sample made up for the trial")
    assert not [each for each in (tmp_path / "store").glob("runs/small/*") if each.name != ".lock"]
    broken = flowmill("run", *arguments, "--set", "rewards=[{name: 'tests.support.rewards:NotANumberLater'}]")
    refused(broken, "returned nan for prompt")
    assert re.search(r"\(sample \S+, shard \S+ of (trajectories|evaluations)/[0-9a-f]{32}\)", broken.stderr)
    refused(flowmill("run", *arguments), "exists in")
    mended = flowmill("run", *arguments, "--name", "mended")
    assert mended.returncode == 0, mended.stderr
    stages = mended.stdout.split("time: ")[1].split("\n")[0]
    assert "base" not in stages


def test_an_unknown_failure_names_the_cause_without_a_traceback(
    flowmill: FlowmillCommand, arguments: list[str]
) -> None:
    crash = ["--set", "rewards=[{name: 'tests.support.rewards:Crash'}]"]
    result = flowmill("run", *arguments, *crash)
    refused(result, "ZeroDivisionError: float division by zero")
    assert "FLOWMILL_TRACEBACK=1" in result.stderr
    assert "Traceback" in flowmill("run", *arguments, *crash, FLOWMILL_TRACEBACK="1").stderr


@pytest.mark.campaign
def test_transient_errors_are_retried_and_others_are_not(flowmill: FlowmillCommand, arguments: list[str]) -> None:
    flaky = ["--set", "rewards=[{name: 'tests.support.rewards:Flaky'}]", "--set", "execution.retry_delay_s=0.1"]
    once = ["--set", "run.epochs=1", "--set", "evaluate.judges=[]"]
    skip_first = ["--set", "evaluate.samples=1"]
    result = flowmill("stage", "base", "--run", "none", *arguments[1:])
    refused(result, "There is no store")
    assert flowmill("run", *arguments, *flaky, *once, *skip_first, "--set", "execution.retries=0").returncode == 1
    assert flowmill("run", *arguments, *flaky, *once, *skip_first, "--set", "execution.retries=3").returncode == 0


@pytest.mark.campaign
def test_two_processes_under_torchrun(flowmill: FlowmillCommand, arguments: list[str]) -> None:
    result = flowmill("run", *arguments, "--set", "execution.processes=2", "--set", "run.epochs=1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "epoch 1/1" in result.stdout


def test_check_says_how_it_reads_the_rows_of_data(flowmill: FlowmillCommand, tmp_path: Path) -> None:
    rows = (f'{{"prompt": "{100 + n}+1=", "completion": "{101 + n}"}}\n' for n in range(64))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    data = f"{{train: {tmp_path / 'rows.jsonl'}, groups_per_epoch: 64}}"
    command = ["check", "addition_sft", "--set", f"data={data}", "--set", "rewards=[{name: constant}]"]
    assert "data.train is read as prompt-completion (sample: completion" in flowmill(*command).stdout
    assert json.loads(flowmill(*command, "--json").stdout)["data"]["columns"]["sample"] == "completion"
