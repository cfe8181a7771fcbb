"""Deletions, swaps and doublings over the files of a real store are seen by verify."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.losses import unseen
from tests.conftest import ConfigFactory
from tests.support.inside import evaluate, prepare, run_epoch


def test_what_is_lost_swapped_or_doubled_is_seen(make_config: ConfigFactory) -> None:
    context = prepare(make_config("run.epochs=1"))
    run_epoch(context, 1)
    evaluate(context, 1)
    assert unseen(Path(context.store.root.uri), tries=30, seed=0) == []
