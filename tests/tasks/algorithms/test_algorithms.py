"""Every loss against finite differences in float64, GRPO against a slow reference, and the identities of each."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.kernels import CPS, DanceSDE, FlowDDIM, Precise, WanSDE
from flowmill.models.maths.transitions import FlowSDE, Grid, Kernel
from flowmill.tasks.algorithms import ALGORITHMS
from flowmill.tasks.algorithms.base import Algorithm, BehaviorDecay
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch, TransitionBatch
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.algorithms.grpo_guard import GRPOGuard
from flowmill.tasks.algorithms.objectives import pair_sign, policy_kl
from tests.support import toy
from tests.tasks.algorithms.test_signs import SAMPLES, STEPS

ROWS, SHAPE = 6, (2, 3)


class LinearPolicy:
    """v = scale * x + shift: the smallest policy with a gradient; its reference is scale 0.3."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
        self.policy = self

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return self.scale * latents + 0.1

    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return 0.3 * latents + 0.1

    teacher_velocity = reference_velocity

    @contextmanager
    def holding(self, values: list[Tensor]) -> Iterator[None]:
        own, self.scale = self.scale, values[0]
        try:
            yield
        finally:
            self.scale = own


def draws(seed: int = 0) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def common(draw: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "advantages": draw(ROWS),
        "conditioning": Conditioning({}),
        "weights": torch.ones(ROWS, dtype=torch.float64),
        "units": torch.tensor([0, 0, 1, 1, 1, 1]),
        "importance": torch.ones(ROWS, dtype=torch.float64),
        "count": ROWS,
        "age": torch.zeros(ROWS, dtype=torch.int64),
        "step": torch.arange(ROWS),
        "keys": tuple((row, 0) for row in range(ROWS)),
    }


def transitions(behavior: LinearPolicy, noise_level: float = 0.7) -> TransitionBatch:
    draw = draws()
    sigma = torch.linspace(1.0, 0.2, ROWS, dtype=torch.float64)
    grid = Grid(sigma, sigma - 0.2, torch.full_like(sigma, 0.8))
    latents = draw(ROWS, *SHAPE)
    step = FlowSDE(noise_level).step(latents, behavior.velocity(latents, sigma, None).detach(), grid)
    following = step.sample(draw(ROWS, *SHAPE))
    return TransitionBatch(
        latents=latents,
        next_latents=following,
        grid=grid,
        old_log_probs=step.log_prob(following),
        old_means=step.mean,
        mean_std=torch.full((ROWS,), 0.4, dtype=torch.float64),
        mean_rectifier=torch.full((ROWS,), 2.0, dtype=torch.float64),
        finals=draw(ROWS, *SHAPE),
        **common(draw),
    )


def noised() -> ForwardBatch:
    draw = draws(1)
    sigma = torch.linspace(0.1, 0.9, ROWS, dtype=torch.float64)
    clean, noise, level = draw(ROWS, *SHAPE), draw(ROWS, *SHAPE), sigma.view(-1, 1, 1)
    return ForwardBatch(
        latents=(1 - level) * clean + level * noise,
        clean=clean,
        noise=noise,
        grid=Grid(sigma, torch.zeros_like(sigma), sigma),
        gradients=draws(7)(ROWS, *SHAPE),
        subjects=toy.subjects_of(ROWS),
        **{**common(draw), "units": torch.tensor([0, 0, 1, 1, 2, 2])},
    )


def slow_loss(
    policy: LinearPolicy, rows: TransitionBatch, clip: float, kl_coef: float, noise_level: float = 0.7
) -> float:
    """The same formulas, one number at a time, in python floats."""
    total = 0.0
    for r in range(ROWS):
        sigma, following, second = (
            float(t[r]) for t in (rows.grid.sigma, rows.grid.sigma_next, rows.grid.sigma_second)
        )
        dt, safe = following - sigma, min(sigma, second) if sigma > 0.99 else sigma
        s = noise_level * math.sqrt(sigma / (1 - safe))
        log_prob = kl = 0.0
        x, y = rows.latents[r].flatten().tolist(), rows.next_latents[r].flatten().tolist()
        for xi, yi in zip(x, y, strict=True):
            means = []
            for scale in (policy.scale.item(), 0.3):
                v = scale * xi + 0.1
                means.append(xi + (v + s**2 / (2 * sigma) * (xi + (1 - sigma) * v)) * dt)
            variance = s**2 * -dt
            log_prob += -((yi - means[0]) ** 2) / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)
            kl += (means[0] - means[1]) ** 2 / (2 * variance)
        ratio = math.exp(log_prob / len(x) - float(rows.old_log_probs[r]))
        advantage = float(rows.advantages[r])
        total += max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip)) + kl_coef * kl / len(x)
    return total / ROWS


