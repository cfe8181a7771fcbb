"""Sweeps share what they can and say what is best; two runs beside each other say where they part."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from flowmill.configs.errors import CancelledError, ConfigError, RunConflictError, WorkerError
from flowmill.configs.exits import StopSignal
from flowmill.configs.load import load_config
from flowmill.configs.schema import PromptSource, PromptsSection, RunConfig
from flowmill.flows import process_state, server, sweep
from flowmill.flows.cli import sweep as command
from flowmill.flows.requests import SweepRequest
from flowmill.tasks.metrics.evaluations import named_figures
from flowmill.tasks.metrics.sweep import (
    Outcome,
    best_first,
    check_varied,
    final_settings,
    outcome,
    over_seeds,
    ranking,
    read_list,
    selection_note,
    sum_of_rewards,
    variants,
)
from flowmill.tasks.reports.comparison import compare
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.tracking import sweeps
from flowmill.tasks.tracking.client import open_client
from flowmill.tasks.tracking.locations import ARTIFACTS, tracking_folder
from tests.conftest import FlowmillCommand
from tests.support.inside import Make, evaluate, prepare, run_epoch
from tools.chaos.kills import orphans, start

RATE = "optimize.learning_rate"


def test_every_combination_is_a_variant_with_a_name_of_its_own() -> None:
    found = variants("s", [f"{RATE}=1e-4,3e-4", "optimize.algorithm={name: grpo}, {name: nft}"], [])
    assert [variant.settings[RATE] for variant in found] == [1e-4, 1e-4, 3e-4, 3e-4]
    assert found[1].settings["optimize.algorithm"] == {"name": "nft"}
    assert found[0].name.startswith("s-learning_rate-0.0001-algorithm-")
    assert len({variant.name for variant in found}) == 4
    listed = variants("s", ["run.seed=0,1"], [f"{RATE}=1e-4 run.epochs=2", f"{RATE}=3e-4 'prompts.train=a b.txt'"])
    assert [variant.settings for variant in listed][3] == {RATE: 3e-4, "prompts.train": "a b.txt", "run.seed": 1}
    assert listed[0].overrides == [f"{RATE}=0.0001", "run.epochs=2", "run.seed=0"]
    assert listed[2].name == "s-learning_rate-0.0003-train-a-b.txt-seed-0"
    face = variants("s", ['model.negative_prompt="\N{GRINNING FACE}"'], [])[0]
    assert load_config("tiny_sd3", face.overrides).model.negative_prompt == "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("grids", "lists"),
    [
        (["rewards.0.weight=1,-1,2"], []),
        (["prompts.heldout=data-a.txt,data/a.txt,b.txt"], []),
        (["model.path='1',1,2"], []),
        ([], [f"{RATE}=1e-3", "critic.learning_rate=1e-3", f"{RATE}=2e-3"]),
    ],
)
def test_settings_with_equal_names_are_variants_of_their_own(grids: list[str], lists: list[str]) -> None:
    found = variants("s", grids, lists)
    pairs = (grid.split("=") for grid in grids)
    backwards = variants("s", [f"{key}={','.join(values.split(',')[::-1])}" for key, values in pairs], lists[::-1])
    assert {each.name: each.settings for each in found} == {each.name: each.settings for each in backwards}
    assert len({each.name for each in found}) == 3
    assert [bool(re.search("-[0-9a-f]{8}$", each.name)) for each in found] == [True, True, False]


def test_a_variant_whose_run_has_other_settings_is_refused_before_any_work(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_run(load_config(config_file, ["run.name=s-seed-2", "run.seed=2"]))
    request = SweepRequest(config=str(config_file), name="s", grid=["run.seed=1,2"], overrides=[f"{RATE}=0.01"])
    monkeypatch.setattr(sweep, "bind_run", lambda config: pytest.fail("work has begun"))
    monkeypatch.setattr(command, "prepare_environment", lambda threads: pytest.fail("work has begun"))
    for refused in (sweep._sweep, command.sweep_command):
        with pytest.raises(RunConflictError, match=r"(?s)'s-seed-2' exists .*learning_rate"):
            refused(request)


@pytest.mark.parametrize(
    ("cause", "status"),
    [(StopSignal(143), "KILLED"), (CancelledError("in Prefect's pages"), "KILLED"), (ConfigError("--final"), "FAILED")],
)
def test_the_mlflow_run_of_a_sweep_ends_with_it(
    cause: BaseException, status: str, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def stopped(requests: object) -> None:
        raise cause

    monkeypatch.setattr(sweep, "SweepRun", lambda *_, **__: SimpleNamespace(run_id="m-1", end=ended.append))
    monkeypatch.setattr(sweep, "_in_turn", stopped)
    with pytest.raises(type(cause)):
        sweep._sweep(SweepRequest(config=str(config_file), grid=["run.seed=1,2"]))
    assert ended == [status]


@pytest.mark.parametrize("fails", ["create_run", "update_run", "log_text", "set_terminated"])
def test_a_tracker_that_fails_stops_no_sweep(fails: str, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, parents, said = [], list[str | None](), list[str]()

    def call(name: str, *_: object, **__: object) -> Any:
        called.append(name)
        if name == fails:
            raise MlflowException("refused\nby a database")
        return SimpleNamespace(info=SimpleNamespace(run_id="m-1"))

    names = ("create_run", "update_run", "log_text", "set_terminated")
    client = SimpleNamespace(search_runs=lambda *_, **__: [], **{name: partial(call, name) for name in names})
    monkeypatch.setattr(sweeps, "open_client", lambda *_: client)
    monkeypatch.setattr(sweeps, "experiment", lambda *_: "0")
    monkeypatch.setattr(sweep, "report_of", lambda *_: "report")
    monkeypatch.setattr(
        sweep, "_in_turn", lambda found: parents.extend(sweep._config(each).tracking.parent for each in found.values())
    )
    with process_state.shown_by(SimpleNamespace(message=said.append)):  # type: ignore[arg-type]
        outcomes, report = sweep._sweep(SweepRequest(config=str(config_file), name="s", grid=["run.seed=1,2"]))
    assert ([each.variant.name for each in outcomes], report) == (["s-seed-1", "s-seed-2"], "report")
    assert parents == [None if fails == "create_run" else "m-1"] * 2
    # A parent run is ended although its table was refused.
    assert called[-1] == ("create_run" if fails == "create_run" else "set_terminated")
    (message,) = said
    assert re.search(r"MLflow at .* failed \(MlflowException: refused\)\. The sweep continues", message)


def test_a_sweep_waits_for_no_silent_tracker(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, said, silent = threading.Event(), list[str](), list[threading.Thread]()

    def search(*_: object, **__: object) -> list[object]:
        silent.append(threading.current_thread())
        answers.wait()
        return []

    # Without a method that makes a run: one that comes too late would never be ended.
    monkeypatch.setattr(sweeps, "open_client", lambda *_: SimpleNamespace(search_runs=search))
    monkeypatch.setattr(sweeps, "experiment", lambda *_: "0")
    monkeypatch.setattr(sweeps, "_PATIENCE_S", 0.05)
    tracked = sweeps.SweepRun(begin_run(make_config()), "s", ["small"], say=said.append)
    assert tracked.run_id is None
    assert "no answer within 0.05 s" in said[0]
    failures: list[object] = []
    monkeypatch.setattr(sweeps, "first_line", failures.append)
    answers.set()
    silent[0].join()
    tracked.end("FINISHED")
    assert (failures, len(said)) == ([], 1)
    # A report takes longer than an answer.
    client: Any = SimpleNamespace(log_text=lambda *_: time.sleep(0.1), set_terminated=lambda *_: None)
    tracked.run_id, tracked.failure, tracked._client = "m-1", None, client  # type: ignore[assignment]
    tracked.log([], "report")
    tracked.end("FINISHED")
    assert tracked.failure is None
    # A tracker that failed before does not keep Ctrl-C waiting.
    monkeypatch.setattr(sweeps, "_PATIENCE_S", 60)
    monkeypatch.setattr(sweeps, "_LAST_TRY_S", 0.05)
    over = threading.Event()
    tracked.failure, client.set_terminated = "refused", lambda *_: over.wait(50)
    tracked.end("KILLED")
    assert tracked.failure == "no answer within 0.05 s"
    over.set()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("sleep 0.1; echo 'flowmill: broken' >&2; exit 1", "^broken$"),
        # A process that outlives it has its pipe.
        ("(sleep 3 &); echo 'flowmill: broken' >&2; exit 1", "^broken$"),
        ("echo first >&2; sleep 0.2; echo last >&2; exit 3", "first\nlast"),
        ("kill -9 $$", "ended with code -9"),
        ("echo warning >&2", None),
        ("(sleep 3 &); echo warning >&2", None),
    ],
)
def test_a_variant_that_failed_is_no_variant_that_is_done(
    script: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "python"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    # Often enough between two looks.
    monkeypatch.setattr(sweep, "_LOOK_S", 0.05)
    for _ in range(10):
        with pytest.raises(WorkerError, match=error) if error else nullcontext():
            sweep.run_variant.fn(["run"], threading.Event())


@pytest.mark.parametrize("is_temporary", [False, True])
def test_a_variant_in_a_process_of_its_own_has_the_conditions_of_this_one(
    is_temporary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the working directory shadow no library, none of ours shadows them, and no address of a temporary server
    is passed on."""
    command = tmp_path / "python"
    command.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\necho $1 > {tmp_path}/option\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    monkeypatch.setattr(server, "_temporary", [server] * is_temporary)
    sweep.run_variant.fn(["run"], threading.Event())
    variables = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert (tmp_path / "option").read_text() == "-P\n"
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        assert variables.get(name) == os.environ.get(name)
    monkeypatch.setattr(server, "_temporary", [])
    monkeypatch.setattr(os, "environ", variables)
    assert server.has_lasting_api() is not is_temporary


