"""Evaluations of another size than rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError
from flowmill.tasks.checks.check import check_config
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("evaluate.height=20",), r"evaluate\.height is 20, but this model takes multiples of"),
        (("evaluate.width=48",), r"evaluate\.width is 48, but .* has positions for 32 pixels at most"),
        (("evaluate.frames=5",), r"evaluate\.frames is 5 and model\.frames is 1: one makes images"),
    ],
)
def test_a_size_that_the_model_cannot_make_is_refused(
    make_config: ConfigFactory, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(make_config(*settings))


def test_where_prompts_come_with_images_it_is_refused() -> None:
    from flowmill.configs.load import load_config
    from tests.conftest import ROOT

    config = load_config(ROOT / "configs" / "tiny_flux1_kontext.yaml", ["evaluate.height=128"])
    with pytest.raises(ConfigError, match=r"evaluate: height, width and frames are set, but prompts of .* come"):
        check_config(config)
