"""Shards of what is sampled: for many processes or one, whole or killed in the middle, the same samples;
evaluations of another size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics.evaluations import evaluation_figures, grids
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage_run import StageRun
from tests.conftest import ConfigFactory
from tests.support.inside import Make, evaluate, make_stage, prepare, run_epoch, run_stage, stage_run, stored_shards


@pytest.mark.slow
def test_evaluations_do_not_depend_on_shards(make_config: Make, tmp_path: Path) -> None:
    """Of one process or of many, whole or killed in the middle and gone on with: the same samples, scores, pictures."""
    settings = ("evaluate.samples=10", "execution.rollout_batch_size=2", "evaluate.images=9")
    found: dict[str, tuple[str, dict[str, bytes], Any]] = {}
    names: dict[str, list[str]] = {}
    for name, ranks, before in (("one", 1, 0), ("two", 3, 0), ("killed", 1, 2), ("other", 3, 1)):
        changes = (f"store.root={tmp_path / name}", *settings)
        if before:
            begun = stage_run(prepare(make_config(*changes)), "evaluate", 0)
            for shard in begun.pending()[:before]:
                begun.run_shard(shard)
        context = prepare(make_config(*changes, f"execution.processes={ranks}"))
        evaluate(context, 0)
        images, judged = (
            context.chain.require(0, *node).ref for node in (("evaluate",), ("judge", "jpeg_compressibility"))
        )
        names[name] = [record.shard for record in context.store.records(images)]
        pictures = {split: path.read_bytes() for split, path in grids(context.store, judged).items()}
        found[name] = (context.chain.digest(), pictures, evaluation_figures(context.chain, 0))
    assert names["one"][:2] == names["killed"][:2] == ["heldout-000000-000008", "heldout-000008-000010"]
    assert names["two"][:3] == ["heldout-000000-000002", "heldout-000002-000004", "heldout-000004-000006"]
    assert names["other"][:2] == ["heldout-000000-000008", "heldout-000008-000010"]
    assert set(found["one"][1]) == {"heldout", "train"}
    assert found["one"] == found["killed"]
    for other in ("two", "other"):
        assert found[other][:2] == found["one"][:2]
        for split, rewards in found["one"][2].items():
            assert found[other][2][split]["jpeg_compressibility"] == pytest.approx(rewards["jpeg_compressibility"])


def test_an_evaluation_that_one_shard_holds_is_as_it_was(make_config: Make) -> None:
    """One shard per prompt list, with its name: stores of before have such, whole or in the making."""
    context = prepare(make_config())
    evaluate(context, 0)
    images = context.chain.require(0, "evaluate").ref
    assert [record.shard for record in context.store.shards(images)] == ["heldout", "train"]
    larger = prepare(make_config("execution.rollout_batch_size=1", "execution.processes=4"))
    stage = make_stage(larger, "evaluate", 0)
    assert StageRun(stage).reused is False
    assert [shard.name for shard in stage.shards()] == ["heldout", "train"]


def test_rollouts_are_cut_within_groups_for_many_processes(make_config: Make, tmp_path: Path) -> None:
    one = prepare(make_config("execution.rollout_batch_size=2"))
    run_epoch(one, 1)
    many = prepare(
        make_config("execution.rollout_batch_size=2", "execution.processes=8", f"store.root={tmp_path / 'many'}")
    )
    run_epoch(many, 1)
    names = [record.shard for record in many.store.records(many.chain.require(1, "rollout").ref)]
    assert names[:3] == ["000000-000000_0002", "000000_0002-000001", "000001-000001_0002"]
    assert one.chain.digest() == many.chain.digest()


def test_groups_stay_whole_for_rewards_that_compare(make_config: Make) -> None:
    context = prepare(
        make_config("execution.rollout_batch_size=2", "execution.processes=8", "rewards=[{name: diversity}]")
    )
    names = [shard.name for shard in make_stage(context, "rollout", 1).shards()]
    assert names == ["000000-000001", "000001-000002", "000002-000003", "000003-000004"]


@pytest.mark.slow
def test_rewards_that_compare_get_whole_groups_of_what_was_cut(make_config: Make, tmp_path: Path) -> None:
    """Of an evaluation, whose prompts take turns, and of rollouts that were made before such a reward was asked for."""
    digests, names = [], []
    for ranks in (1, 8):
        where = (f"store.root={tmp_path / str(ranks)}", "execution.rollout_batch_size=2", "evaluate.samples=6")
        plain = make_config(*where, f"execution.processes={ranks}")
        context = prepare(plain)
        run_stage(context, "rollout", 1)
        run_stage(context, "evaluate", 0)
        context = prepare(make_config(*where, f"execution.processes={ranks}", "monitors=[{name: diversity}]"))
        run_stage(context, "score", 1, "diversity")
        judging = make_config(*where, f"execution.processes={ranks}", "evaluate.judges=[{name: diversity}]")
        judged = prepare(judging)
        run_stage(judged, "judge", 0, "diversity")
        refs = [context.chain.require(1, "score", "diversity").ref, judged.chain.require(0, "judge", "diversity").ref]
        names.append([[record.shard for record in context.store.records(ref)] for ref in refs])
        digests.append([context.store.require(ref).content for ref in refs])
    assert names[1][0] == ["000000-000001", "000001-000002", "000002-000003", "000003-000004"]
    assert names[0][1] == names[1][1] == ["heldout", "train"]
    assert digests[0] == digests[1]


FEW = ("rollout.prompts_per_epoch=1", "rollout.group_size=2", "evaluate.samples=2")


def shapes(context: RunContext, epoch: int, stage: str) -> set[tuple[int, ...]]:
    shards = stored_shards(context, epoch, stage)
    return {shard.media(row).shape for shard in shards for row in range(shard.table.num_rows)}


def test_evaluations_are_of_their_own_size_and_rollouts_stay_what_they_were(
    make_config: ConfigFactory, tmp_path: Path
) -> None:
    plain = prepare(make_config(*FEW))
    larger = prepare(make_config("run.name=larger", "evaluate.height=32", "evaluate.width=16", *FEW))
    for context in (plain, larger):
        evaluate(context, 0)
        run_epoch(context, 1)
    assert shapes(plain, 0, "evaluate") == shapes(plain, 1, "rollout") == shapes(larger, 1, "rollout") == {(16, 32, 3)}
    assert shapes(larger, 0, "evaluate") == {(32, 16, 3)}
    assert larger.policy_ref(1) == plain.policy_ref(1), "nothing else depends on it"
    assert larger.chain.require(0, "evaluate").ref != plain.chain.require(0, "evaluate").ref
    run_stage(larger, "export", 1)
    folder = exported_folder(larger.store, larger.chain.target(Node(1, "export")))
    call = json.loads((folder / "generation.json").read_text())["call"]
    assert (call["height"], call["width"]) == (32, 16), "the card draws what was evaluated"
