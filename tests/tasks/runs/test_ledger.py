"""Working times are sums: they do not grow with the number of shards."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from flowmill.tasks.runs import progress
from flowmill.tasks.runs.progress import Ledger


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    clock = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    return Ledger()


def test_overlapping_work_counts_once_and_each_stage_wholly(ledger: Ledger) -> None:
    """The clock strikes with each question: a from 1 to 4, b from 2 to 3, c from 5 to 6, a again from 7 to 8."""
    with ExitStack() as stack:
        stack.enter_context(ledger.work("a"))
        with ledger.work("b"):
            pass
    for name in ("c", "a"):
        with ledger.work(name):
            pass
    assert {name: ledger.seconds(name) for name in ledger.stages()} == {"b": 1.0, "a": 4.0, "c": 1.0}
    assert (ledger.times("a"), ledger.typical("a"), ledger.typical("none")) == (2, 2.0, float("inf"))
    assert ledger.busy() == 3.0 + 1.0 + 1.0
    assert ledger.overhead() == 9.0 - 5.0


def test_work_that_goes_on_counts_as_busy(ledger: Ledger) -> None:
    with ledger.work("a"):
        assert ledger.busy() == 1.0
        assert ledger.seconds("a") == 0.0


def test_what_is_held_does_not_grow_with_shards(ledger: Ledger) -> None:
    sizes = []
    for _ in range(3):
        for _ in range(200):
            with ledger.work("score"):
                pass
        sizes.append({name: len(value) for name, value in vars(ledger).items() if hasattr(value, "__len__")})
    assert sizes[0] == sizes[1] == sizes[2]
    assert ledger.times("score") == 600
