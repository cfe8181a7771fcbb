"""Likelihoods of judgments: by hand, by finite differences, and their sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flowmill.models.maths.preferences import bradley_terry, davidson, expected_preference

DIFFERENCES = torch.tensor([-3.0, -0.5, 0.0, 0.2, 2.0], dtype=torch.float64)
TIE = torch.tensor(0.3, dtype=torch.float64)


def test_bradley_terry_by_hand() -> None:
    found = bradley_terry(torch.tensor([math.log(3), math.log(3), 0.0, math.log(3)]), torch.tensor([1.0, 0, 0.5, 0.5]))
    # P(first) = 3 / 4; a tie is half of each.
    expected = [-math.log(0.75), -math.log(0.25), math.log(2), -(math.log(0.75) + math.log(0.25)) / 2]
    assert found.tolist() == pytest.approx(expected)


def test_davidson_by_hand() -> None:
    # Strengths 4 and 1, nu = 1: first 4 / 7, tie 2 / 7, second 1 / 7.
    difference, nu = torch.full((3,), math.log(4.0)), torch.tensor(0.0)
    found = davidson(difference, torch.tensor([1.0, 0.5, 0.0]), nu)
    assert found.tolist() == pytest.approx([-math.log(share / 7) for share in (4, 2, 1)])
    assert expected_preference(difference, nu).tolist() == pytest.approx([5 / 7] * 3)
    assert expected_preference(torch.tensor([math.log(3)])).item() == pytest.approx(0.75)


def test_without_ties_davidson_is_bradley_terry() -> None:
    never = torch.tensor(-50.0, dtype=torch.float64)
    for preferred in (torch.zeros(5).double(), torch.ones(5).double()):
        torch.testing.assert_close(
            davidson(DIFFERENCES, preferred, never), bradley_terry(DIFFERENCES, preferred), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("preferred", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("loss", [bradley_terry, lambda d, p: davidson(d, p, TIE)], ids=["bradley_terry", "davidson"])
def test_gradients_are_those_of_finite_differences(loss: Callable[[Tensor, Tensor], Tensor], preferred: float) -> None:
    judged, step = torch.full_like(DIFFERENCES, preferred), 1e-6
    given = DIFFERENCES.clone().requires_grad_()
    loss(given, judged).sum().backward()  # type: ignore[no-untyped-call]
    moved = (loss(DIFFERENCES + step, judged) - loss(DIFFERENCES - step, judged)) / (2 * step)
    assert given.grad is not None
    torch.testing.assert_close(given.grad, moved, rtol=1e-6, atol=1e-9)
    if loss is bradley_terry:
        torch.testing.assert_close(given.grad, DIFFERENCES.sigmoid() - judged)


def test_the_gradient_of_the_tie_is_that_of_finite_differences() -> None:
    tie, judged, step = TIE.clone().requires_grad_(), torch.tensor([1, 0.5, 0, 0.5, 0]).double(), 1e-6
    davidson(DIFFERENCES, judged, tie).sum().backward()  # type: ignore[no-untyped-call]
    up, down = (davidson(DIFFERENCES, judged, TIE + each).sum() for each in (step, -step))
    assert tie.grad is not None
    assert tie.grad.item() == pytest.approx(float((up - down) / (2 * step)), rel=1e-6)
