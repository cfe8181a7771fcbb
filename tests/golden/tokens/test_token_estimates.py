"""Rewards, advantages, returns and value losses over tokens equal those of the public trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.tasks.advantages.estimators import (
    GAE,
    Earned,
    Estimated,
    Estimator,
    LeaveOneOut,
    Reinforce,
    ReinforcePlusPlus,
)
from flowmill.tasks.advantages.tokens import (
    adapted_kl_coef,
    explained_variance,
    gae,
    overlong_penalty,
    token_rewards,
    whitened,
)
from flowmill.tasks.algorithms.token_objectives import clipped_value_loss, masked_mean, masked_sum, token_kl
from tests.golden.tokens.test_token_losses import Case, cases, folder

__all__ = ["folder"]


def close(found: Tensor, wanted: Tensor, case: Case, name: str, *, at: float = 1e-7) -> None:
    tolerance = case.about.get("params", {}).get("tolerance", at)
    torch.testing.assert_close(found, wanted.double(), rtol=tolerance, atol=tolerance, msg=name)


def earned(case: Case, **more: Any) -> Earned:
    """Return what an estimator gets, with rewards per token given as a KL of weight 1 and scores of 0."""
    mask = case.tensor("mask").bool()
    about: dict[str, Any] = {
        "scores": torch.zeros(len(mask), dtype=torch.float64),
        "groups": torch.arange(len(mask)),
        "kl": -case.tensor("rewards") if "rewards" in case.arrays else None,
        "values": case.tensor("values") if "values" in case.arrays else None,
        "kl_coef": 1.0,
    }
    return Earned(mask=mask, **(about | more))


def estimate(estimator: Estimator, case: Case, **more: Any) -> Estimated:
    return estimator.estimate(earned(case, **more))


def test_gae(folder: Path) -> None:
    for name, case in cases(folder, "gae", "verl_", "openrlhf_").items():
        options = {"discount": case.about["params"]["gamma"], "decay": case.about["params"]["lam"]}
        raw = estimate(GAE(**options, whiten=False), case)
        key = "advantages_raw_masked" if "advantages_raw_masked" in case.arrays else "advantages_masked"
        close(raw.advantages, case.tensor(key), case, name, at=1e-9)
        close(raw.returns, case.tensor("returns_masked"), case, name, at=1e-9)
        if "whitened" in case.arrays:
            found = estimate(GAE(**options), case)
            mask = case.tensor("mask").bool()
            close(found.advantages, torch.where(mask, case.tensor("whitened"), 0.0), case, name)
            assert torch.equal(found.returns, raw.returns)


def test_returns(folder: Path) -> None:
    for name, case in cases(folder, "returns", "verl_", "openrlhf_").items():
        discount = case.about["params"]["gamma"]
        found = estimate(ReinforcePlusPlus(discount=discount), case)
        close(found.returns, case.tensor("returns_masked"), case, name, at=1e-9)
        if "advantages_masked" in case.arrays:
            close(found.advantages, case.tensor("advantages_masked"), case, name)
        plain = estimate(Reinforce(discount=discount), case)
        assert torch.equal(plain.advantages, plain.returns)


def test_whitening(folder: Path) -> None:
    for name, case in cases(folder, "whiten", "verl_", "trl_").items():
        found = whitened(case.tensor("x"), case.tensor("mask").bool(), shift_mean=case.about["params"]["shift_mean"])
        close(found, case.tensor("y_masked"), case, name)


def test_rewards_of_tokens(folder: Path) -> None:
    found = {**cases(folder, "rewards", "verl_k1"), **cases(folder, "rewards", "openrlhf_")}
    for name, case in found.items():
        params, mask, score = case.about["params"], case.tensor("mask").bool(), case.tensor("score")
        kl = token_kl(case.tensor("logp"), case.tensor("ref"), params.get("estimator", "k1"))
        if "estimator" in params:
            # OpenRLHF bounds every estimate.
            kl = kl.clamp(-10, 10)
        if params.get("clip"):
            score = score.clamp(*params["clip"])
        close(token_rewards(score, mask, kl, params["kl_coef"]), case.tensor("rewards_masked"), case, name)


def test_penalties_of_length(folder: Path) -> None:
    for name, case in cases(folder, "rewards", "overlong_").items():
        params = case.about["params"]
        found = overlong_penalty(
            case.tensor("length"), longest=params["max_new_tokens"], buffer=params["buffer"], factor=params["factor"]
        )
        close(found, case.tensor("penalty"), case, name)


def test_baselines_of_groups(folder: Path) -> None:
    for prefix, estimator, key in (
        ("verl_reinforce_pp_baseline_", ReinforcePlusPlus(baseline="group"), "advantage_masked"),
        ("verl_rloo_", LeaveOneOut(), "advantage"),
        ("trl_rloo_", LeaveOneOut(), "advantage"),
    ):
        for name, case in cases(folder, "advantages", prefix).items():
            _, groups = case.tensor("group").unique(return_inverse=True)
            found = estimate(estimator, case, scores=case.tensor("score"), groups=groups).advantages
            mask, wanted = case.tensor("mask").bool(), case.tensor(key)
            wanted = wanted if wanted.ndim == 2 else wanted[:, None].expand_as(mask)
            close(found, torch.where(mask, wanted, 0.0), case, name, at=2e-6)


def test_losses_of_values(folder: Path) -> None:
    for name, case in cases(folder, "value_loss", "verl_", "openrlhf_").items():
        params, mask = case.about["params"], case.tensor("mask").bool()
        values = case.tensor("values").requires_grad_()
        tokens = clipped_value_loss(values, case.tensor("old"), case.tensor("returns"), params["clip"])
        by_token = params["aggregation"] == "token-mean"
        loss = masked_sum(tokens, mask).sum() / mask.sum() if by_token else masked_mean(tokens, mask).mean()
        close(loss, case.tensor("loss"), case, name)
        close(torch.autograd.grad(loss, values)[0], case.tensor("grad"), case, name)


def test_explained_variance_and_the_adaptive_coefficient(folder: Path) -> None:
    for name, case in cases(folder, "misc", "explained_variance_").items():
        found = explained_variance(case.tensor("values"), case.tensor("returns"), case.tensor("mask").bool())
        assert found == pytest.approx(float(case.arrays["plain"]), rel=1e-9), name
    for name, case in cases(folder, "misc", "adaptive_kl_").items():
        params = case.about["params"]
        coef, found = params["init"], []
        for kl in case.arrays["kl"].tolist():
            coef = adapted_kl_coef(
                coef, kl, target=params["target"], samples=params["n_steps"], horizon=params["horizon"]
            )
            found.append(coef)
        assert found == pytest.approx(case.arrays["coef"].tolist(), rel=1e-9), name


@pytest.mark.parametrize("kl", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("horizon", [1e-3, 100.0, 10_000.0])
def test_the_coefficient_of_a_kl_stays_positive_after_epochs_of_any_size(kl: float, horizon: float) -> None:
    for samples in (1, 1024, 65_536, 10**9):
        coef, change = 0.05, (-0.2 if kl < 1 else 0.2) * min(samples / horizon, 1)
        for _ in range(20):
            following = adapted_kl_coef(coef, kl, target=1.0, samples=samples, horizon=horizon)
            assert following == pytest.approx(coef * (1 + change))
            assert following > 0
            coef = following


def test_gae_by_hand() -> None:
    """Three tokens with a gap after the first: deltas are crossed over it, without decay."""
    mask = torch.tensor([[True, False, True, True]])
    rewards = torch.tensor([[0.5, 99.0, 0.0, 1.0]])
    values = torch.tensor([[0.1, float("nan"), 0.2, 0.4]])
    advantages, returns = gae(rewards, values, mask, discount=0.9, decay=0.5)
    third = 1.0 - 0.4
    second = 0.0 + 0.9 * 0.4 - 0.2 + 0.9 * 0.5 * third
    first = 0.5 + 0.9 * 0.2 - 0.1 + 0.9 * 0.5 * second
    assert advantages[0].tolist() == pytest.approx([first, 0.0, second, third])
    assert returns[0].tolist() == pytest.approx([first + 0.1, 0.0, second + 0.2, third + 0.4])
    nothing = token_rewards(torch.ones(2), torch.tensor([[True, True], [False, False]]), None, 0.0)
    assert nothing.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert whitened(torch.ones(1, 3), torch.tensor([[True, False, False]])).tolist() == [[0.0, 0.0, 0.0]]
