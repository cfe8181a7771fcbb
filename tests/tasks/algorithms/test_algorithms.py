"""Properties of every algorithm: its gradient, whom it moves where, and what pads, ties or is on policy.

The algorithms and their options are those of cases.py.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import Table, create, resolve
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.algorithms.diffusion import ForwardBatch, TransitionBatch
from flowmill.tasks.algorithms.tokens import TokenBatch
from tests.support.toy import BEHAVIOR, REFERENCE, START, Toy, draws, noised, vector
from tests.tasks.algorithms.cases import (
    ADVANTAGES,
    CASES,
    EVERY,
    MASK,
    TOKEN_CASES,
    UNITS,
    Fixed,
    Options,
    chosen,
    gradient,
    linear,
    losses,
    make,
    make_token,
    models_of_linear,
    rows_of,
    scores,
    token_rows,
)

#: Of samples with advantages; of all others the loss is what it teaches.
REWARDED = [(name, options) for name, options in CASES if make(name, options).requires.advantages and name != "sft"]
RATIOS = [(name, options) for name, options in CASES if make(name, options).requires.approx_kl]
#: Ratios of log-probs that were stored.
STORED = [
    (name, options) for name, options in RATIOS if name != "fdfo" and make(name, options).requires.data == "transitions"
]
#: Wide clips, so that no row sits at a kink. The group weight of DGPO has no gradient by definition; with this beta it
#: is 1/2 regardless of the policy.
SMOOTH: dict[str, Options] = {
    **{name: {"clip_range": 0.9} for name in ("grpo", "tempflow", "flash_grpo", "grpo_guard")},
    **{name: {"clip_range": 10.0} for name in ("awm", "v_grpo")},
    "flow_dppo": {"threshold": 1e6},
    "dgpo": {"beta": 1e-13, "clip_range": 1e6},
}
#: Their gradient is not that of the loss: a part of it is frozen by definition.
DETACHED = {"winner_margin", "detach_center"}


def test_every_algorithm_is_in_the_table() -> None:
    assert {name for name, _ in CASES} == set(ALGORITHMS)
    assert {name for name, _ in TOKEN_CASES} == set(TOKEN_ALGORITHMS)


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if not DETACHED & set(case[1])], ids=str)
def test_the_gradient_equals_finite_differences_in_every_parameter(name: str, options: Options) -> None:
    algorithm = make(name, {**options, **SMOOTH.get(name, {})})
    theta, reference, behavior = (vector(values) for values in (START, REFERENCE, BEHAVIOR))
    rows, size, near = rows_of(algorithm), 1e-6, 1e-5
    if name in ("nft", "crd", "v_grpo") or options.get("weighting") == "adaptive":
        rows, theta, behavior = almost_perfect(tiny=name != "crd" or options.get("adaptive", True))
        size, near = 1e-6 if rows.latents.abs().max() > 0.1 else 2e-7, 2e-4
    found = gradient(algorithm, rows, Toy(theta, reference), behavior)
    assert float(found.abs().min()) > 0
    for i in range(len(theta)):
        nudge = torch.zeros_like(theta)
        nudge[i] = size
        with torch.no_grad():
            high, low = (
                losses(algorithm, rows, Toy(theta + sign * nudge, reference), behavior).loss.mean() for sign in (1, -1)
            )
        expected = float(high - low) / (2 * size)
        assert float(found[i]) == pytest.approx(expected, rel=near, abs=1e-6 * float(found.abs().max())), i


def almost_perfect(*, tiny: bool) -> tuple[ForwardBatch, Tensor, Tensor]:
    """Return samples whose errors are below 1e-5, where the self-normalized losses divide by that constant.

    Elsewhere their normalizer is frozen by definition, so that the gradient is not that of the loss.
    """
    size = 2e-6 if tiny else 1.0
    clean, noise = (size * draw for draw in draws(2, len(ADVANTAGES), 2, 3, seed=3))
    rows = noised(ADVANTAGES, UNITS, clean=clean, noise=noise)
    return rows, size * vector(START), size * vector(BEHAVIOR)


def drawn_texts(name: str, options: Options, apart: float) -> tuple[Any, TokenBatch, Tensor, Tensor]:
    """Return an algorithm, texts, and log-probs of the policy and of one that is ``apart`` from it."""
    algorithm = make_token(name, {**options, **({"clip_range": 0.9} if name == "gspo" else {})})
    generator = torch.Generator().manual_seed(0)
    log_probs, noise = (torch.rand(MASK.shape, generator=generator, dtype=torch.float64) - 1 for _ in range(2))
    before = (log_probs + apart * noise) * MASK
    changes = dict.fromkeys(("old_log_probs", "behavior_log_probs", "sampled_log_probs"), before)
    if algorithm.requires.per_token:
        changes["token_advantages"] = vector([1.0, -1.0, 0.5, -2.0, 1.0])[:, None] * noise.abs() * MASK
    rows = token_rows([1.0, -1.0, 0.5, -2.0, 1.0], dtype=torch.float64, **changes)
    return algorithm, rows, log_probs, log_probs + apart * noise.flip(1)


@pytest.mark.parametrize(
    ("name", "options"), [case for case in TOKEN_CASES if "cispo" not in (case[0], case[1].get("surrogate"))], ids=str
)
def test_the_gradient_of_texts_equals_finite_differences(name: str, options: Options) -> None:
    algorithm, rows, log_probs, reference = drawn_texts(name, options, 0.01)

    def loss(values: Tensor) -> Tensor:
        found = algorithm.loss(rows, Fixed(values, reference))
        return sum(found.other_losses.values(), found.loss) * rows.weights

    assert torch.autograd.gradcheck(loss, (log_probs.requires_grad_(),))


@pytest.mark.parametrize(("name", "options"), TOKEN_CASES, ids=str)
def test_tokens_of_rewarded_texts_become_likelier_and_those_of_others_not(name: str, options: Options) -> None:
    algorithm, rows, log_probs, reference = drawn_texts(name, options, 0.0)
    loss = algorithm.loss(rows, Fixed(log_probs.requires_grad_(), reference)).loss
    (slope,) = torch.autograd.grad((loss * rows.weights).sum(), log_probs)
    expected = -torch.sign(rows.advantages * rows.weights)[:, None] * MASK
    if algorithm.requires.desired:
        expected = -rows.weights[:, None] * MASK
    assert torch.equal(torch.sign(slope), expected)


@pytest.mark.parametrize(
    ("name", "options"), [case for case in TOKEN_CASES if make_token(*case).requires.approx_kl], ids=str
)
def test_rounding_makes_no_ratio_of_texts_of_the_policy_itself(name: str, options: Options) -> None:
    algorithm, rows, log_probs, reference = drawn_texts(name, options, 0.01)
    exact = dataclasses.replace(rows, old_log_probs=log_probs * MASK)
    own = dataclasses.replace(rows, own=torch.ones(5, dtype=torch.bool))
    found = [algorithm.loss(each, Fixed(log_probs, reference)) for each in (exact, own, rows)]
    assert torch.equal(found[0].loss, found[1].loss)
    assert torch.equal(found[0].metrics["approx_kl"], found[1].metrics["approx_kl"])
    assert not torch.equal(found[0].metrics["approx_kl"], found[2].metrics["approx_kl"])


@pytest.mark.parametrize(("name", "options"), REWARDED, ids=str)
def test_what_was_rewarded_becomes_likelier_and_what_was_not_less_likely(name: str, options: Options) -> None:
    algorithm, theta = make(name, options), vector(START)
    found = []
    for advantages in ([1.0, -1.0], [-1.0, 1.0]):
        # Steps from one state, or errors left and right of the target of a policy that sits between them.
        level = {"sigma": (0.6, 0.6)} if algorithm.requires.data == "transitions" else {}
        rows = rows_of(algorithm, advantages, behavior=theta, mirrored=True, **level)
        slope = gradient(algorithm, rows, Toy(theta, theta))
        # Only the shift c moves: two mirrored samples lie on opposite sides of it.
        step = torch.cat([torch.zeros(2, dtype=torch.float64), slope[2:]])
        change = scores(rows, theta - 1e-6 * step / step.norm()) - scores(rows, theta)
        assert torch.sign(change).tolist() == torch.sign(vector(advantages)).tolist()
        found.append(slope)
    torch.testing.assert_close(found[0][2:], -found[1][2:], rtol=1e-6, atol=1e-9)


def accepted(table: Table) -> list[tuple[str, Options]]:
    """Return the algorithms with each option at the numbers of 0 and below that it accepts, alone."""
    found = []
    for name in table:
        for option in dataclasses.fields(resolve(table, name, label="algorithm")):
            normalization = {"normalization": "constant"} if option.name == "constant" else {}
            for value in (-5, -5.0, 0, 0.0) if option.init else ():
                options = {option.name: value, **normalization}
                with suppress(ConfigError):
                    create(table, name, options, label="algorithm")
                    found.append((name, options))
    return found


@pytest.mark.parametrize(("name", "options"), accepted(ALGORITHMS), ids=str)
def test_no_number_of_an_option_reverses_what_is_learned(name: str, options: Options) -> None:
    if make(name, options).requires.advantages:
        test_what_was_rewarded_becomes_likelier_and_what_was_not_less_likely(name, options)


@pytest.mark.parametrize(("name", "options"), accepted(TOKEN_ALGORITHMS), ids=str)
def test_no_number_of_an_option_reverses_what_is_learned_of_texts(name: str, options: Options) -> None:
    test_tokens_of_rewarded_texts_become_likelier_and_those_of_others_not(name, options)


@pytest.mark.parametrize(("name", "options"), REWARDED, ids=str)
def test_equal_rewards_move_nothing(name: str, options: Options) -> None:
    """Of a policy that is its behavior policy and its base model."""
    algorithm, theta = make(name, options), vector(START)
    slope = gradient(algorithm, rows_of(algorithm, [0.0] * 4, behavior=theta), Toy(theta, theta))
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)


@EVERY
def test_rows_that_pad_a_batch_change_no_other_row(name: str, options: Options) -> None:
    algorithm = make(name, options)
    rows = rows_of(algorithm)
    pads: dict[str, Tensor] = {"weights": vector([1, 1, 1, 1, 0]), "units": torch.tensor([*UNITS, 2])}
    padded = dataclasses.replace(chosen(rows, [0, 1, 2, 3, 3]), **pads)
    alone, together = Toy(vector(START), vector(REFERENCE)), Toy(vector(START), vector(REFERENCE))
    first, second = losses(algorithm, rows, alone).loss, losses(algorithm, padded, together).loss
    torch.testing.assert_close(second[:4].detach(), first.detach())
    assert bool(second.isfinite().all())
    (expected,) = torch.autograd.grad(first.sum(), alone.theta)
    (found,) = torch.autograd.grad((second * pads["weights"]).sum(), together.theta)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("name", "options"), RATIOS, ids=str)
def test_ratios_of_the_behavior_policy_are_exactly_one(name: str, options: Options) -> None:
    algorithm, behavior = make(name, options), linear(0.5).theta.detach()
    for on_policy in (True, False):
        rows = rows_of(algorithm, behavior=behavior)
        result = algorithm.loss(rows, models_of_linear(linear(0.5), on_policy=on_policy))
        assert result.metrics["ratio"].tolist() == [1.0] * 4
        assert result.metrics["approx_kl"].tolist() == [0.0] * 4


@pytest.mark.parametrize(("name", "options"), STORED, ids=str)
def test_before_the_first_update_rounding_makes_no_ratio(name: str, options: Options) -> None:
    """Of rows whose old log-probs are the policy's own ratios are 1 and gradients plain; of others nothing changes."""
    algorithm, policy = make(name, options), linear(0.65)
    exact = rows_of(algorithm, behavior=policy.theta.detach())
    assert isinstance(exact, TransitionBatch)
    assert exact.old_means is not None
    moved = {"old_log_probs": exact.old_log_probs + 1e-3, "old_means": exact.old_means + 1e-3}
    rounded, own = dataclasses.replace(exact, **moved), torch.arange(4) < 2

    def look(rows: TransitionBatch) -> tuple[Tensor, Tensor, list[Tensor]]:
        found = losses(algorithm, rows, policy, None)
        gradients = [torch.autograd.grad(loss, policy.theta, retain_graph=True)[0] for loss in found.loss]
        return found.metrics["ratio"], found.metrics["gap"], gradients

    ratio, gap, gradients = look(dataclasses.replace(rounded, own=own))
    assert torch.equal(ratio[own], torch.ones(2, dtype=torch.float64))
    assert (gap > 0).all(), "what the rounding was is told, though no ratio is made of it"
    (_, _, plain), (apart, _, off) = look(exact), look(rounded)
    assert torch.equal(ratio[~own], apart[~own])
    assert (apart != 1).all()
    torch.testing.assert_close(torch.stack(gradients), torch.stack([*plain[:2], *off[2:]]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), STORED, ids=str)
def test_the_gap_is_in_the_unit_of_what_is_clipped_or_masked(name: str, options: Options) -> None:
    """It is what the loss makes of rows whose old log-probs and means are the rollout's, not the policy's own."""
    algorithm, policy = make(name, options), linear(0.31)
    rows = rows_of(algorithm, behavior=linear(0.3).theta.detach())
    found = losses(algorithm, rows, policy).metrics
    own = losses(algorithm, dataclasses.replace(rows, own=torch.ones(4, dtype=torch.bool)), policy).metrics
    compared = found["divergence"] if name == "flow_dppo" else torch.log(found["ratio"]).abs()
    assert float(compared.max()) > 0
    torch.testing.assert_close(found["gap"], compared, rtol=1e-9, atol=1e-15)
    assert torch.equal(own["gap"], found["gap"])
    label, limit = algorithm.gap_limit
    assert label == ("the threshold" if name == "flow_dppo" else "the clip range")
    assert limit == (algorithm.threshold if name == "flow_dppo" else algorithm.clip_range)
