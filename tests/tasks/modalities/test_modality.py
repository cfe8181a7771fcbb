"""A kind of policy that no file of the project knows goes through every stage, and through all that looks at a run."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pytest
import yaml
from safetensors.torch import load_file

from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.storage.maintenance.verify import verify_store
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.metrics.samples import artifact_table
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.reports.trace import States, trace_sample
from flowmill.tasks.runs.staleness import is_complete
from flowmill.tasks.specs.graph import Node
from tests.conftest import FlowmillCommand
from tests.support.categorical import FILE, settings
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, stage_run


def config_of(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "chooser.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump(settings(folder)))
    return load_config(path, overrides)


def test_a_policy_of_another_kind_goes_through_every_stage_and_learns(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    check_config(config)
    context = prepare(config)
    evaluate(context, 0)
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
        evaluate(context, epoch)
    run_stage(context, "export", 3)
    means = [evaluation_figures(context.chain, epoch)["heldout"]["green"]["mean"] for epoch in (0, 3)]
    assert means[0] < 0.5
    assert means[1] > means[0] + 0.2
    assert is_complete(context.chain)
    store, chain = context.store, context.chain
    summary = store.require(context.policy_ref(1)).summary["updates"]
    assert summary[0]["ratio"] == 1.0
    exported = load_file(exported_folder(store, chain.target(Node(3, "export"))) / FILE)["logits"]
    assert int(exported.argmax()) == 1
    table = RunView(context).samples(1)
    assert set(table.column("reward").to_pylist()) == {0.0, 1.0}
    assert artifact_table(store, chain.require(1, "rollout").ref).num_rows == 64
    sample = table.filter(pc.not_equal(table.column("advantage"), 0)).column("sample_id")[0].as_py()
    traced = trace_sample(store, chain.require(1, "rollout").ref, sample, [context], trusted=True)
    assert traced["runs"]["chooser"]["updates"] != []
    assert describe_run(context)["finished_epochs"] == 3
    assert "chooser" in run_report(context)
    with pytest.raises(Exception, match="no intermediate states"):
        States(context)
    assert verify_store(store, deep=True)["problems"] == []


def test_its_samples_depend_on_neither_shards_nor_restarts(tmp_path: Path) -> None:
    found = []
    for name, groups in (("one", 1), ("four", 4)):
        config = config_of(tmp_path, f"store.root={tmp_path / name}", f"rollout.groups_per_shard={groups}")
        context = prepare(config)
        stage = stage_run(context, "rollout", 1)
        stage.run_shard(stage.pending()[0])
        stage = stage_run(context, "rollout", 1)
        stage.execute()
        table = artifact_table(context.store, stage.ref)
        ids, log_probs = (table.column(name).to_pylist() for name in ("sample_id", "log_probs"))
        found.append(dict(zip(ids, log_probs, strict=True)))
    assert found[0] == found[1]
    assert len(found[0]) == 64


@pytest.mark.campaign
@pytest.mark.slow
def test_the_command_runs_it(flowmill: FlowmillCommand, tmp_path: Path) -> None:
    config_of(tmp_path)
    done = flowmill("run", str(tmp_path / "chooser.yaml"), "--quiet")
    assert done.returncode == 0, done.stderr
    said = flowmill("status", "chooser", "--root", str(tmp_path / "store"))
    assert said.returncode == 0, said.stderr
    assert "3 of 3 epochs" in said.stdout
    report = flowmill("report", "chooser", "--root", str(tmp_path / "store"), "--out", str(tmp_path / "report.html"))
    assert report.returncode == 0, report.stderr
