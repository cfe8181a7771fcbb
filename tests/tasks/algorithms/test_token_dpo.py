"""DPO over tokens equals its formula, pair by pair, and follows the better text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.tasks.algorithms import TOKEN_ALGORITHMS
from flowmill.tasks.algorithms.token_dpo import TokenDPO
from flowmill.tasks.algorithms.tokens import TokenBatch
from tests.tasks.algorithms.cases import Fixed, token_rows

#: Tokens of four texts in two pairs, the better one last in the first pair and first in the second; one row of padding.
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()
ADVANTAGES = torch.tensor([-1.0, 1.0, 0.5, -0.5, -0.5], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)


def batch_of(advantages: Tensor = ADVANTAGES) -> TokenBatch:
    given = {"mask": MASK, "share": WEIGHTS, "own": MASK[:, 0]}
    return token_rows(advantages.tolist(), dtype=torch.float64, **given)


def drawn(seed: int) -> Tensor:
    return -torch.rand(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(log_probs: Tensor, reference: Tensor, options: dict[str, Any]) -> list[float]:
    """The loss of the two pairs, token by token."""
    found = []
    for better, worse in ((1, 0), (2, 3)):
        gained, likely = [], []
        for row in (better, worse):
            tokens = [place for place in range(4) if MASK[row, place]]
            share = len(tokens) if options.get("length_normalized") else 1
            gained.append(sum(float(log_probs[row, t] - reference[row, t]) for t in tokens) / share)
            likely.append(sum(float(log_probs[row, t]) for t in tokens) / len(tokens))
        margin, beta = gained[0] - gained[1], options.get("beta", 0.1)
        if options.get("form") == "ipo":
            loss = (margin - 1 / (2 * beta)) ** 2
        elif options.get("form") == "hinge":
            loss = max(0.0, 1 - beta * margin)
        else:
            wrong = options.get("label_smoothing", 0.0)
            loss = (1 - wrong) * math.log1p(math.exp(-beta * margin)) + wrong * math.log1p(math.exp(beta * margin))
        found.append(loss - options.get("likelihood", 0.0) * likely[0])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 2.0, "length_normalized": True},
        {"beta": 2.0, "label_smoothing": 0.2},
        {"form": "hinge", "beta": 0.5},
        {"form": "ipo"},
        {"form": "ipo", "length_normalized": True},
        {"likelihood": 0.7},
    ],
    ids=str,
)
def test_each_form_is_its_formula_and_has_its_gradient(options: dict[str, Any]) -> None:
    algorithm: TokenDPO = create(TOKEN_ALGORITHMS, "dpo", options, label="algorithm")
    reference, log_probs = drawn(1), drawn(2).requires_grad_()

    def loss(values: Tensor) -> Tensor:
        models: Any = Fixed(values, reference)
        return algorithm.loss(batch_of(), models).loss

    first, second = by_hand(log_probs.detach(), reference, options)
    assert loss(log_probs).tolist() == pytest.approx([first, first, second, second, 0.0], abs=1e-12)
    assert torch.autograd.gradcheck(loss, (log_probs,))
    start = reference.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(start).sum(), start)
    assert gradient[~MASK].abs().max() == 0, "only tokens that the policy chose count"
    assert (gradient[1][MASK[1]] < 0).all(), "the better text grows likelier"
    assert (gradient[2][MASK[2]] < 0).all()
    assert (gradient[[0, 3]][MASK[[0, 3]]] > 0).all(), "the worse ones do not"


def test_texts_of_one_advantage_are_no_pair() -> None:
    models: Any = Fixed(drawn(1), drawn(2))
    advantages = torch.tensor([1.0, 1.0, 0.5, -0.5, -0.5], dtype=torch.float64)
    loss = TokenDPO(likelihood=1.0).loss(batch_of(advantages), models).loss
    assert loss[:2].tolist() == [0.0, 0.0]
    assert float(loss[2]) > 0


def test_labels_are_smoothed_in_one_form_alone() -> None:
    with pytest.raises(ConfigError, match="label_smoothing belongs to form 'sigmoid'"):
        create(TOKEN_ALGORITHMS, "dpo", {"form": "ipo", "label_smoothing": 0.1}, label="algorithm")
