"""Damages of every kind over the files of a real store are seen by verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals, remove
from flowmill.tasks.runs.context import RunContext
from tests.conftest import ConfigFactory
from tests.support.inside import evaluate, prepare, run_epoch, run_stage
from tools.chaos.losses import ACTIONS, files_of, unseen


def finish(context: RunContext, epochs: int) -> None:
    evaluate(context, 0)
    for epoch in range(1, epochs + 1):
        run_epoch(context, epoch)
    evaluate(context, epochs)
    run_stage(context, "export", epochs)


def simple(make_config: ConfigFactory) -> RunContext:
    context = prepare(make_config("run.epochs=1"))
    run_epoch(context, 1)
    evaluate(context, 1)
    return context


def manifold(make_config: ConfigFactory) -> RunContext:
    """Two runs of two stores for trajectories, an average, settings of two days, a forced attempt, removed rollouts."""
    context = prepare(make_config())
    finish(context, 2)
    finish(prepare(make_config("evaluate.images=2")), 2)
    run_stage(context, "score", 2, "jpeg_compressibility", force=True)
    others = ("run.name=other", "rollout.store=parquet", "optimize.ema={decay: 0.9}", "run.epochs=1")
    finish(prepare(make_config(*others)), 1)
    for removal in plan_removals(context.store, Retention(keep_epochs=1)):
        remove(context.store, removal)
    return context


@pytest.mark.parametrize(
    ("made", "tries"), [(simple, 30), pytest.param(manifold, 300, marks=pytest.mark.campaign)], ids=["few", "hundreds"]
)
def test_every_damage_is_seen(
    make_config: ConfigFactory, made: Callable[[ConfigFactory], RunContext], tries: int
) -> None:
    root = Path(made(make_config).store.root.uri)
    assert len(files_of(root)) > tries / len(ACTIONS), "each is deleted once at most"
    assert unseen(root, tries=tries, seed=0) == []