def models_of(policy: LinearPolicy, *, on_policy: bool = False) -> DiffusionModels:
    behavior = [torch.tensor(0.5, dtype=torch.float64)]
    trained: Any = policy
    return DiffusionModels(
        trainable=trained, kernel=FlowSDE(0.7), behavior=behavior, on_policy=on_policy, rewards=toy.liking
    )


def loss_of(policy: LinearPolicy, rows: DiffusionBatch, algorithm: Algorithm) -> Tensor:
    return algorithm.loss(rows, models_of(policy)).loss.mean()


def rows_of(algorithm: Algorithm) -> DiffusionBatch:
    if algorithm.requires.data == "states":
        return toy.states(algorithm.requires.calls, rows=ROWS)
    return noised() if algorithm.requires.data == "forward" else transitions(LinearPolicy(0.5))


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
@pytest.mark.parametrize("scale", [0.5, 0.52, 0.9])
def test_loss_equals_the_slow_one(scale: float, kl_coef: float) -> None:
    rows = transitions(LinearPolicy(0.5))
    ours = loss_of(LinearPolicy(scale), rows, GRPO(clip_range=0.01, kl_coef=kl_coef))
    assert float(ours.detach()) == pytest.approx(slow_loss(LinearPolicy(scale), rows, 0.01, kl_coef), rel=1e-12)


#: With a KL, or without a policy of a closed form: the gradients of all others are in test_signs.py.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[("grpo", {"clip_range": 0.5, "kl_coef": 0.3, "kl": kl}) for kl in ("gaussian", "flow_grpo", "velocity", "mean")],
    ("flow_dppo", {"threshold": 1e3, "kl_coef": 0.1}),
    ("awm", {"kl_coef": 0.2}),
    ("dpo", {"beta": 3.0, "kl_coef": 0.2}),
    ("kto", {"beta": 3.0, "kl_coef": 0.2}),
    *[("sft", {"prediction": kind, "kl_coef": 0.2}) for kind in ("velocity", "epsilon", "v_prediction", "sample")],
    ("ram", {"multiplier": 2.0, "kl_coef": 0.2}),
    ("fdfo", {"kl_coef": 0.2}),
    *[("reward_gradient", {"target": target, "kl_coef": kl}) for target in ("bounded", "linear") for kl in (0.0, 0.2)],
    *[("refl", {"steps": steps, "kl_coef": kl}) for steps in (1, 3) for kl in (0.0, 0.2)],
    ("refl", {"margin": 1.0, "scale": 0.5}),
    ("direct_align", {"kl_coef": 0.2}),
    ("direct_align", {"step": 0.05, "times": {"high": 0.9}, "positive": ("a", "bc"), "negative": ("def",)}),
    ("opd", {"teacher": "somewhere"}),
]


def test_every_algorithm_is_here() -> None:
    assert {name for name, _ in (*VARIANTS, *STEPS, *SAMPLES)} == set(ALGORITHMS)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_gradient_equals_finite_differences(name: str, options: dict[str, Any]) -> None:
    algorithm = create(ALGORITHMS, name, options, label="algorithm")
    rows, policy, step = rows_of(algorithm), LinearPolicy(0.55), 1e-6
    loss_of(policy, rows, algorithm).backward()
    high, low = (loss_of(LinearPolicy(0.55 + sign * step), rows, algorithm).item() for sign in (1, -1))
    assert abs(high - low) > 1e-12
    assert policy.scale.grad is not None
    assert policy.scale.grad.item() == pytest.approx((high - low) / (2 * step), rel=1e-5)


