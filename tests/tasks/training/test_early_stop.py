"""``optimize.stop_kl``: which updates of an epoch are left out, on any ranks and after any kill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import RunConfig
from tasks.algorithms.base import Requirements, RowLoss
from tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels
from tasks.checks.check import check_config
from tasks.metrics.alerts import Watcher
from tasks.metrics.tracked import epoch_content
from tasks.runs.context import RunContext
from tasks.runs.opening import open_run
from tasks.runtime.ranks import Ranks
from tests.support.inside import prepare, run_epoch
from tests.tasks.stages.test_stages import Stop, stop_after
from tests.tasks.training.test_updates import Linear, train

Make = Callable[..., RunConfig]

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


@pytest.mark.parametrize(("limit", "made"), [(0.5, 1), (1.0, 2), (99.0, 4)])
def test_an_update_above_the_limit_and_all_after_it_are_left_out(limit: float, made: int) -> None:
    whole, _ = train(Moving(), updates=4, learning_rate=0.5)
    kls = [entry["approx_kl"] for entry in whole.metrics]
    expected = next((number for number, kl in enumerate(kls) if kl > limit), 4)
    state, done = train(Moving(), updates=4, learning_rate=0.5, stop_kl=limit)
    assert done == [*range(1, expected + 1)]
    assert state.metrics == whole.metrics[:expected]
    assert state.total_updates == expected
    assert state.left_out == ({} if expected == 4 else {"left_out": 4 - expected, "left_out_kl": kls[expected]})
    assert state.trainable.parameters()[0].grad is None


class OtherRankMoved(Ranks):
    """Sums figures with those of a rank whose rows moved further."""

    def sum(self, values: Tensor) -> Tensor:
        return values + 2.0


def test_all_ranks_follow_the_sum_of_their_rows() -> None:
    state, done = train(Moving(), updates=4, learning_rate=1e-6, stop_kl=1.0, ranks=OtherRankMoved())
    assert done == []
    assert state.left_out["left_out"] == 4


def test_a_run_says_what_it_left_out(make_config: Make, tmp_path: Path) -> None:
    plain = prepare(make_config(f"store.root={tmp_path / 'plain'}", *FOUR))
    run_epoch(plain, 1)
    whole = summary_of(plain)
    assert set(whole) == {"updates"}
    kls = [update["approx_kl"] for update in whole["updates"]]
    assert kls[0] == 0 < kls[1]
    stopped = prepare(make_config(*FOUR, f"optimize.stop_kl={kls[1] / 2}"))
    run_epoch(stopped, 1)
    found = summary_of(stopped)
    assert found["updates"] == whole["updates"][:1]
    assert (found["left_out"], found["left_out_kl"]) == (3, pytest.approx(kls[1], rel=1e-6))
    figures = Watcher(stopped.chain).history().epochs[0]
    assert figures["optimize/left_out"] == 3
    assert figures["optimize/approx_kl/max"] == found["left_out_kl"]
    logged = epoch_content(stopped.chain, 1)
    assert logged is not None
    assert [(point.value, point.step) for point in logged.points if point.key == "optimize/left_out"] == [(3, 1)]
    # A limit that is never reached changes no update, and says so.
    calm = prepare(make_config(f"store.root={tmp_path / 'calm'}", *FOUR, "optimize.stop_kl=99"))
    run_epoch(calm, 1)
    assert summary_of(calm) == {**whole, "left_out": 0}


@pytest.mark.parametrize("done", [0, 1])
def test_a_kill_changes_nothing_of_it(make_config: Make, tmp_path: Path, done: int) -> None:
    plain = prepare(make_config(f"store.root={tmp_path / 'plain'}", *FOUR))
    run_epoch(plain, 1)
    limit = summary_of(plain)["updates"][1]["approx_kl"]
    limited = [*FOUR, f"optimize.stop_kl={limit}"]
    whole = prepare(make_config(f"store.root={tmp_path / 'whole'}", *limited))
    broken = prepare(make_config(*limited))
    stop_after(broken, done)
    with pytest.raises(Stop):
        run_epoch(broken, 1)
    again = open_run(broken.store.root.uri, "small")
    for context in (whole, again):
        for epoch in (1, 2):
            run_epoch(context, epoch)
    assert summary_of(whole)["left_out"] > 0
    assert again.chain.digest() == whole.chain.digest()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimize.stop_kl=0"], "'optimize.stop_kl' is 0"),
        (["optimize.stop_kl=0.1", "optimize.updates_per_epoch=1"], "an epoch has one update, before which"),
        (["optimize.stop_kl=0.1", "optimize.algorithm=nft", "rollout.plan={name: final}"], "'nft' has no policy ratio"),
    ],
)
def test_a_limit_that_would_do_nothing_is_refused(make_config: Make, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(make_config(*overrides))
    assert expected in str(error.value)
