"""``optimize.stop_kl``: which updates of an epoch are undone and left out, on any ranks and after any kill."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowmill.storage.artifacts.checkpoints import latest_checkpoint
from flowmill.tasks.algorithms.base import Requirements, RowLoss
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels
from flowmill.tasks.inputs.weight_sources import Weights, policy_folder
from flowmill.tasks.metrics.alerts import Watcher
from flowmill.tasks.metrics.tracked import epoch_content
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.runtime.ranks import Ranks
from tests.support.inside import Make, make_stage, prepare, run_epoch, session_of
from tests.tasks.stages.test_stages import Stop, stop_after
from tests.tasks.training.test_updates import Linear, train

FOUR = ["optimize.updates_per_epoch=4", "execution.checkpoint_every=1"]


def summary_of(context: RunContext, epoch: int = 1) -> dict[str, Any]:
    return dict(context.store.require(context.policy_ref(epoch)).summary)


class Moving(Linear):
    """Reports the number of updates before as its KL."""

    requires = Requirements(approx_kl=True)

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        found = super().loss(batch, models)
        moved = (models.trainable.parameters()[0].detach() - torch.tensor([0.3, -0.7])).abs().sum()
        return dataclasses.replace(found, metrics={"approx_kl": torch.full_like(found.loss, float(moved)).detach()})


@pytest.mark.parametrize("limit", [0.5, 1.0, 99.0])
def test_the_update_that_left_the_region_and_all_after_it_are_left_out(limit: float) -> None:
    whole, _ = train(Moving(), updates=4, learning_rate=0.5)
    kls = [entry["approx_kl"] for entry in whole.metrics]
    seen = next((number for number, kl in enumerate(kls) if kl > limit), 4)
    state, done = train(Moving(), updates=4, learning_rate=0.5, stop_kl=limit)
    assert done == [*range(1, seen + 1)]
    assert state.metrics == whole.metrics[:seen]
    # It shows before the next update, so the caller undoes one that was done.
    assert state.left_out == ({} if seen == 4 else {"left_out": 4 - (seen - 1), "left_out_kl": kls[seen]})
    assert state.trainable.parameters()[0].grad is None


class OtherRankMoved(Ranks):
    """Sums figures with those of a rank whose rows moved further."""

    def sum(self, values: Tensor) -> Tensor:
        return values + 2.0


def test_all_ranks_follow_the_sum_of_their_rows() -> None:
    state, done = train(Moving(), updates=4, learning_rate=1e-6, stop_kl=1.0, ranks=OtherRankMoved())
    assert done == []
    assert state.left_out["left_out"] == 4


def files_of(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a policy or of a checkpoint, by file."""
    return {path.name: load_file(path) for path in folder.glob("*.safetensors")}


def test_a_run_undoes_the_update_that_left_the_region(make_config: Make, tmp_path: Path) -> None:
    plain = prepare(make_config(f"store.root={tmp_path / 'plain'}", *FOUR))
    run_epoch(plain, 1)
    whole = summary_of(plain)
    assert set(whole) == {"updates", "kl_epoch", "kl_base", "kl_epoch_limit", "kl_base_limit"}
    kls = [update["approx_kl"] for update in whole["updates"]]
    assert kls[0] == 0 < kls[1] < kls[2]
    # What is left is the state after the first update: the second exceeds the limit, as the third sees.
    broken = prepare(make_config(f"store.root={tmp_path / 'broken'}", *FOUR))
    stop_after(broken, 1)
    with pytest.raises(Stop):
        run_epoch(broken, 1)
    kept = latest_checkpoint(broken.store, make_stage(broken, "optimize", 1).ref)
    assert kept is not None
    assert kept[0] == 1
    stopped = prepare(make_config(*FOUR, f"optimize.stop_kl={(kls[1] + kls[2]) / 2}"))
    run_epoch(stopped, 1)
    found = summary_of(stopped)
    assert found["updates"] == whole["updates"][:1]
    assert (found["left_out"], found["left_out_kl"]) == (3, pytest.approx(kls[2], rel=1e-6))
    assert 0 < found["kl_epoch"] < whole["kl_epoch"]
    policy = files_of(policy_folder(stopped.store, stopped.policy_ref(1)))
    torch.testing.assert_close(policy, files_of(kept[1]), rtol=0, atol=0)
    figures = Watcher(stopped.chain).history().epochs[0]
    assert figures["optimize/left_out"] == 3
    assert figures["optimize/left_out_kl"] == found["left_out_kl"]
    logged = epoch_content(stopped.chain, 1)
    assert logged is not None
    points = {point.key: (point.value, point.step) for point in logged.points}
    assert points["optimize/left_out"] == (3, 1)
    assert points["optimize/kl_epoch"] == (found["kl_epoch"], 1)
    # A limit that is never reached changes no update, and says so.
    calm = prepare(make_config(f"store.root={tmp_path / 'calm'}", *FOUR, "optimize.stop_kl=99"))
    run_epoch(calm, 1)
    assert summary_of(calm) == {**whole, "left_out": 0}


