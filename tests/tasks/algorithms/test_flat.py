"""Data of no size or spread has no direction: divisions by the size of the data give finite numbers, and 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.models.maths.guidance import norm_preserving_guided, rescaled_guided
from flowmill.tasks.advantages.groups import (
    Normalizer,
    composed,
    contributions,
    diversity_weighted,
    gdpo_advantages,
    group_advantages,
    running_advantages,
)
from flowmill.tasks.advantages.tokens import explained_variance, whitened
from flowmill.tasks.algorithms.climbing import scaled_slopes
from flowmill.tasks.algorithms.crd import crd_error
from flowmill.tasks.algorithms.objectives import adaptive_error, dgpo_weight, loser_share, unit_softmax
from flowmill.tasks.algorithms.reward_gradient import RewardGradient
from flowmill.tasks.algorithms.trends import correlation
from flowmill.tasks.modalities.gradients import RewardGradients
from flowmill.tasks.training.metrics import entry
from tests.support.toy import SHAPE, START, Toy, draws, models_of, noised, vector

#: Sizes of slopes, spreads and predictions: usual ones, those whose squares underflow, denormal ones, none at all.
SIZES = [1.0, 1e-12, 1e-20, 1e-23, 9e-27, 1e-40, 0.0]
GROUPS, UNITS = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1])
SIGN, EVERY = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4, dtype=torch.bool)
BARE = Normalizer(epsilon=0.0)

#: Of (4, 2, 3) draws of a size everything that is divided by their norm, mean or spread.
DIVIDED: dict[str, Callable[[Tensor], Any]] = {
    "slopes": lambda x: scaled_slopes(x, 0.3),
    "guidance of one norm": lambda x: norm_preserving_guided(x, 2 * x, 3.0),
    "guidance of one spread": lambda x: rescaled_guided(x, 2 * x, 3.0, 0.7),
    "CRD": lambda x: crd_error(x, torch.zeros_like(x), adaptive=True),
    "adaptive": lambda x: adaptive_error(x, (x, torch.zeros_like(x), torch.full((4,), 0.5))),
    "SDPO": lambda x: loser_share(x, SIGN, torch.ones(4), UNITS, 0.5),
    "DGPO": lambda x: dgpo_weight(SIGN, x[:, 0, 0], x[:, 0, 1], UNITS, 1e3),
    "softmax": lambda x: unit_softmax(x[:, 0, 0], UNITS, 1e-3, among=x[:, 0, 0] > 0.5),
    "group": lambda x: group_advantages(x[:, 0, 0], GROUPS, BARE),
    "global": lambda x: group_advantages(x[:, 0, 0], GROUPS, Normalizer(std="global", epsilon=0.0, floor="max")),
    "gdpo": lambda x: gdpo_advantages([x[:, 0, 0], -x[:, 0, 0]], [1.0, 1.0], GROUPS, BARE),
    "running": lambda x: running_advantages(x[:, 0, 0], GROUPS, [x[:1, 1, 0]] * 2, BARE, buffer=9, min_count=2),
    "standardized": lambda x: composed(x[:, 0, 0], standardize=True),
    "contributions": lambda x: torch.tensor(contributions([x[:, 0, 0], x[:, 0, 1]], GROUPS) or [0.0]),
    "diversity": lambda x: diversity_weighted(SIGN, GROUPS, x[:, 0, 0].abs()),
    "whitened": lambda x: whitened(x[:, 0], torch.ones(4, 3, dtype=torch.bool)),
    "explained": lambda x: torch.tensor(explained_variance(x[:, 0, 0], x[:, 0, 1], EVERY)),
    "correlation": lambda x: torch.tensor(correlation(x[:, 0, 0], x[:, 0, 1]) or 0.0),
}

#: Of these the ones that a loss is differentiated through.
DIFFERENTIATED = ("guidance of one norm", "guidance of one spread", "CRD", "adaptive")


@pytest.mark.parametrize("size", [*SIZES, 1e-200, 1e-320])
@pytest.mark.parametrize("name", DIVIDED)
def test_all_that_divides_by_the_size_of_data_gives_numbers(name: str, size: float) -> None:
    values = draws(1, 4, 2, 3)[0] * size
    for given in (values, values.float()):
        found = DIVIDED[name](given)
        first = found[0] if isinstance(found, tuple) else found
        assert bool(first.isfinite().all()), first
        if name in DIFFERENTIATED:
            leaf = given.clone().requires_grad_()
            (slope,) = torch.autograd.grad(DIVIDED[name](leaf).sum(), leaf)
            assert bool(slope.isfinite().all())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", ["bounded", "linear"])
def test_a_flat_reward_moves_nothing_and_is_counted(target: Any, size: float) -> None:
    rows = noised([1.0, 1.0], [0, 1], sigma=(0.3, 0.7))
    slopes = draws(1, 2, *SHAPE)[0].float()
    # The second row alone is of that size.
    rows = _with(rows, torch.stack([slopes[0], slopes[1] * size]))
    usual = RewardGradient(target=target).loss(_with(rows, slopes), models_of(Toy(vector(START), vector(START))))
    toy = Toy(vector(START), vector(START))
    found = RewardGradient(target=target).loss(rows, models_of(toy))
    flat = size < torch.finfo(torch.float32).tiny
    assert found.metrics["flat"].tolist() == [0.0, float(flat)]
    assert float(found.metrics["gradient_rms"][1]) == pytest.approx(
        0.0 if flat else size * float(usual.metrics["gradient_rms"][1]), rel=1e-5, abs=0
    )
    assert bool(found.loss.isfinite().all())
    assert float(found.loss[0]) == float(usual.loss[0])
    (slope,) = torch.autograd.grad(found.loss[1], toy.theta)
    assert bool(slope.isfinite().all())
    if target == "bounded":
        assert float(found.loss[1]) == (0.0 if flat else pytest.approx(float(usual.loss[1]), rel=1e-5))
        assert bool(slope.any()) is not flat


def _with(rows: Any, slopes: Tensor) -> Any:
    return replace(rows, gradients=slopes)


def test_slopes_of_usual_sizes_keep_their_bits() -> None:
    slopes = draws(1, 64, *SHAPE)[0].float() * 10 ** torch.linspace(-9, 9, 64).reshape(-1, 1, 1)
    rms = (slopes**2).flatten(1).mean(1).sqrt()
    found, size, flat = scaled_slopes(slopes, 0.3)
    assert torch.equal(size, rms)
    assert torch.equal(found, (0.3 / rms).reshape(-1, 1, 1) * slopes)
    assert not flat.any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rewards_that_cancel_leave_no_slope(dtype: str) -> None:
    """The sum of two opposite slopes is the rounding of their storage."""
    one = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    noise = np.random.default_rng(1).uniform(-0.4, 0.4, SHAPE).astype(np.float32) * np.finfo(dtype).eps
    opposite = -2 * one * (1 + noise)
    # A third of the size of one is more than rounding.
    for other, cancels in ((opposite, True), (-1.4 * one, False)):
        parts = [(1.0, stored(one, dtype)), (0.5, stored(other, dtype))]
        total = RewardGradients(parts=parts).of("s")
        assert bool(total.any()) is not cancels
        if not cancels:
            np.testing.assert_allclose(total, one + 0.5 * other, rtol=1e-6)


def stored(gradient: np.ndarray, dtype: str) -> Any:
    rms = float(np.sqrt((gradient**2).mean()))
    return SimpleNamespace(
        of=lambda name: gradient, rms=lambda name: rms, rounding=lambda name: rms * np.finfo(dtype).eps
    )


def test_weights_that_are_all_0_have_no_effective_samples() -> None:
    means = {"importance": 0.0, "importance_squared": 0.0, "share_importance": 1.0, "share_importance_squared": 1.0}
    assert entry(1, 1, 0.0, means)["effective_samples"] == 0.0
