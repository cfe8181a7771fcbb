"""Runs that start from another run, whose config they name: one command completes both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flowmill.configs.errors import ConfigError
from flowmill.configs.presets import preset_files
from flowmill.flows import pipeline as flow
from flowmill.flows import sweep
from flowmill.flows.chained import chained, resolved_config
from flowmill.flows.cli.check import check_command
from flowmill.flows.requests import PipelineRequest, SweepRequest
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import list_runs
from flowmill.tasks.runs.opening import begin_run, open_run
from tests.conftest import FlowmillCommand
from tests.support.language_models import texts_data

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes tuned.yaml (``sft``) and learned.yaml, which starts from it after its epoch; returns the latter."""
    data = texts_data(tmp_path)
    rows = data["prompts"].pop("train")
    tuned = {
        **data,
        "run": {"epochs": 1},
        "data": {"train": rows, "sample": "answer"},
        "optimize": {"algorithm": "sft"},
    }
    learned: dict[str, Any] = {
        "extends": "tuned.yaml",
        "data": None,
        "prompts": {"train": rows},
        "optimize": {"algorithm": "grpo"},
        "model": {"start": "tuned@1", "start_config": "tuned.yaml"},
    }

    def written(first: dict[str, Any] | None = None, **model: Any) -> str:
        (tmp_path / "tuned.yaml").write_text(yaml.safe_dump({**tuned, **(first or {})}))
        path = tmp_path / "learned.yaml"
        path.write_text(yaml.safe_dump({**learned, "model": {**learned["model"], **model}}))
        return str(path)

    return written


def test_both_runs_are_asked_for_with_common_settings_until_the_second_has_begun(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWMILL_ROOT", str(tmp_path / "elsewhere"))
    common = ["execution.micro_batch_size=2"]
    own_settings = ["run.seed=3", "execution.ahead=1"]
    asked = PipelineRequest(config=write(), overrides=[*common, *own_settings], wait_minutes=2)
    first, own = chained(asked)
    assert own is asked
    root = str(tmp_path / "store")
    assert first == PipelineRequest(config=f"{tmp_path}/tuned.yaml", root=root, overrides=common, wait_minutes=2)
    assert not Path(root).exists()
    done: list[PipelineRequest] = []
    stages = SimpleNamespace(context=SimpleNamespace(chain=SimpleNamespace(digest=lambda: "digest")))
    monkeypatch.setattr(flow.process_state, "configured", lambda request, says: done.append(request))
    monkeypatch.setattr(flow.process_state, "begin", lambda config: None)
    monkeypatch.setattr(flow, "bind_run", lambda config: None)
    monkeypatch.setattr(flow, "at_turn", lambda run, request, begun: nullcontext(begun()))
    monkeypatch.setattr(flow, "training_run", lambda context, request: nullcontext((stages, None)))
    monkeypatch.setattr(flow, "train", lambda stages, callbacks: None)
    flow.pipeline.fn(asked)
    assert done == [first, asked]
    monkeypatch.setattr("flowmill.tasks.runs.opening.started_from", lambda store, config: {"policy": "policies/x"})
    begin_run(resolved_config(asked))
    assert chained(asked) == [asked]


def test_check_reads_both_configs_and_adds_their_costs(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command(Path(path := write()))
    shown = capsys.readouterr().out
    assert re.findall(r"optimizer updates\t\t(\d+)\t?(\d*)", shown) == [("2", ""), ("2", "4")]
    check_command(Path(path), as_json=True)
    checked = json.loads(capsys.readouterr().out)
    assert [checked["config"]["run"]["name"], checked["start"]["config"]["run"]["name"]] == ["learned", "tuned"]
    assert not (tmp_path / "store").exists()


def test_a_sweep_completes_the_start_of_its_variants_first(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[PipelineRequest] = []
    monkeypatch.setattr(sweep, "pipeline", done.append)
    with pytest.raises(ConfigError, match="there is no run 'tuned'"):
        sweep._sweep(SweepRequest(config=write(), grid=["run.seed=1,2"]))
    assert [Path(each.config).name for each in done] == ["tuned.yaml"]


def test_a_run_that_cannot_be_the_start_is_refused_before_any_work(write: Write, tmp_path: Path) -> None:
    def refused(path: str) -> str:
        with pytest.raises(ConfigError) as error:
            chained(PipelineRequest(config=path))
        return str(error.value)

    assert "'other@1', but model.start_config" in refused(write(start="other@1"))
    assert "tuned.yaml' has 1 epochs. Name one" in refused(write(start="tuned@2"))
    assert "run 'tuned' trains all weights, this config adapters" in refused(write(lora={"rank": 2}))
    assert "trains another base model" in refused(write(path=None, build="addition"))
    assert "there is no 'start'" in refused(write(start=None))
    begins = {"model": {**texts_data(tmp_path)["model"], "start": "learned@1", "start_config": "learned.yaml"}}
    assert "run 'learned' would start from itself: learned <- tuned <- learned" in refused(write(begins))


def test_what_is_refused_of_one_of_two_runs_names_it(write: Write) -> None:
    path = write({"optimize": {"algorithm": "dpo"}})
    with pytest.raises(ConfigError, match=r"^run 'tuned': data: optimize.algorithm 'dpo' compares"):
        check_command(Path(path))


def test_a_preset_is_copied_with_the_config_of_its_start() -> None:
    assert "addition_sft.yaml" in preset_files("addition_sft_grpo")


def test_a_kill_in_either_run_is_resumed_by_the_same_command(
    flowmill: FlowmillCommand, write: Write, tmp_path: Path
) -> None:
    # Samples after training in the first, and of the first rollout in the second; four calls judge an evaluation.
    killing = {"note": str(tmp_path / "note"), "at": [5, 14]}
    rewards = [{"name": "tests.support.rewards:Killing", "options": killing}]
    path, root = write({"rewards": rewards}), str(tmp_path / "store")
    (tmp_path / "note").touch()
    for runs in (["tuned"], ["tuned", "learned"]):
        assert flowmill("run", path, "--quiet").returncode == -9
        assert sorted(list_runs(ArtifactStore(root))) == sorted(runs)
    first = open_run(root, "tuned", reads=True)
    before = first.chain.digest()
    done = flowmill("run", path)
    assert done.returncode == 0, done.stderr
    assert first.chain.digest() == before
    start = open_run(root, "learned", reads=True).starts_from
    assert start == {"run": "tuned@1", "policy": str(first.policy_ref(1))}
    assert f"started from tuned@1: {start['policy']}" in flowmill("status", "learned", "--root", root).stdout
