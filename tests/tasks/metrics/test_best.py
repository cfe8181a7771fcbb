"""The best epoch of a run, by scores on held-out prompts."""

from __future__ import annotations

import pytest

from flowmill.configs.errors import NotCommittedError
from flowmill.tasks.metrics.best import best_epoch, best_of
from flowmill.tasks.metrics.evaluations import Figures
from tests.support.inside import Make, evaluate, prepare


def scores(heldout: float | None, train: float) -> Figures:
    lists = {"train": train} if heldout is None else {"heldout": heldout, "train": train}
    return {split: {"a": {"mean": mean}, "judge": {"mean": 9.0}} for split, mean in lists.items()}


def test_the_best_is_the_earliest_of_the_highest_on_held_out_prompts(make_config: Make) -> None:
    config = make_config("rewards=[{name: jpeg_compressibility, label: a}]")
    heldout = {0: scores(0.1, 0.9), 2: scores(0.5, 0.2), 4: scores(0.5, 0.8), 6: scores(0.4, 0.9)}
    best = best_of(config, heldout)
    assert best is not None
    assert (best.epoch, best.reward, best.count) == (2, 0.5, 4)
    assert str(best) == "mean a on held-out prompts 0.500, the highest of 4 evaluations"
    alone = best_of(config, {0: scores(None, 0.1), 2: scores(None, 0.3)})
    assert alone is not None
    assert (alone.epoch, alone.figure) == (2, "mean a on train prompts")
    assert best_of(config, {}) is None
    assert best_of(config, {0: {"heldout": {"judge": {"mean": 1.0}}}}) is None


def test_no_epoch_is_the_best_without_evaluations_or_below_the_base_model(make_config: Make) -> None:
    context = prepare(make_config())
    with pytest.raises(NotCommittedError, match=r"run 'small' has no evaluation.*small@EPOCH"):
        best_epoch(context)
    evaluate(context, 0)
    with pytest.raises(NotCommittedError, match="is better than epoch 0, before training"):
        best_epoch(context)
