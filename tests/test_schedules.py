from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.schedules import AllSteps, FinalOnly, Subset, Window


@given(st.integers(2, 30), st.integers(0, 2**62), st.integers(1, 9))
def test_plans_stay_within_the_schedule_and_depend_on_their_seed_only(steps: int, seed: int, epoch: int) -> None:
    for plan in (AllSteps(), Window(size=1), Subset(count=1), FinalOnly(), Window(size=1, mode="progressive")):
        drawn = plan.draw(steps, seed, epoch)
        assert drawn == plan.draw(steps, seed, epoch)
        assert set(drawn.trained) <= set(drawn.stochastic) <= set(range(steps))
        assert set(drawn.states) <= set(range(steps + 1))
        assert all(step in drawn.states and step + 1 in drawn.states for step in drawn.trained)


def test_random_windows_take_every_position_and_never_the_last_step() -> None:
    drawn = {Window(size=3).draw(8, seed, 1).trained for seed in range(300)}
    assert drawn == {tuple(range(start, start + 3)) for start in range(5)}


def test_progressive_windows_slide_and_start_again() -> None:
    plan = Window(size=2, low=1, high=6, mode="progressive", stride=2, epochs_per_shift=3)
    starts = [plan.draw(8, seed, epoch).trained[0] for seed, epoch in enumerate(range(1, 10))]
    assert starts == [1, 1, 1, 3, 3, 3, 1, 1, 1]
    assert Window(size=2, mode="fixed", low=3).draw(8, 5, 7).trained == (3, 4)


def test_subsets_are_drawn_from_their_candidates() -> None:
    drawn = {Subset(count=2, candidates=(1, 2, 5)).draw(8, seed, 1).trained for seed in range(100)}
    assert drawn == {(1, 2), (1, 5), (2, 5)}
    assert Subset(count=1, candidates=(5,)).draw(8, 0, 1).states == (5, 6)


def test_the_final_state_alone() -> None:
    steps = FinalOnly().draw(8, 0, 1)
    assert (steps.stochastic, steps.trained, steps.states) == ((), (), (8,))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Window(size=9), "does not fit into"),
        (Window(size=2, low=7), "does not fit into"),
        (Window(size=2, high=20), "does not fit into"),
        (Subset(count=9), "cannot be drawn"),
        (Subset(count=1, candidates=(8,)), "cannot be drawn"),
    ],
)
def test_plans_that_do_not_fit_say_so(plan: Window, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        plan.draw(8, 0, 1)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="must be 'random'"):
        Window(mode="sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        Window(size=0)
