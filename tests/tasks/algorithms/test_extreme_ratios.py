"""Log-probs that are 1e4 nats apart: every algorithm has a finite gradient, and exactly 0 where it clips or masks."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.tasks.algorithms.diffusion import DiffusionBatch, ForwardBatch, TransitionBatch
from flowmill.tasks.algorithms.objectives import clipped_surrogate
from flowmill.tasks.algorithms.ratios import LARGEST_LOG_RATIO, policy_ratio
from flowmill.tasks.algorithms.token_objectives import masked_sum, token_kl
from tests.golden.algorithms2026.rows import given
from tests.support.toy import SHAPE, draws, liking, noised, states, transitions, vector
from tests.tasks.algorithms.cases import EVERY, EVERY_TOKEN, MASK, Fixed, Options, make, make_token, token_rows

FAR = 1e4
#: The last row only pads; the first and the fourth are on the clipped side of a ratio.
ADVANTAGES, SIGNS = [1.0, 1.0, -1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0, 1.0]
CLIPPED = [0, 3]


def single(value: Any) -> Any:
    """Return float64 tensors, and dataclasses that hold them, in float32."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {each.name: single(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **own)
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float64 else value


def extreme(data: str, velocity: Tensor) -> tuple[DiffusionBatch, Tensor]:
    """Return rows and their behavior policy's velocities; log-ratios are about ``FAR`` with the signs of ``SIGNS``."""
    levels, signs = [0.9, 0.7, 0.5, 0.4, 0.3], vector(SIGNS)
    if data == "states":
        return states(rows=5), velocity.double()
    if data == "transitions":
        rows: TransitionBatch = transitions(ADVANTAGES, vector([0.0] * 5), sigma=levels)
        return dataclasses.replace(rows, old_log_probs=rows.old_log_probs - FAR * signs), velocity.double() + 1.0
    made: ForwardBatch = noised(ADVANTAGES, [0, 0, 1, 1, 2], sigma=levels)
    # Rows whose errors are to have grown have them now, the others had them before.
    return made, made.target + torch.where(signs > 0, FAR**0.5, 0.0).reshape(-1, 1, 1)


@EVERY
def test_of_latents(name: str, options: Options) -> None:
    algorithm = make(name, {**options, **({"clip_range": 0.2} if name in ("awm", "v_grpo") else {})})
    rows, behavior = extreme(algorithm.requires.data, torch.zeros(5, *SHAPE))
    velocity = torch.zeros(5, *SHAPE, dtype=torch.float64)
    if isinstance(rows, ForwardBatch):
        velocity = rows.target + torch.where(vector(SIGNS) < 0, FAR**0.5, 0.0).reshape(-1, 1, 1)
        rows = dataclasses.replace(rows, gradients=draws(1, 5, *SHAPE)[0])
    rows = dataclasses.replace(rows, weights=vector([1, 1, 1, 1, 0]), count=4)
    leaf = velocity.float().requires_grad_()
    models = given(leaf, behavior.float(), torch.zeros(5, *SHAPE))
    models.rewards = liking
    found = algorithm.loss(single(rows), models)
    (slope,) = torch.autograd.grad((found.loss * rows.weights.float()).sum(), leaf)
    assert bool(found.loss.isfinite().all())
    assert bool(slope.isfinite().all())
    assert algorithm.requires.approx_kl == ("approx_kl" in found.metrics)
    assert all(bool(values.isfinite().all()) for values in found.metrics.values())
    assert not slope[4].any()
    other = {"kl_coef", "from_means"} & set(options) or options.get("surrogate") == "spo" or name == "fdfo"
    if hasattr(algorithm, "clip_range") and not other:
        assert not slope[CLIPPED].any()


@pytest.mark.parametrize("padding", [FAR, -FAR, float("inf"), -float("inf"), float("nan")])
@EVERY_TOKEN
def test_of_tokens(name: str, options: Options, padding: float) -> None:
    algorithm, mask = make_token(name, options), MASK
    far = torch.where(mask, FAR * torch.tensor(SIGNS)[:, None], padding)
    leaf = far.clone().requires_grad_()
    rows = token_rows(
        ADVANTAGES,
        sampled_log_probs=torch.where(mask, -far, 0.0),
        token_advantages=torch.tensor(ADVANTAGES)[:, None] * mask if algorithm.requires.per_token else None,
    )
    found = algorithm.loss(rows, Fixed(leaf, torch.where(mask, 0.0, -padding)))
    every = sum(found.other_losses.values(), found.loss)
    (slope,) = torch.autograd.grad((every * rows.weights).sum(), leaf)
    assert bool(every.isfinite().all())
    assert bool(slope.isfinite().all())
    assert algorithm.requires.approx_kl == ("approx_kl" in found.metrics)
    assert all(bool(values.isfinite().all()) for values in found.metrics.values())
    assert not slope[~mask].any()
    assert not slope[4].any()
    if (
        name not in ("dpo", "kto", "apo_zero", "sft")
        and algorithm.surrogate == "clip"
        and not algorithm.kl_coef
        and not found.other_losses
    ):
        assert not slope[CLIPPED].any()


def test_the_overflows_that_were_found() -> None:
    """As reported: 0 times an infinite gradient was NaN."""
    log_ratio = torch.tensor([[200.0, 0.1]], requires_grad=True)
    clipped_surrogate(log_ratio, torch.ones(1, 1), (0.2, 0.2)).sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [[0.0, pytest.approx(-1.10517, rel=1e-5)]]
    other = torch.tensor([200.0], requires_grad=True)
    clipped_surrogate(other, torch.ones(1), (0.2, 0.2)).sum().backward()
    assert other.grad is not None
    assert other.grad.tolist() == [0.0]
    log_probs = torch.tensor([[-1.0, -100.0]], requires_grad=True)
    kl = token_kl(log_probs, torch.tensor([[-1.5, 0.0]]), "k3")
    masked_sum(kl, torch.tensor([[True, False]])).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[pytest.approx(1 - 0.606531, rel=1e-5), 0.0]]


def test_a_ratio_has_the_bits_of_exp_up_to_the_bound_and_pulls_back_beyond_it() -> None:
    inside = torch.cat([torch.linspace(-200, LARGEST_LOG_RATIO, 1001), torch.tensor([-0.0])]).requires_grad_()
    torch.testing.assert_close(policy_ratio(inside), inside.exp(), rtol=0, atol=0)
    slopes = [torch.autograd.grad(values.sum(), inside)[0] for values in (policy_ratio(inside), inside.exp())]
    torch.testing.assert_close(*slopes, rtol=0, atol=0)
    beyond = torch.tensor([20.0, 21.0, 1e4], requires_grad=True)
    (slope,) = torch.autograd.grad(clipped_surrogate(beyond, -torch.ones(3), (0.2, 0.2)).sum(), beyond)
    assert slope.tolist() == [pytest.approx(4.851652e8, rel=1e-6)] * 3


def test_nothing_else_exponentiates() -> None:
    """But ``ratios.py``, and the softmax of ``objectives.py``, whose exponents are at most 0."""
    found = {}
    for file in Path("tasks/algorithms").glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        found[file.name] = [node.attr for node in calls if node.attr in ("exp", "exp_", "expm1", "exp2")]
    expected = {"ratios.py": ["exp", "expm1"], "objectives.py": ["exp"]}
    assert {name: names for name, names in found.items() if names} == expected
