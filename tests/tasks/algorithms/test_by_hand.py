"""Losses row by row against numbers worked out here, through each algorithm's own ``loss`` on a policy of closed form.

Properties that every algorithm has are in test_algorithms.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.models.maths.kernels import CPS, DanceSDE, FlowDDIM, Precise, WanSDE
from flowmill.models.maths.transitions import FlowSDE, Grid, Kernel, rectifiers
from flowmill.tasks.algorithms.base import BehaviorDecay
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, ForwardBatch, TransitionBatch
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.algorithms.grpo_guard import GRPOGuard
from flowmill.tasks.algorithms.objectives import (
    divergence_mask,
    loser_share,
    pair_sign,
    policy_kl,
    ratio_metrics,
    simple_surrogate,
)
from flowmill.tasks.training.metrics import entry
from tests.golden.algorithms2026.rows import given
from tests.support.toy import BEHAVIOR, REFERENCE, START, Toy, common, draws, models_of, noised, transitions, vector
from tests.tasks.algorithms.cases import Options, gradient, linear, make, models_of_linear


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.1), (0.1, 0.3), (0.3, 0.1)])
@pytest.mark.parametrize("name", ["grpo", "tempflow"])
@pytest.mark.parametrize("shift", [-0.5, -0.2, -0.05, 0.0, 0.05, 0.2, 0.5])
def test_the_loss_of_a_ratio_row_by_row(name: str, low: float, high: float, shift: float) -> None:
    theta, advantages = vector(START), [2.0, -1.0, 0.5, -3.0]
    rows = transitions(advantages, theta)
    rows = dataclasses.replace(rows, old_log_probs=rows.old_log_probs - shift)
    options = {"clip_range": low} if low == high else {"clip_low": low, "clip_high": high}
    result = make(name, options).loss(rows, models_of(Toy(theta, theta)))
    std = FlowSDE(0.7).step(rows.latents, rows.latents, rows.grid).std
    for row, advantage in enumerate(advantages):
        if name == "tempflow":
            advantage *= float(std[row]) / 0.25
        ratio = math.exp(shift)
        expected = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
        assert float(result.loss[row].detach()) == pytest.approx(expected, rel=1e-9)
        assert float(result.metrics["ratio"][row]) == pytest.approx(ratio, rel=1e-9)
        assert float(result.metrics["ratio_change_squared"][row]) == pytest.approx((ratio - 1) ** 2, rel=1e-9)
        assert float(result.metrics["approx_kl"][row]) == pytest.approx(ratio - 1 - shift, abs=1e-12)
        assert float(result.metrics["clip_high"][row]) == (ratio > 1 + high)
        assert float(result.metrics["clip_low"][row]) == (ratio < 1 - low)


@pytest.mark.parametrize("name", ["grpo", "tempflow", "flash_grpo", "grpo_guard", "awm", "v_grpo", "dgpo", "fdfo"])
def test_each_bound_of_every_ratio_acts_on_its_side_alone(name: str) -> None:
    theta, advantages, units = vector(START), [1.0, -1.0, 0.5, -0.5], [0, 0, 1, 1]
    forward = make(name, {}).requires.data == "forward"
    rows: DiffusionBatch = noised(advantages, units) if forward else transitions(advantages, theta)
    rows = dataclasses.replace(rows, units=torch.tensor(units))

    def outside(**options: float) -> Tensor:
        """Return (2, B) flags of rows beyond the lower and beyond the upper bound."""
        found = make(name, options).loss(rows, models_of(Toy(moved, theta), theta)).metrics
        if "frozen" in found:
            return torch.stack([found["frozen"] * (rows.advantages < 0), found["frozen"] * (rows.advantages > 0)])
        return torch.stack([found["clip_low"], found["clip_high"]])

    moved, wide, narrow = theta + 1e-2 * vector([0, 0, 1, 1, 1]), 0.9, 1e-9
    both = outside(clip_range=narrow)
    assert both.any(1).all()
    assert torch.equal(outside(clip_range=wide, clip_low=narrow, clip_high=narrow), both)
    assert torch.equal(outside(clip_range=wide, clip_low=narrow), both * vector([1, 0])[:, None])
    assert torch.equal(outside(clip_range=wide, clip_high=narrow), both * vector([0, 1])[:, None])


@pytest.mark.parametrize("name", ["grpo", "tempflow", "grpo_guard", "awm", "v_grpo"])
def test_spo_pulls_a_ratio_to_where_the_other_surrogate_lets_go_of_it(name: str) -> None:
    log_ratio = vector([0.7, 0.8, 1.0, 1.2, 1.3]).log().requires_grad_()
    ratio = log_ratio.detach().exp()
    for advantage, best in ((2.0, 1.2), (-0.5, 0.8)):
        loss = simple_surrogate(log_ratio, torch.full_like(ratio, advantage), (0.2, 0.2))
        for found, at in zip(loss.tolist(), ratio.tolist(), strict=True):
            assert found == pytest.approx(-(advantage * at - abs(advantage) / 0.4 * (at - 1) ** 2), rel=1e-12)
        (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
        # It falls towards the bound from either side, and at 1 as fast as the plain policy gradient.
        expected = [math.copysign(1, at - best) if abs(at - best) > 1e-9 else 0.0 for at in ratio.tolist()]
        assert [math.copysign(1, s) if abs(s) > 1e-9 else 0.0 for s in slope.tolist()] == expected
        assert float(slope[2]) == pytest.approx(-advantage, rel=1e-12)
    # At the behavior policy the two have one gradient.
    theta = vector(START)
    forward = make(name, {}).requires.data == "forward"
    advantages = [1.0, -1.0, 0.5, -2.0]
    rows: DiffusionBatch = noised(advantages, [0, 0, 1, 1]) if forward else transitions(advantages, theta)
    plain, spo = (gradient(make(name, {"surrogate": kind}), rows, Toy(theta, theta)) for kind in ("clip", "spo"))
    torch.testing.assert_close(spo, plain)


def test_ends_of_a_clip_range_are_inside_and_those_of_a_trust_region_outside() -> None:
    figures = ratio_metrics(vector([0.5, 1.5, 0.25, 2.0]).log(), (0.5, 0.5))
    assert figures["clip_high"].tolist() == [0, 0, 0, 1]
    assert figures["clip_low"].tolist() == [0, 0, 1, 0]
    up, down = vector([2.0, 2.0, 1.0, 2.0]), vector([0.5, 0.5, 1.0, 0.5])
    divergence = vector([0.25, 0.125, 0.25, 0.25])
    for ratio, sign in ((up, 1.0), (down, -1.0)):
        mask = divergence_mask(ratio, sign * vector([1.0, 1.0, 1.0, 0.0]), divergence, 0.25)
        assert mask.tolist() == [0, 1, 1, 1]


def test_metrics_of_ratios_within_the_smallest_published_clip_range() -> None:
    """In float32 their k3 estimates are multiples of 6e-8, some negative, and the std of such ratios 0."""
    log_ratio = torch.tensor([0.0, -1e-8, 2e-6, 1.95e-6])
    exact = [float(each) for each in log_ratio.double()]
    figures = ratio_metrics(log_ratio, (2e-6, 2e-6))
    for row, (kl, squared) in enumerate(zip(figures["approx_kl"], figures["ratio_change_squared"], strict=True)):
        assert float(kl) == pytest.approx(exact[row] ** 2 / 2, rel=1e-3, abs=1e-17)
        assert float(squared) == pytest.approx(exact[row] ** 2, rel=1e-5)
    means = {name: float(values.mean()) for name, values in figures.items()}
    assert entry(1, 4, 0.0, means)["ratio_std"] == pytest.approx(np.std(exact), rel=1e-5)


@pytest.mark.parametrize(
    "kernel", [FlowSDE(0.7), DanceSDE(0.3), WanSDE(), CPS(0.8), FlowDDIM(0.7), Precise(0.7)], ids=str
)
def test_flash_gives_every_step_a_gradient_of_one_length(kernel: Kernel) -> None:
    theta = vector(START)
    rows, noise = transitions([1.0] * 4, theta, sigma=(0.9, 0.7, 0.5, 0.3)), draws(1, 2, 3)[0]
    velocity = Toy.at(theta, rows.latents, rows.grid.sigma).requires_grad_()
    step = kernel.step(rows.latents, velocity, rows.grid)
    # The same noise at every step: only the steps differ.
    following = step.sample(noise.expand_as(rows.latents)).detach()
    (slope,) = torch.autograd.grad(step.log_prob(following).sum(), velocity)
    weighed = slope * rectifiers(kernel, rows.grid).reshape(-1, 1, 1)
    # A mean goes against the velocity.
    torch.testing.assert_close(weighed, -(noise / noise.numel()).expand_as(weighed))
    # Through the loss: the weight over its mean, on Flow-GRPO's gradient.
    theta_rows = dataclasses.replace(rows, next_latents=following, old_log_probs=step.log_prob(following).detach())
    for row in range(4):
        one = dataclasses.replace(theta_rows, advantages=torch.eye(4, dtype=torch.float64)[row])
        found = []
        for name in ("grpo", "flash_grpo"):
            toy = Toy(theta, theta)
            loss = make(name, {}).loss(one, models_of(toy, theta, kernel)).loss.mean()
            found.append(torch.autograd.grad(loss, toy.theta)[0])
        torch.testing.assert_close(found[1], found[0] * rectifiers(kernel, rows.grid)[row] / 2.0)


def test_dppo_masks_a_row_that_went_too_far_and_pushes_further() -> None:
    theta, behavior = vector(START), vector(BEHAVIOR)
    rows = transitions([2.0, -1.0, 0.5, -3.0], behavior)
    step, old = (
        FlowSDE(0.7).step(rows.latents, Toy.at(at, rows.latents, rows.grid.sigma), rows.grid)
        for at in (theta, behavior)
    )
    far = ((step.mean - old.mean) ** 2).flatten(1).mean(1) / (2 * step.std**2)
    ratio = torch.exp(step.log_prob(rows.next_latents) - rows.old_log_probs)
    threshold = float(far.median())
    result = make("flow_dppo", {"threshold": threshold}).loss(rows, models_of(Toy(theta, theta)))
    torch.testing.assert_close(result.metrics["divergence"], far)
    for row in range(4):
        advantage = float(rows.advantages[row])
        masked = far[row] >= threshold and (ratio[row] > 1) == (advantage > 0)
        assert float(result.metrics["masked"][row]) == masked
        expected = 0.0 if masked else -advantage * float(ratio[row])
        assert float(result.loss[row].detach()) == pytest.approx(expected, rel=1e-9)
        assert float(result.metrics["clip_high"][row] + result.metrics["clip_low"][row]) == 0
    assert 0 < float(result.metrics["masked"].sum()) < 4


def test_a_step_of_the_worse_sample_leaves_the_better_ones_error_alone() -> None:
    """Diffusion-SDPO: to first order in the predictions a shared step does not raise what was preferred."""
    better, worse = draws(2, 40, 6, seed=5)
    worse = worse + 2 * better
    units, sign = torch.arange(40).repeat(2), vector([1.0] * 40 + [-1.0] * 40)
    residuals = torch.cat([better, worse])
    for margin in (0.0, 0.3, 1.0):
        share = loser_share(residuals, sign, torch.ones_like(sign), units, margin)
        assert share[:40].tolist() == [1.0] * 40
        # Both predictions move by one step: down the better one's error, up the worse one's.
        step = -better + share[40:, None] * worse
        change = (better * step).sum(1)
        bound = -margin * (better**2).sum(1)
        assert bool((change <= bound + 1e-9).all())
        plain = (better * (worse - better)).sum(1)
        assert bool((plain > bound).any())
        # Where a full step does no harm, it is a full step.
        assert bool((share[40:][plain <= bound] == 1).all())
    opposed = torch.cat([better, -better])
    assert loser_share(opposed, sign, torch.ones_like(sign), units, 1.0).tolist() == [1.0] * 80
    # Of two algorithms that differ in it alone, losses are equal and gradients are not.
    theta, reference = vector(START) + vector([0, 0, 3, 3, 3]), vector(REFERENCE)
    rows = noised([0.3, 0.1, -0.7, -0.2], [0, 0, 1, 1])
    results = [
        make("dpo", {"beta": 5.0, **more}).loss(rows, models_of(Toy(theta, reference)))
        for more in ({}, {"winner_margin": 1.0})
    ]
    torch.testing.assert_close(results[0].loss, results[1].loss)
    assert float(results[1].metrics["loser_share"].min()) == 0.0


def test_every_source_of_prompts_has_a_teacher_of_its_own() -> None:
    theta = vector(START)
    folders = {"near": vector(REFERENCE), "far": vector(REFERENCE) + 2.0}

    class School(Toy):
        teachers, sharded, asked = tuple(folders), False, 0

        def teacher_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any, name: str = "") -> Tensor:  # type: ignore[override]
            self.asked += len(latents)
            return self.at(folders[name], latents, sigma)

    rows = dataclasses.replace(transitions([0.0] * 4, vector(BEHAVIOR)), sources=("far", "near", "near", "far"))
    algorithm, one = (
        make("opd", {"teachers": {name: name for name in folders}}),
        dataclasses.replace(rows, sources=None),
    )
    for sharded, asked in ((False, 4), (True, 8)):
        toy = School(theta, theta)
        toy.sharded = sharded
        loss = algorithm.loss(rows, models_of(toy)).loss
        assert toy.asked == asked
        for row, source in enumerate(rows.sources or ()):
            alone = make("opd", {"teacher": "one"}).loss(one, models_of(Toy(theta, folders[source]))).loss
            torch.testing.assert_close(loss[row], alone[row])
    only = dataclasses.replace(rows, sources=("near",) * 4)
    toy = School(theta, theta)
    algorithm.loss(only, models_of(toy))
    assert toy.asked == 4


ON_STEPS = [("grpo", {"kl": kind}) for kind in ("gaussian", "flow_grpo", "velocity", "mean")]
ON_STEPS += [("tempflow", {}), ("flash_grpo", {}), ("grpo_guard", {}), ("flow_dppo", {"kl": "velocity"})]
WITH_KL: list[tuple[str, Options, str]] = [
    (name, options, to) for name, options in ON_STEPS for to in ("base", "average")
]
WITH_KL += [(name, {}, "base") for name in ("nft", "awm", "v_grpo", "dpo", "dgpo", "crd", "ram")]


@pytest.mark.parametrize(("name", "options", "to"), WITH_KL, ids=str)
def test_the_kl_is_added_row_by_row(name: str, options: Options, to: str) -> None:
    theta, reference = vector(START), vector(REFERENCE)
    forward = make(name, options).requires.data == "forward"
    rows: DiffusionBatch = (
        noised([1.0, -1.0, 0.5, -2.0], [0, 0, 1, 1]) if forward else transitions([1.0, -1, 0.5, -2], theta)
    )
    chosen = {**options} if forward else {**options, "kl_reference": to}
    # The average is kept apart from the base model, which is then far away.
    toy = Toy(theta, reference if to == "base" else reference + 3)
    models = models_of(toy, average=[reference])
    plain, penalized = (make(name, {**chosen, "kl_coef": weight}).loss(rows, models) for weight in (0.0, 0.25))
    velocities = [Toy.at(at, rows.latents, rows.grid.sigma) for at in (theta, reference)]
    steps = [FlowSDE(0.7).step(rows.latents, v, rows.grid) for v in velocities]
    moved = ((steps[0].mean - steps[1].mean) ** 2).flatten(1).mean(1)
    kinds = {
        "gaussian": moved / (2 * steps[0].std ** 2),
        "flow_grpo": moved * 0.1 / (2 * steps[0].std ** 2),
        "velocity": ((velocities[0] - velocities[1]) ** 2).flatten(1).mean(1),
        "mean": moved,
    }
    kl = kinds["velocity" if forward else options.get("kl", "gaussian")]
    torch.testing.assert_close(penalized.metrics["kl"], kl)
    torch.testing.assert_close((penalized.loss - plain.loss).detach(), 0.25 * kl)
    assert "kl" not in plain.metrics


def slope_of(rows: ForwardBatch) -> Tensor:
    """Return the gradients, at samples, of a reward that is best at one place."""
    return vector([0.7, -0.4, 0.1]) - rows.clean


def test_a_bounded_target_is_reached_and_a_linear_one_never() -> None:
    rows = noised([0.0], [0], sigma=(0.5,))
    rows = dataclasses.replace(rows, gradients=slope_of(rows))
    assert rows.gradients is not None
    wanted = 0.3 * rows.gradients / (rows.gradients**2).mean().sqrt()
    # x0^ = x0 + wanted where v = (eps - x0) - wanted / t.
    best = (rows.target - wanted / 0.5).requires_grad_()

    def slope(target: str, factor: float = 1.0) -> Tensor:
        algorithm = make("reward_gradient", {"target": target})
        scaled = dataclasses.replace(rows, gradients=factor * rows.gradients)
        found = algorithm.loss(scaled, given(best, best, best))
        return torch.autograd.grad(found.loss.sum(), best)[0]

    torch.testing.assert_close(slope("bounded"), torch.zeros_like(best), atol=1e-12, rtol=0)
    torch.testing.assert_close(slope("bounded", 1e6), torch.zeros_like(best), atol=1e-9, rtol=0)
    # d(-c <g, x0^>) / dv = c t g, wherever the policy is.
    torch.testing.assert_close(slope("linear"), 0.3 * 0.5 * rows.gradients)


#: Advantages of three pairs.
SIX = (1.1, -0.6, 0.4, -1.3, 0.8, -0.2)
HALF = linear(0.5).theta.detach()


def six_steps() -> TransitionBatch:
    """Return steps of the linear policy of scale 0.5, the first from pure noise, the last to level 0."""
    return transitions(SIX, HALF, sigma=torch.linspace(1.0, 0.2, 6, dtype=torch.float64).tolist(), dt=0.2)


def six_noised() -> ForwardBatch:
    return noised(SIX, [0, 0, 1, 1, 2, 2], sigma=torch.linspace(0.1, 0.9, 6, dtype=torch.float64).tolist())


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(2, 3), (8, 3)])
def test_the_guarded_log_ratio_has_mean_zero(reduce: Any, shape: tuple[int, ...]) -> None:
    # Many draws of one step of the behavior policy; the policy has moved away from it.
    count = 20_000
    sigma = torch.full((count,), 0.6, dtype=torch.float64)
    grid = Grid(sigma, sigma - 0.2, torch.full_like(sigma, 0.9))
    latents = draws(1, 1, *shape, seed=3)[0].expand(count, *shape)
    old = FlowSDE(0.7).step(latents, 0.5 * latents + 0.1, grid)
    following = old.sample(draws(1, count, *shape, seed=4)[0])
    rows = TransitionBatch(
        latents=latents,
        next_latents=following,
        grid=grid,
        old_log_probs=old.log_prob(following),
        old_means=old.mean,
        mean_std=sigma,
        mean_rectifier=sigma,
        **common([1.0] * count, [0] * count),
    )
    for from_means in (False, True):
        algorithm = GRPOGuard(reduce=reduce, from_means=from_means)
        metrics = algorithm.loss(rows, models_of_linear(linear(0.65))).metrics
        log_ratio = metrics["ratio"] - 1 - metrics["approx_kl"]
        error = float(log_ratio.std()) / math.sqrt(count)
        assert float(log_ratio.std()) > 1e-3
        assert abs(float(log_ratio.mean())) < 4 * error


KERNELS_BY_CONVENTION = [
    (FlowSDE(0.7), True),
    (DanceSDE(0.3), True),
    (WanSDE(), True),
    (CPS(0.8), False),
    (CPS(0.8, "squared"), False),
    (FlowDDIM(0.7), False),
    (Precise(0.7), False),
]


@pytest.mark.parametrize(("kernel", "has_rate"), KERNELS_BY_CONVENTION, ids=str)
def test_the_published_kl_divides_by_what_each_kernel_calls_its_std(kernel: Kernel, has_rate: bool) -> None:
    rows = six_steps()
    grid = Grid(rows.grid.sigma * 0.9, rows.grid.sigma_next * 0.9 + 0.05, rows.grid.sigma_second * 0.9)
    new, base = (kernel.step(rows.latents, scale * rows.latents, grid) for scale in (0.5, 0.3))
    velocities = (0.5 * rows.latents, 0.3 * rows.latents)
    ours = policy_kl("flow_grpo", new, base, velocities)
    square = ((new.mean - base.mean) ** 2).flatten(1).mean(1)
    dt = grid.sigma - grid.sigma_next
    # std = s sqrt(|dt|) of an SDE, and the public image scripts divide by s; the std of the others is what they know.
    expected = square / (2 * new.std**2) * (dt if has_rate else 1.0)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    assert (new.rate is not None) == has_rate


def test_dpo_skips_pairs_of_equal_advantage_and_follows_the_better_of_the_others() -> None:
    rows = six_noised()
    advantages = torch.tensor([0.3, 0.3, 0.1, 0.1 + 1e-12, -1.0, -2.0], dtype=torch.float64)
    assert pair_sign(advantages, rows.units).tolist() == [0.0, 0.0, -1.0, 1.0, 1.0, -1.0]
    policy = linear(0.55)
    algorithm = make("dpo", {"beta": 3.0})
    result = algorithm.loss(dataclasses.replace(rows, advantages=advantages), models_of_linear(policy))
    assert result.loss[:2].tolist() == [0.0, 0.0]
    (slope,) = torch.autograd.grad(result.loss[:2].sum(), policy.theta, retain_graph=True)
    assert not slope.any()
    # Where better and worse change places, so does the sign of the pair's margin.
    swapped = algorithm.loss(dataclasses.replace(rows, advantages=-advantages), models_of_linear(policy))
    torch.testing.assert_close(swapped.metrics["margin"], -result.metrics["margin"])
    # A policy that fits the better sample of the last pair more closely has a margin below the base model's.
    error = ((0.55 * rows.latents + 0.1 - rows.target) ** 2).flatten(1).mean(1)
    base = ((0.3 * rows.latents + 0.1 - rows.target) ** 2).flatten(1).mean(1)
    margin = float((error[4] - error[5]) - (base[4] - base[5]))
    assert float(result.metrics["margin"][4]) == pytest.approx(margin)
    assert float(result.loss[4].detach()) == pytest.approx(math.log1p(math.exp(1.5 * margin)))


def test_behavior_decay_by_hand() -> None:
    assert [BehaviorDecay()(epoch) for epoch in (1, 100)] == [0.0, 0.0]
    slow = BehaviorDecay(flat=75, rate=0.0075, maximum=0.999)
    assert [slow(epoch) for epoch in (74, 75, 76, 1000)] == pytest.approx([0.0, 0.0, 0.0075, 0.999])


def test_on_policy_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient() -> None:
    rows, policy = six_steps(), linear(0.5)
    result = GRPO().loss(rows, models_of_linear(policy))
    assert result.metrics["ratio"].tolist() == [1.0] * len(SIX)
    assert result.metrics["approx_kl"].tolist() == [0.0] * len(SIX)
    (slope,) = torch.autograd.grad(result.loss.mean(), policy.theta)
    step = FlowSDE(0.7).step(rows.latents, policy.velocity(rows.latents, rows.grid.sigma, rows.conditioning), rows.grid)
    plain = -(rows.advantages * step.log_prob(rows.next_latents)).mean()
    torch.testing.assert_close(slope, torch.autograd.grad(plain, policy.theta)[0])


@pytest.mark.parametrize("name", ["awm", "dgpo", "nft", "crd"])
def test_a_kl_to_the_average_wants_it_and_all_rows(name: str) -> None:
    algorithm = make(name, {"ema_kl_coef": 0.5})
    plain = make(name, {})
    assert algorithm.requires.average
    assert algorithm.requires.zero_advantages
    assert not plain.requires.average
    rows, policy = six_noised(), linear(0.3)
    models = models_of_linear(policy)
    models.average = [linear(0.4).theta.detach()]
    loss, without = (each.loss(rows, models) for each in (algorithm, plain))
    expected = ((0.1 * rows.latents) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(loss.metrics["ema_kl"], expected)
    torch.testing.assert_close(loss.loss - without.loss, 0.5 * loss.metrics["ema_kl"])