@pytest.mark.parametrize("trained", [[], ["model.lora={rank: 2, alpha: 4}"], ["optimize.ema={decay: 0.5}"]])
def test_the_only_update_of_an_epoch_is_undone(make_config: Make, trained: list[str]) -> None:
    """The first update alone can destroy a policy; undone, it leaves the one before, moments included."""
    context = prepare(make_config(*trained, "optimize.updates_per_epoch=1", "optimize.stop_kl=1e-15"))
    said = list[str]()
    context.reporter = Mock(message=said.append)
    for epoch in (1, 2):
        run_epoch(context, epoch)
        found = summary_of(context, epoch)
        assert (found["updates"], found["left_out"]) == ([], 1)
        assert found["left_out_kl"] > 1e-15
    assert next(each for each in said if "stop_kl" in each).startswith("epoch 1: with update 1 of 1 the policy is ")
    first, second = (files_of(policy_folder(context.store, context.policy_ref(epoch))) for epoch in (1, 2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    start = session_of(context).host.trainable(context.policy_ref(0)).state()
    torch.testing.assert_close(first[Weights.TRAINED.value], start, rtol=0, atol=0)
    assert not first.get("optimizer.safetensors")


class Killed:
    """A reporter that raises at a report of training, as a kill would stop it."""

    def __init__(self, at: int) -> None:
        self.left, self.message = at, Mock()

    def progress(self, stage: str, *about: Any) -> None:
        self.left -= stage == "optimize"
        if self.left == 0:
            raise Stop


@pytest.mark.slow
@pytest.mark.campaign_cases("1", "3")
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_kill_changes_nothing_of_it(make_config: Make, tmp_path: Path, at: int) -> None:
    """The third report is of the first update, done again without the second."""
    plain = prepare(make_config(f"store.root={tmp_path / 'plain'}", *FOUR))
    run_epoch(plain, 1)
    limit = summary_of(plain)["updates"][1]["approx_kl"]
    limited = [*FOUR, f"optimize.stop_kl={limit}"]
    whole = prepare(make_config(f"store.root={tmp_path / 'whole'}", *limited))
    broken = prepare(make_config(*limited))
    broken.reporter = Killed(at)
    with pytest.raises(Stop):
        run_epoch(broken, 1)
    again = open_run(broken.store.root.uri, "small")
    for context in (whole, again):
        for epoch in (1, 2):
            run_epoch(context, epoch)
    assert len(summary_of(whole)["updates"]) == 1
    assert again.chain.digest() == whole.chain.digest()


@pytest.mark.parametrize("trained", [[], ["model.lora={rank: 2, alpha: 4}"]])
def test_the_base_model_is_at_distance_0_until_training_moves(make_config: Make, trained: list[str]) -> None:
    """Without a reference in memory full weights are compared with the files of the base model."""
    context = prepare(make_config(*trained, "optimize.learning_rate=1e-30", "optimize.weight_decay=0"))
    run_epoch(context, 1)
    found = summary_of(context)
    assert (found["kl_epoch"], found["kl_base"]) == (pytest.approx(0, abs=1e-12), 0)