def test_nft_gradient_is_that_of_its_fixed_normalizers() -> None:
    rows, policy, options = noised(), LinearPolicy(0.55), {"beta": 0.5, "scale": 2.0}
    algorithm = create(ALGORITHMS, "nft", options, label="algorithm")
    loss_of(policy, rows, algorithm).backward()
    level, r = rows.grid.sigma.view(-1, 1, 1), (rows.advantages / 4 + 0.5).clamp(0, 1)
    old = 0.5 * rows.latents + 0.1
    expected = torch.zeros((), dtype=torch.float64)
    for sign, weight in ((1, r), (-1, 1 - r)):
        u = old + sign * 0.5 * (policy.velocity(rows.latents, rows.grid.sigma, None).detach() - old)
        off = rows.latents - level * u - rows.clean
        scale = off.abs().flatten(1).mean(1)
        slope = (2 * off * -level * sign * 0.5 * rows.latents).flatten(1).mean(1) / scale
        expected += (weight * slope).mean() * 2.0 / 0.5
    assert policy.scale.grad is not None
    assert policy.scale.grad.item() == pytest.approx(expected.item(), rel=1e-5)


def test_v_grpo_gradient_is_that_of_a_fixed_divisor() -> None:
    rows, policy = noised(), LinearPolicy(0.55)
    loss_of(policy, rows, create(ALGORITHMS, "v_grpo", {"clip_range": 10.0}, label="algorithm")).backward()
    level = rows.grid.sigma
    error, slope = policy.velocity(rows.latents, level, None).detach() - rows.target, rows.latents
    old = 0.5 * rows.latents + 0.1 - rows.target

    def surrogate(e: Tensor) -> Tensor:
        return level * (e**2).flatten(1).mean(1) / e.abs().flatten(1).mean(1)

    ratio = torch.exp(surrogate(old) - surrogate(error))
    each = level * (2 * error * slope).flatten(1).mean(1) / error.abs().flatten(1).mean(1)
    assert policy.scale.grad is not None
    assert policy.scale.grad.item() == pytest.approx((rows.advantages * ratio * each).mean().item(), rel=1e-9)


def test_dgpo_freezes_rows_that_went_far_enough() -> None:
    rows = noised()
    result = create(ALGORITHMS, "dgpo", {"clip_range": 1e-9}, label="a").loss(rows, models_of(LinearPolicy(0.55)))
    frozen = result.metrics["frozen"].bool()
    assert bool(frozen.any())
    assert not bool(frozen.all())
    policy = LinearPolicy(0.55)
    result = create(ALGORITHMS, "dgpo", {"clip_range": 1e-9}, label="a").loss(rows, models_of(policy))
    (gradient,) = torch.autograd.grad(result.loss[frozen].sum(), policy.scale, allow_unused=True)
    assert gradient is None or float(gradient) == 0.0


RATIOS = [
    ("grpo", {}),
    ("tempflow", {}),
    ("flash_grpo", {}),
    ("grpo_guard", {}),
    ("flow_dppo", {}),
    ("awm", {}),
    ("v_grpo", {}),
    ("fdfo", {}),
]
RATIOS += [(name, {"surrogate": "spo"}) for name in ("grpo", "tempflow", "grpo_guard", "awm", "v_grpo")]


