"""Runs that start from the policy of another run of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowmill.configs.errors import ConfigError, RunConflictError
from flowmill.configs.load import parse_config
from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals, remove
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.inputs.weight_sources import Weights, exported_folder
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runs.staleness import Freshness, status_of
from flowmill.tasks.runs.start import check_start
from flowmill.tasks.specs.graph import policy_after
from tests.support.inside import Make, evaluate, prepare, run_epoch, run_stage, stored_shards, updates_of
from tests.support.language_models import texts_data
from tests.tasks.stages.test_stages import stored

LORA = "model.lora={rank: 2, alpha: 4}"
FEW = (
    "rollout.prompts_per_epoch=1",
    "rollout.group_size=2",
    "optimize.ema={decay: 0.5}",
    "optimize.algorithm.options={kl_coef: 0.1}",
    "advantage.kl_coef=0.1",
)
SECOND = ("run.name=second", "run.seed=5", "model.start=small@1", *FEW)


@pytest.fixture(params=[LORA, "model.lora=null"], ids=["lora", "full"])
def chained(make_config: Make, request: pytest.FixtureRequest) -> tuple[RunContext, RunContext]:
    """A run of one epoch, and one that starts from it."""
    first = prepare(make_config(request.param, *FEW))
    run_epoch(first, 1)
    return first, prepare(make_config(request.param, *SECOND))


def first_update(context: RunContext, epoch: int = 1) -> Any:
    return updates_of(context, epoch)[0]


def reference_kl(context: RunContext, epoch: int) -> list[float]:
    """Return the KL to the reference of all trained steps of an epoch's samples."""
    tables = [shard.table for shard in stored_shards(context, epoch, "rollout")]
    return [kl for table in tables for row in table.column("reference_kl").to_pylist() for kl in row]


def test_training_starts_from_the_average_which_is_also_the_reference(chained: tuple[RunContext, RunContext]) -> None:
    first, second = chained
    average, trained = (stored(first, 1, each.value) for each in (Weights.AVERAGE, Weights.TRAINED))
    started = stored(second, 0, Weights.TRAINED.value)
    assert all(torch.equal(started[name], average[name]) for name in average)
    assert not all(torch.equal(started[name], trained[name]) for name in average)
    run_epoch(second, 1)
    # To the base model the first run has a KL already.
    assert first_update(second)["kl"] < 1e-10
    run_epoch(second, 2)
    run_epoch(first, 2)
    assert first_update(second, 2)["kl"] > 1e-8 < first_update(first, 2)["kl"]
    assert max(reference_kl(second, 1)) < 1e-10 < max(reference_kl(second, 2))


@pytest.mark.campaign_cases("full")
@pytest.mark.slow_cases("lora")
def test_the_start_is_part_of_the_policys_identity_and_outlives_its_run(
    chained: tuple[RunContext, RunContext], make_config: Make
) -> None:
    first, second = chained
    policy = first.policy_ref(1)
    manifest = second.store.require(second.policy_ref(0))
    digest = first.store.require(policy).digest
    assert manifest.options["start"] == {"policy": str(policy), "digest": digest, "weights": "ema.safetensors"}
    assert describe_run(second)["start"] == {"run": "small@1", "policy": str(policy)}
    lora = LORA if second.config.model.lora else "model.lora=null"
    run_epoch(first, 2)
    other = prepare(make_config(lora, *SECOND, "run.name=other", "model.start=small@2"))
    assert other.policy_ref(0) != second.policy_ref(0)
    with pytest.raises(RunConflictError, match=r"model.start: 'small@1' -> 'small@2'"):
        begin_run(make_config(lora, *SECOND, "model.start=small@2"))
    run_epoch(second, 1)
    for removal in plan_removals(first.store, Retention(forget=["small"], older_than_s=0)):
        remove(first.store, removal)
    assert not first.store.manifest(policy)
    again = begin_run(make_config(lora, *SECOND))
    assert status_of(again.chain, policy_after(1)).state is Freshness.FRESH
    run_epoch(again, 2)
    for name in ("evaluate", "judge"):
        assert again.chain.find(0, name) is None
    evaluate(again, 2)
    run_stage(again, "export", 2)
    card = exported_folder(again.store, again.chain.require(2, "export").ref) / "README.md"
    assert f"Training started from the policy `{policy}`." in card.read_text()
    assert open_run(again.store.root.uri, "second", reads=True).policy_ref(2) == again.policy_ref(2)


NO_STARTS = [
    (["model.start=smal@1"], "there is no run 'smal' in .*Did you mean 'small'"),
    (["model.start=small@7"], "run 'small' has no policy after epoch 7; its last is that after epoch 1"),
    (["model.lora={rank: 3, alpha: 4}"], r"trains adapters \(rank 2, alpha 4\), this config adapters \(rank 3"),
    (["model.lora=null"], "this config all weights. Set model.lora as in that run"),
    (["model.policy=flux1"], "trains another base model"),
    (
        ["model.path=null", "model.build=digits"],
        r"another base model \(sd3, tiny_base\) than this config \(sd3, digits",
    ),
    (["store.root=nowhere"], "there is no store at 'nowhere'. Train that run first"),
]


def test_what_cannot_be_a_start_is_refused_before_the_run_begins(make_config: Make) -> None:
    first = prepare(make_config(LORA, *FEW))
    run_epoch(first, 1)
    for overrides, message in NO_STARTS:
        config = make_config(LORA, *SECOND, *overrides)
        for begin in (check_start, begin_run) if overrides[0] != "store.root=nowhere" else (check_start,):
            with pytest.raises(ConfigError, match=message):
                begin(config)
    assert begin_run(make_config(LORA, *FEW)).run.describe(), "the store is as before"
    assert not Path("nowhere").exists()


def test_only_one_start_and_only_run_at_epoch(make_config: Make) -> None:
    with pytest.raises(ConfigError, match=r"start and lora.start both give the weights"):
        make_config("model.start=small@1", "model.lora={start: adapter}")
    with pytest.raises(ConfigError, match=r"model\.start"):
        make_config("model.start=small")


def test_a_language_model_starts_from_a_fine_tuned_one(tmp_path: Path) -> None:
    data = texts_data(tmp_path)
    data["model"]["lora"] = {"rank": 2, "alpha": 4}
    given = {
        "data": {"train": data["prompts"]["train"], "sample": "answer"},
        "prompts": {"heldout": data["prompts"]["heldout"]},
    }
    tuned = prepare(parse_config({**data, **given, "optimize": {**data["optimize"], "algorithm": "sft"}}, where="test"))
    run_epoch(tuned, 1)
    data["run"]["name"], data["model"]["start"] = "rl", "texts@1"
    data["optimize"]["algorithm"] = {"name": "grpo", "options": {"kl_coef": 0.1}}
    config = parse_config(data, where="test")
    remember(config)
    context = prepare(config)
    started, trained = stored(context, 0, Weights.TRAINED.value), stored(tuned, 1, Weights.TRAINED.value)
    assert all(torch.equal(started[name], trained[name]) for name in trained)
    run_epoch(context, 1)
    assert first_update(context)["kl"] < 1e-9
    run_epoch(context, 2)
    assert first_update(context, 2)["kl"] > 1e-9
