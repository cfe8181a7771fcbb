"""Evaluations of another size than rollouts."""

from __future__ import annotations

import json
from pathlib import Path

from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from tests.conftest import ConfigFactory
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, stored_shards

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