@pytest.mark.parametrize(("name", "options"), RATIOS, ids=str)
def test_on_policy_ratios_are_exactly_one(name: str, options: dict[str, Any]) -> None:
    algorithm = create(ALGORITHMS, name, options, label="algorithm")
    result = algorithm.loss(rows_of(algorithm), models_of(LinearPolicy(0.5), on_policy=True))
    assert result.metrics["ratio"].tolist() == [1.0] * ROWS
    again = algorithm.loss(rows_of(algorithm), models_of(LinearPolicy(0.5)))
    assert again.metrics["ratio"].tolist() == [1.0] * ROWS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"reduce": "sum", "clip_range": 0.2}),
        ("grpo", {"from_means": True}),
        ("tempflow", {}),
        ("flash_grpo", {}),
        ("grpo_guard", {}),
        ("flow_dppo", {"threshold": 1.0}),
    ],
)
def test_before_the_first_update_rounding_makes_no_ratio(name: str, options: dict[str, Any]) -> None:
    """Of rows whose old log-probs are the policy's own ratios are 1 and gradients plain; of others nothing changes."""
    algorithm, policy = create(ALGORITHMS, name, options, label="algorithm"), LinearPolicy(0.65)
    exact = transitions(LinearPolicy(0.65))
    assert exact.old_means is not None
    moved = {"old_log_probs": exact.old_log_probs + 1e-3, "old_means": exact.old_means + 1e-3}
    rounded, own = dataclasses.replace(exact, **moved), torch.arange(ROWS) < ROWS // 2

    def look(rows: TransitionBatch) -> tuple[Tensor, Tensor, list[Tensor]]:
        found = algorithm.loss(rows, models_of(policy))
        gradients = [torch.autograd.grad(loss, policy.scale, retain_graph=True)[0] for loss in found.loss]
        return found.metrics["ratio"], found.metrics["gap"], gradients

    ratio, gap, gradients = look(dataclasses.replace(rounded, own=own))
    assert torch.equal(ratio[own], torch.ones(ROWS // 2, dtype=torch.float64))
    assert (gap > 0).all(), "what the rounding was is told, though no ratio is made of it"
    (_, _, plain), (apart, _, off) = look(exact), look(rounded)
    assert torch.equal(ratio[~own], apart[~own])
    assert (apart != 1).all()
    expected = [*plain[: ROWS // 2], *off[ROWS // 2 :]]
    torch.testing.assert_close(torch.stack(gradients), torch.stack(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(2, 3), (24,)])
def test_the_guarded_log_ratio_has_mean_zero(reduce: Any, shape: tuple[int, ...]) -> None:
    # Many draws of one step of the behavior policy; the policy has moved away from it.
    count, draw = 20_000, draws(3)
    sigma = torch.full((count,), 0.6, dtype=torch.float64)
    grid = Grid(sigma, sigma - 0.2, torch.full_like(sigma, 0.9))
    latents = draw(1, *shape).expand(count, *shape)
    old = FlowSDE(0.7).step(latents, 0.5 * latents + 0.1, grid)
    following = old.sample(draw(count, *shape))
    repeated = {name: value for name, value in common(draw).items() if name in ("conditioning", "keys")}
    rows = TransitionBatch(
        latents=latents,
        next_latents=following,
        grid=grid,
        old_log_probs=old.log_prob(following),
        old_means=old.mean,
        mean_std=sigma,
        mean_rectifier=sigma,
        advantages=torch.ones(count, dtype=torch.float64),
        weights=torch.ones(count, dtype=torch.float64),
        importance=torch.ones(count, dtype=torch.float64),
        count=count,
        **{name: torch.zeros(count, dtype=torch.int64) for name in ("units", "age", "step")},
        **repeated,
    )
    for from_means in (False, True):
        algorithm = GRPOGuard(reduce=reduce, from_means=from_means)
        metrics = algorithm.loss(rows, models_of(LinearPolicy(0.65))).metrics
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
    rows = transitions(LinearPolicy(0.5))
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


def test_only_the_kl_is_left_of_rows_of_advantage_zero() -> None:
    rows = dataclasses.replace(noised(), advantages=torch.zeros(ROWS, dtype=torch.float64))
    for name in ("awm", "dpo", "dgpo"):
        policy = LinearPolicy(0.55)
        result = create(ALGORITHMS, name, {"kl_coef": 0.5}, label="a").loss(rows, models_of(policy))
        torch.testing.assert_close(result.loss, 0.5 * ((0.25 * rows.latents) ** 2).flatten(1).mean(1))
    # NFT and CRD pull back to the behavior policy, which is where their gradient vanishes.
    for name in ("nft", "crd"):
        policy = LinearPolicy(0.5)
        loss = create(ALGORITHMS, name, {"adaptive": False} if name == "crd" else {}, label="a").loss
        (gradient,) = torch.autograd.grad(loss(rows, models_of(policy)).loss.sum(), policy.scale)
        assert gradient.item() == pytest.approx(0.0, abs=1e-12)


def test_dpo_skips_pairs_of_equal_advantage_and_follows_the_better_of_the_others() -> None:
    rows = noised()
    advantages = torch.tensor([0.3, 0.3, 0.1, 0.1 + 1e-12, -1.0, -2.0], dtype=torch.float64)
    assert pair_sign(advantages, rows.units).tolist() == [0.0, 0.0, -1.0, 1.0, 1.0, -1.0]
    policy = LinearPolicy(0.55)
    algorithm = create(ALGORITHMS, "dpo", {"beta": 3.0}, label="a")
    result = algorithm.loss(dataclasses.replace(rows, advantages=advantages), models_of(policy))
    assert result.loss[:2].tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(result.loss[:2].sum(), policy.scale, retain_graph=True)
    assert float(gradient) == 0.0
    # Where better and worse change places, so does the sign of the pair's margin.
    swapped = algorithm.loss(dataclasses.replace(rows, advantages=-advantages), models_of(policy))
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


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("nft", {"decay": {"speed": 1}}, "option 'decay' has no option 'speed'"),
        ("nft", {"times": {"kind": "often"}}, "option 'times': kind is 'often'; it must be 'stratified'"),
        ("awm", {"times": {"power": 2}}, "only acts on kind 'power'"),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        create(ALGORITHMS, name, options, label="algorithm")


def test_on_policy_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient() -> None:
    behavior = LinearPolicy(0.5)
    rows, policy = transitions(behavior), LinearPolicy(0.5)
    result = GRPO().loss(rows, models_of(policy))
    assert result.metrics["ratio"].tolist() == [1.0] * ROWS
    assert result.metrics["approx_kl"].tolist() == [0.0] * ROWS
    (gradient,) = torch.autograd.grad(result.loss.mean(), policy.scale)
    step = FlowSDE(0.7).step(rows.latents, policy.velocity(rows.latents, rows.grid.sigma, None), rows.grid)
    plain = -(rows.advantages * step.log_prob(rows.next_latents)).mean()
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, policy.scale)[0])


def test_clipped_rows_have_no_gradient() -> None:
    rows = transitions(LinearPolicy(0.5))
    policy = LinearPolicy(0.9)
    result = GRPO(clip_range=1e-6).loss(rows, models_of(policy))
    ratio = result.metrics["ratio"]
    outside = ((ratio > 1) & (rows.advantages > 0)) | ((ratio < 1) & (rows.advantages < 0))
    assert bool(outside.any())
    (gradient,) = torch.autograd.grad(result.loss[outside].sum(), policy.scale)
    assert float(gradient) == 0.0
    assert result.metrics["clip_high"].sum() + result.metrics["clip_low"].sum() == ROWS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"reduce": "sum"}),
        ("grpo", {"from_means": True}),
        ("tempflow", {}),
        ("flash_grpo", {}),
        ("grpo_guard", {}),
        ("grpo_guard", {"reduce": "sum"}),
        ("flow_dppo", {}),
    ],
)
def test_the_gap_is_in_the_unit_of_what_is_clipped_or_masked(name: str, options: dict[str, Any]) -> None:
    """It is what the loss makes of rows whose old log-probs and means are the rollout's, not the policy's own."""
    behavior = LinearPolicy(0.3)
    rows, policy = transitions(behavior), LinearPolicy(0.31)
    algorithm = create(ALGORITHMS, name, options, label="algorithm")
    found = algorithm.loss(rows, models_of(policy)).metrics
    everything_own = dataclasses.replace(rows, own=torch.ones(len(rows.advantages), dtype=torch.bool))
    own = algorithm.loss(everything_own, models_of(policy)).metrics
    compared = found["divergence"] if name == "flow_dppo" else torch.log(found["ratio"]).abs()
    assert float(compared.max()) > 0
    torch.testing.assert_close(found["gap"], compared, rtol=1e-9, atol=1e-15)
    assert torch.equal(own["gap"], found["gap"])
    label, limit = algorithm.gap_limit
    assert label == ("the threshold" if name == "flow_dppo" else "the clip range")
    assert limit == (algorithm.threshold if name == "flow_dppo" else algorithm.clip_range)