def test_a_variant_that_is_stopped_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    monkeypatch.setattr(sweep, "_errors", lambda process: stop.set())
    sweep.run_variant.fn(["--help"], stop)


def test_the_mean_over_seeds_has_students_interval() -> None:
    found = variants("s", [f"{RATE}=1e-4,3e-4", "run.seed=0,1,2"], [])
    scores = [1.0, 2.0, 3.0, 0.5, 0.5]
    outcomes = [Outcome(variant=v, epoch=1, reward=r, figures={"m": r}) for v, r in zip(found, scores, strict=False)]
    outcomes.append(Outcome(variant=found[5], epoch=0, reward=None, figures={}))
    first, second = over_seeds(outcomes)
    assert (first.settings, first.count) == ({RATE: 1e-4}, 3)
    # 4.302653 is the quantile 0.975 of two degrees of freedom, the deviation of 1, 2, 3 is 1.
    assert first.figures["m"] == pytest.approx((2.0, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6)
    assert (second.count, second.figures["m"]) == (2, (0.5, 0.5, 0.5))
    bounded = [replace(each, bounds={"m": (0.0, 3.0)}) for each in outcomes]
    assert over_seeds(bounded)[0].figures["m"] == (2.0, 0.0, 3.0)
    assert over_seeds(outcomes[:1]) == []
    assert over_seeds([replace(each, variant=replace(each.variant, settings={RATE: 1})) for each in outcomes]) == []


@pytest.mark.parametrize(
    ("grids", "lists", "message"),
    [
        ([], [], "needs --grid"),
        (["run.seed"], [], "--grid 'run.seed' is not of the form"),
        (["run.seed="], [], "is not of the form"),
        (["run.seed=[1"], [], "is not of the form"),
        (["run.seed=1,1"], [], "Two variants are the same: run.seed=1"),
        (["rewards.0.weight=1,-1,1"], [], "Two variants are the same: rewards.0.weight=1"),
        (["run.seed=1", "run.seed=2"], [], "'run.seed' is given twice"),
        (["run.seed=1"], ["run.seed=2"], "'run.seed' is given twice"),
        ([], ["run.seed 2"], "--list: 'run.seed 2' is not of the form"),
        ([], ["'run.seed=2"], "is not of the form"),
    ],
)
def test_what_is_no_variant(grids: list[str], lists: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants("s", grids, lists)


def test_what_all_share_is_not_varied(tmp_path: Path) -> None:
    for key in ("run.name=a,b", "store.root=a,b", "tracking.uri=a,b"):
        with pytest.raises(ConfigError, match="all runs of a sweep share it"):
            check_varied(variants("s", [key], [])[0])
    (tmp_path / "list.txt").write_text("# first\nrun.seed=1\n\nrun.seed=2\n")
    assert read_list(tmp_path / "list.txt") == ["run.seed=1", "run.seed=2"]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_list(tmp_path / "none.txt")


def test_the_best_is_first_and_what_has_no_result_last() -> None:
    made = [
        Outcome(variant=variant, epoch=1, reward=reward, figures={})
        for variant, reward in zip(variants("s", ["run.seed=0,1,2"], []), (0.5, None, 0.7), strict=True)
    ]
    assert [each.reward for each in best_first(made)] == [0.7, 0.5, None]


def test_the_best_of_several_is_said_to_be_chosen_by_its_own_scores() -> None:
    found = [
        Outcome(variant=variant, epoch=4, reward=reward, figures={"digits mean": reward})
        for variant, reward in zip(variants("s", ["run.seed=0,1"], []), (0.7, 0.5), strict=True)
    ]
    said = selection_note(found, prompts=None, root="a store")
    assert said.startswith("The best of 2 was chosen by its scores on the held-out prompts")
    assert "flowmill stage evaluate --run s-seed-0 --epoch 4 --root 'a store' --name final" in said
    trained = [replace(each, split="train") for each in found]
    assert "scores on the train prompts that" in selection_note(trained, prompts=None, root="a store")
    mixed = selection_note([found[0], trained[1]], prompts=None, root="a store")
    assert "scores on the held-out prompts and train prompts that" in mixed
    best = replace(found[0], final={"digits mean": 0.61})
    said = selection_note([best, found[1]], prompts="final.txt", root="a store")
    assert said.endswith("On final.txt, which chose nothing, s-seed-0 has digits mean 0.61.")
    assert selection_note(found[:1], prompts=None, root="a store") == ""
    assert selection_note([found[0], replace(found[1], reward=None)], prompts=None, root="a store") == ""


@pytest.mark.parametrize(("heldout", "split"), [([], "heldout"), (["prompts.heldout=null"], "train")])
def test_an_outcome_names_the_prompts_that_it_was_scored_on(make_config: Make, heldout: list[str], split: str) -> None:
    context = prepare(make_config(*heldout))
    evaluate(context, 0)
    (variant,) = variants("s", ["run.seed=0"], [])
    assert outcome(context, variant, context.config).split == split


TWO = "rewards=[{name: jpeg_compressibility, weight: 1}, {name: jpeg_incompressibility, label: detail, weight: 0.5}]"


def varied(config_file: Path, *grids: str) -> list[RunConfig]:
    return [load_config(config_file, [TWO, *each.overrides]) for each in variants("s", grids, [])]


def test_equal_samples_rank_equally_under_any_weights(make_config: Make, config_file: Path) -> None:
    found = variants("s", ["rewards.1.weight=0.1,2"], [])
    contexts = [prepare(make_config(TWO, *each.overrides, f"run.name={each.name}")) for each in found]
    weights = ranking(str(config_file), [TWO], [each.config for each in contexts], final=None).weights
    for context in contexts:
        evaluate(context, 0)
    one, other = (outcome(*each, weights) for each in zip(contexts, found, strict=True))
    assert one.reward == other.reward
    assert one.reward == pytest.approx(
        one.figures["jpeg_compressibility mean"] + 0.5 * one.figures["detail mean"], rel=1e-12
    )


def test_sums_are_equal_in_any_order_and_for_the_same_rewards_and_weights_only(config_file: Path) -> None:
    a, b = "{name: jpeg_compressibility, weight: 0.1}", "{name: jpeg_incompressibility, label: detail}"
    others = (
        a.replace("0.1", "0.10000001"),
        a.replace("weight", "frames: 2, weight"),
        "{name: jpeg_incompressibility, label: jpeg_compressibility, weight: 0.1}",
        "{name: jpeg_compressibility, weight: 0.1, options: {quality: 50}}",
    )
    lists = (f"{a}, {b}", f"{b}, {a}", *(f"{other}, {b}" for other in others))
    sums = [sum_of_rewards(load_config(config_file, [f"rewards=[{each}]"])) for each in lists]
    assert sums[0] == sums[1]
    assert len({*sums}) == 1 + len(others)
    assert {each.rpartition(" (")[0] for each in sums} == {"detail + 0.1 x jpeg_compressibility"}


def test_weights_that_all_have_rank_them(config_file: Path) -> None:
    lists = ",".join(f"[{{name: jpeg_compressibility, weight: 3, threshold: {value}}}]" for value in (0.1, 0.2))
    (weights,) = {
        ranking("unread", [], varied(config_file, grid), final="a.txt").weights.rewards[0].weight  # type: ignore[union-attr]
        for grid in (f"rewards={lists}", "rewards=[{name: jpeg_compressibility, weight: 3}]")
    }
    assert weights == 3


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        ("rewards=[{name: jpeg_compressibility}],[{name: jpeg_incompressibility}]", "differ in their rewards"),
        ("rewards=[jpeg_compressibility],[{name: jpeg_compressibility, weight: 2}]", "weigh their rewards differently"),
        ("rewards.0.frames=1,2", "differ in their rewards"),
        ("prompts.heldout=a.txt,b.txt", "evaluated on different prompts"),
        ("prompts.heldout=a.txt,null", "evaluated on different prompts"),
        ("evaluate.samples=4,8", "evaluated on different prompts"),
    ],
)
def test_what_does_not_compare_has_no_best(
    grid: str, why: str, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("ab", start=83):
        (tmp_path / f"{name}.txt").write_text(f'"{number}"\n')
    (tmp_path / "last.txt").write_text('"38"\n')
    monkeypatch.setattr(sweep, "check_config", lambda *_, **__: None)
    monkeypatch.setattr(sweep, "bind_run", lambda config: pytest.fail("work has begun"))
    monkeypatch.setattr(command, "prepare_environment", lambda threads: pytest.fail("work has begun"))
    configs = varied(config_file, grid)
    ranked = ranking(str(config_file), [TWO], configs, final=None)
    assert ranked.weights is None
    assert why in ranked.why_none
    for refused in (sweep._sweep, command.sweep_command):
        with pytest.raises(ConfigError, match=f"--final .*{why}.* Leave --final out"):
            refused(SweepRequest(config=str(config_file), grid=[grid], overrides=[TWO], final="last.txt"))


@pytest.mark.parametrize(("other", "why"), [("weight: 2", "weigh their rewards"), ("label: b", "differ in their rew")])
def test_a_config_that_the_grid_completes_is_varied(other: str, why: str, config_file: Path) -> None:
    base = ["rewards=[{name: jpeg_compressibility, weight: W}]"]
    grid = f"rewards=[jpeg_compressibility],[{{name: jpeg_compressibility, {other}}}]"
    with pytest.raises(ConfigError, match="weight"):
        load_config(config_file, base)
    ranked = ranking(str(config_file), base, varied(config_file, grid), final=None)
    assert ranked.weights is None
    assert why in ranked.why_none


def test_a_report_that_cannot_be_written_is_refused_before_the_sweep(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "prepare_environment", lambda threads: pytest.fail("work has begun"))
    request = SweepRequest(config=str(config_file), grid=["run.seed=1,2"])
    with pytest.raises(ConfigError, match=r"'/dev/null/a.html' cannot be written"):
        command.sweep_command(request, out=Path("/dev/null/a.html"))


def test_one_list_takes_the_place_of_no_sources(make_config: Make) -> None:
    config = make_config()
    assert final_settings(config, "a b.txt") == ['prompts.heldout="a b.txt"']
    sources = tuple(PromptSource(name=name, train=f"{name}.txt") for name in ("one", "two"))
    mixed = config.model_copy(update={"prompts": PromptsSection(sources=sources)})
    with pytest.raises(ConfigError, match=r"--final 'a.txt': prompts.sources has separate lists"):
        final_settings(mixed, "a.txt")


def test_runs_part_where_their_settings_first_matter(make_config: Make) -> None:
    contexts = [prepare(make_config(f"run.name={name}", f"{RATE}={rate}")) for name, rate in (("a", 1e-3), ("b", 1e-2))]
    for context in contexts:
        evaluate(context, 0)
        run_epoch(context, 1)
    run_epoch(contexts[0], 2)
    found = compare(*contexts)
    assert found.settings == {RATE: (1e-3, 1e-2)}
    assert found.parts_at == Node(1, "optimize")
    assert (found.shared["rollout"], found.own["rollout"]) == (1, (1, 0))
    assert (found.shared["optimize"], found.own["optimize"]) == (0, (2, 1))
    assert found.figures[0][0] == found.figures[0][1] != {}
    same = compare(contexts[0], contexts[0])
    assert (same.settings, same.parts_at, same.own["optimize"]) == ({}, None, (0, 0))


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_sweep_samples_once_what_its_variants_share(
    flowmill: FlowmillCommand, config_file: Path, tmp_path: Path, parallel: int
) -> None:
    root = str(tmp_path / "store")
    given = ["--grid", f"{RATE}=1e-3,2e-3", "--name", "swept", "--root", root, "--set", "run.epochs=1"]
    given += ["--out", str(tmp_path / "out.html"), "--quiet", "--parallel", str(parallel)]
    (tmp_path / "final.txt").write_text('"38"\n"83"\n')
    given += ["--final", str(tmp_path / "final.txt")]
    done = flowmill("sweep", str(config_file), *given)
    assert done.returncode == 0, done.stderr
    names = ["swept-learning_rate-0.001", "swept-learning_rate-0.002"]
    assert all(name in done.stdout for name in names)
    assert all(name in (tmp_path / "out.html").read_text() for name in names)
    assert len(list((tmp_path / "store" / "trajectories").iterdir())) == 1
    assert len({open_run(root, name, reads=True).policy_ref(1) for name in names}) == 2
    client = open_client(root, None)
    (experiment,) = (each for each in client.search_experiments() if each.name == "flowmill")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.info.run_name == "swept"
    assert {run.data.tags["mlflow.parentRunId"] for run in runs if run is not parent} == {parent.info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    (table,) = (tracking_folder(root) / ARTIFACTS).rglob("variants.csv")
    rows = list(csv.DictReader(table.open()))
    assert sorted(row["run"] for row in rows) == names
    (final,) = (name for name in rows[0] if name.startswith("final ") and name.endswith("mean"))
    assert [bool(row[final]) for row in rows] == [True, False]
    assert "which chose nothing" in " ".join(done.stdout.split())
    best, other = (open_run(root, row["run"], reads=True).chain for row in rows)
    assert named_figures(best, 1, "final")["heldout"]
    assert not named_figures(other, 1, "final")
    again = flowmill("sweep", str(config_file), *given)
    assert again.returncode == 0, again.stderr
    assert len(client.search_runs([experiment.experiment_id])) == 3, "gone on with"
    found = flowmill("diff", *names, "--root", root, "--json")
    assert json.loads(found.stdout)["parts_at"] == "optimize@1"
    assert "They part at optimize@1" in flowmill("diff", *names, "--root", root).stdout


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["1", pytest.param("2", marks=pytest.mark.campaign)])
def test_a_variant_that_fails_stops_no_other(
    flowmill: FlowmillCommand, config_file: Path, tmp_path: Path, parallel: str
) -> None:
    given = [
        "--grid",
        "rewards=[{name: tests.support.rewards:Crash}],[{name: jpeg_compressibility}]",
        "--name",
        "swept",
    ]
    given += ["--root", str(tmp_path / "store"), "--set", "run.epochs=1", "--parallel", parallel]
    done = flowmill("sweep", str(config_file), *given)
    assert done.returncode == 1
    assert "1 of 2 variants failed; the others are done" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    finished = [path.name for path in (tmp_path / "store" / "runs").iterdir()]
    assert len(finished) == 2
    assert len(list((tmp_path / "store" / "policies").iterdir())) == 2


@pytest.mark.campaign_cases("2")
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [pytest.param("1", marks=pytest.mark.campaign), "2"])
def test_a_sweep_that_is_stopped_leaves_no_process(
    config_file: Path, tmp_path: Path, prefect_server: str, parallel: str
) -> None:
    environment = {**os.environ, "PREFECT_API_URL": prefect_server, "FLOWMILL_TEST": str(tmp_path)}
    root = tmp_path / "store"
    given = ["--grid", "run.seed=0,1,2", "--root", str(root), "--set", "run.epochs=200", "--parallel", parallel]
    process = start(["sweep", str(config_file), *given, "--quiet"], environment)
    deadline = time.monotonic() + 200
    while not (root / "policies").exists() or len(list((root / "policies").iterdir())) < 4:
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    said = process.communicate(timeout=40)[0].decode()
    assert process.returncode == 143, said
    assert "Traceback" not in said, said
    assert orphans(str(tmp_path)) == []


def test_the_command_of_a_request_asks_for_the_same() -> None:
    request = SweepRequest(
        config="digits", name="s", grid=["run.seed=0,1"], overrides=["run.epochs=1"], final="last prompts.txt"
    )
    assert request.command("sweep") == (
        "flowmill sweep digits --name s --grid run.seed=0,1 --set run.epochs=1 --final 'last prompts.txt'"
    )
    assert load_config(request.config, request.overrides).run.epochs == 1