@pytest.mark.parametrize("name", ["awm", "dgpo", "nft", "crd"])
def test_a_kl_to_the_average_wants_it_and_all_rows(name: str) -> None:
    algorithm = create(ALGORITHMS, name, {"ema_kl_coef": 0.5}, label="algorithm")
    plain = create(ALGORITHMS, name, {}, label="algorithm")
    assert algorithm.requires.average
    assert algorithm.requires.zero_advantages
    assert not plain.requires.average
    rows, policy = rows_of(algorithm), LinearPolicy(0.3)
    models = models_of(policy)
    models.average = [policy.scale.detach() + 0.1]
    loss, without = (each.loss(rows, models) for each in (algorithm, plain))
    expected = ((0.1 * rows.latents) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(loss.metrics["ema_kl"], expected)
    torch.testing.assert_close(loss.loss - without.loss, 0.5 * loss.metrics["ema_kl"])


@pytest.mark.parametrize("name", ["awm", "dgpo"])
def test_a_behavior_policy_may_follow_slowly(name: str) -> None:
    algorithm = create(ALGORITHMS, name, {"decay": {"start": 0.9, "maximum": 0.9}}, label="algorithm")
    assert algorithm.requires.decay(3) == 0.9
    assert create(ALGORITHMS, name, {}, label="algorithm").requires.decay(3) == 0.0
