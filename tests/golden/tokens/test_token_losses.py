"""Losses and gradients over tokens equal those of the public trainers, through the classes that training uses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.models.maths.tokens import log_probs_and_entropy, token_log_probs
from flowmill.tasks.algorithms import TOKEN_ALGORITHMS
from flowmill.tasks.algorithms.objectives import clipped_surrogate
from flowmill.tasks.algorithms.token_grpo import CISPO, DAPO, GSPO, RLOO, DrGRPO, TokenGRPO
from flowmill.tasks.algorithms.token_objectives import masked_mean, masked_sum, token_kl
from flowmill.tasks.algorithms.tokens import TokenBatch
from tests.support.token_batches import token_batch

DATA = Path(__file__).parent / "data"
#: Of TRL: loss type -> how rows are normalized.
NORMALIZATIONS = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}


@dataclass
class Case:
    """One case of a file."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def tensor(self, name: str) -> Tensor:
        found = torch.from_numpy(self.arrays[name])
        return found.double() if found.is_floating_point() else found


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--golden-tokens") or DATA)


def cases(folder: Path, file: str, *beginnings: str) -> dict[str, Case]:
    with np.load(folder / f"{file}.npz") as content:
        arrays = {key: content[key] for key in content.files}
    meta = json.loads(str(arrays.pop("meta")))
    found = {}
    for name, about in meta.items():
        if name.startswith(beginnings):
            own = {key.removeprefix(f"{name}."): value for key, value in arrays.items() if key.startswith(f"{name}.")}
            found[name] = Case(about, own)
    assert found
    return found


class Given:
    """The interface of a model for an algorithm: log-probs of given logits, position by position."""

    measures = False

    def __init__(self, case: Case) -> None:
        self.logits = case.tensor("logits").requires_grad_()
        self._ids, self._reference = case.tensor("ids"), case.arrays.get("ref")

    def log_probs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(self.logits, -1)
        return log_p.gather(-1, self._ids[..., None])[..., 0], torch.zeros_like(log_p[..., 0].detach())

    def reference_log_probs(self, batch: TokenBatch) -> Tensor:
        assert self._reference is not None
        return torch.from_numpy(self._reference).double()


def batch_of(case: Case, **more: Any) -> TokenBatch:
    mask = case.tensor("mask").bool()
    own: dict[str, Any] = {
        "ids": case.tensor("ids"),
        "share": torch.full((len(mask),), len(mask) / float(mask.sum()), dtype=torch.float64),
        "advantages": case.tensor("advantages")[:, 0],
    }
    return token_batch(mask, case.tensor("old"), **{**own, **more})


def expect_equal(algorithm: TokenGRPO, case: Case, name: str, **more: Any) -> None:
    models: Any = Given(case)
    loss = algorithm.loss(batch_of(case, **more), models).loss.mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), case.tensor("loss"), rtol=2e-6, atol=2e-6, msg=name)
    torch.testing.assert_close(models.logits.grad, case.tensor("grad_logits"), rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("kind", NORMALIZATIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_grpo_and_its_normalizations(folder: Path, kind: str, level: str) -> None:
    for name, case in cases(folder, "policy_losses", f"trl_{kind}_{level}_").items():
        params = case.about["params"]
        constant = params["max_completion_length"] if kind == "dr_grpo" else None
        expect_equal(
            TokenGRPO(
                clip_low=params["low"],
                clip_high=params["high"],
                normalization=NORMALIZATIONS[kind],  # type: ignore[arg-type]
                constant=constant,
                ratio=level,  # type: ignore[arg-type]
                kl_coef=params["beta"],
            ),
            case,
            name,
        )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_cispo(folder: Path, level: str) -> None:
    for name, case in cases(folder, "policy_losses", f"trl_cispo_{level}_").items():
        params = case.about["params"]
        # Theirs names the bound itself.
        high = params["high"] - 1
        expect_equal(CISPO(clip_high=high, ratio=level, kl_coef=params["beta"]), case, name)  # type: ignore[arg-type]


def test_a_row_without_tokens_counts_as_a_row_of_loss_0(folder: Path) -> None:
    for name, case in cases(folder, "policy_losses", "trl_maskedrow_").items():
        params = case.about["params"]
        kind = params["loss_type"]
        constant = params["max_completion_length"] if kind == "dr_grpo" else None
        expect_equal(TokenGRPO(normalization=NORMALIZATIONS[kind], constant=constant), case, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("peer", ["verl_gspo", "openrlhf_gspo"])
def test_gspo_has_the_same_gradient_in_both_forms(folder: Path, peer: str) -> None:
    for name, case in cases(folder, "policy_losses", peer).items():
        advantages = case.tensor("advantages")
        if not bool((advantages == advantages[:, :1]).all()):
            continue
        params = case.about["params"]
        expect_equal(GSPO(clip_low=params["low"], clip_high=params["high"]), case, name)


def test_ppo_tokens_with_an_advantage_each(folder: Path) -> None:
    for name, case in cases(folder, "policy_losses", "openrlhf_ppo_").items():
        params = case.about["params"]
        if params["dual_clip"] is not None:
            continue
        given, mask = Given(case), case.tensor("mask").bool()
        log_probs, _ = given.log_probs(batch_of(case))
        clip = params["low"], params["high"]
        tokens = clipped_surrogate(log_probs - case.tensor("old"), case.tensor("advantages"), clip)
        over_rows = params["aggregation"] == "seq-mean-token-mean"
        loss = masked_mean(tokens, mask).mean() if over_rows else masked_sum(tokens, mask).sum() / mask.sum()
        loss.backward()
        torch.testing.assert_close(loss.detach(), case.tensor("loss"), rtol=2e-6, atol=2e-6, msg=name)
        torch.testing.assert_close(given.logits.grad, case.tensor("grad_logits"), rtol=2e-5, atol=2e-6, msg=name)


CORRECTIONS = {"tis": "clip", "icepop": "mask", "seq-mask-tis": "mask_rows"}


@pytest.mark.parametrize("peer", CORRECTIONS)
def test_tokens_of_another_engine_are_weighed_by_what_it_rounded(folder: Path, peer: str) -> None:
    for name, case in cases(folder, "policy_losses", f"openrlhf_{peer}_").items():
        params = case.about["params"]
        low, high = params["thresholds"]
        algorithm = TokenGRPO(
            clip_low=params["low"],
            clip_high=params["high"],
            normalization="token_mean",
            tis=high,
            tis_low=low,
            tis_outside=CORRECTIONS[peer],  # type: ignore[arg-type]
        )
        rollout = {"sampled_log_probs": case.tensor("rollout"), "token_advantages": case.tensor("advantages")}
        expect_equal(algorithm, case, name, **rollout)


@pytest.mark.parametrize("options", [{"tis": 0.5}, {"tis": 2.0, "tis_low": 1.5}, {"tis": 2.0, "tis_low": -1.0}])
def test_a_correction_that_leaves_out_a_weight_of_1_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a weight of 1 must lie between"):
        TokenGRPO(**options)  # type: ignore[arg-type]


def test_kl_estimators(folder: Path) -> None:
    for name, case in cases(folder, "kl", "verl_k1_", "verl_k2_", "verl_k3_", "trl_k3_", "openrlhf_k").items():
        estimator: Any = name.split("_")[1]
        found = token_kl(case.tensor("logp"), case.tensor("ref"), estimator)
        wanted = case.tensor("kl")
        # Peers clamp values to +-10, which ours does not.
        inside = wanted.abs() < 10 - 1e-6
        torch.testing.assert_close(found[inside], wanted[inside], rtol=1e-5, atol=1e-6, msg=name)


def test_log_probs_at_a_temperature_and_entropy(folder: Path) -> None:
    for name, case in cases(folder, "misc", "logp_temperature_").items():
        logits, ids = case.tensor("logits"), case.tensor("ids")
        # Ours are asked for a row's own tokens: position t from the logits before it.
        shifted = torch.nn.functional.pad(ids, (1, 0))
        padded = torch.nn.functional.pad(logits, (0, 0, 0, 1))
        found = token_log_probs(padded, shifted, case.about["params"]["temperature"])[:, 1:]
        outputs = case.about["outputs"]
        wanted = case.tensor(next(each for each in outputs if not each.startswith("grad")))
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5, msg=name)
    for name, case in cases(folder, "misc", "entropy_").items():
        padded = torch.nn.functional.pad(case.tensor("logits"), (0, 0, 0, 1))
        found = log_probs_and_entropy(padded, torch.zeros(padded.shape[:2], dtype=torch.int64), 1.0)[1][:, 1:]
        mask = case.tensor("mask").bool()
        torch.testing.assert_close(found.double()[mask], case.tensor("entropy")[mask], rtol=2e-5, atol=2e-5, msg=name)


def test_dapo_is_grpo_with_a_higher_bound_and_one_mean_over_all_tokens() -> None:
    assert DAPO() == DAPO(clip_range=0.2, clip_high=0.28, normalization="token_mean", ratio="token", surrogate="clip")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_spo_over_tokens(folder: Path, level: Any) -> None:
    """SPO by hand on the vectors' tokens: -(r A - |A| / (2 c) (r - 1)^2), and the gradient of PPO's where r is 1."""
    for case in cases(folder, "policy_losses", f"trl_grpo_{level}_").values():
        batch, models = batch_of(case), Given(case)
        algorithm = TokenGRPO(surrogate="spo", clip_low=0.1, clip_high=0.3, ratio=level)
        found = algorithm.loss(batch, models).loss  # type: ignore[arg-type]
        log_p = torch.log_softmax(models.logits, -1).gather(-1, batch.ids[..., None])[..., 0].detach()
        for row, advantage in enumerate(batch.advantages.tolist()):
            chosen = batch.mask[row]
            log_ratio = (log_p - batch.old_log_probs)[row][chosen]
            ratio = torch.exp(log_ratio.mean().expand_as(log_ratio) if level == "sequence" else log_ratio)
            bound = 0.3 if advantage > 0 else 0.1
            tokens = -(ratio * advantage - abs(advantage) / (2 * bound) * (ratio - 1) ** 2)
            torch.testing.assert_close(found[row].detach(), tokens.mean() if len(tokens) else torch.zeros(()).double())


def test_dr_grpo_is_grpo_with_sums_over_a_constant() -> None:
    assert DrGRPO(constant=8) == DrGRPO(normalization="constant", constant=8, clip_range=0.2, kl_coef=0.0)
    for options in ({}, {"normalization": "token_mean"}):
        with pytest.raises(ConfigError, match="constant"):
            create(TOKEN_ALGORITHMS, "dr_grpo", options, label="algorithm")


@pytest.mark.parametrize("options", [{"ratio": "token"}, {"normalization": "token_mean"}, {"surrogate": "spo"}])
def test_what_defines_rloo_is_fixed(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"it must be '\w+'\. grpo has a choice of it"):
        create(TOKEN_ALGORITHMS, "rloo", options, label="algorithm")


def test_rloo_is_reinforce_of_whole_completions_until_its_ratio_leaves_the_bounds(folder: Path) -> None:
    for case in cases(folder, "policy_losses", "trl_grpo_token_").values():
        batch, models = batch_of(case), Given(case)
        advantages, mask = batch.advantages, batch.mask
        loss = RLOO().loss(batch, models).loss  # type: ignore[arg-type]
        (found,) = torch.autograd.grad(loss.sum(), models.logits)
        log_p = torch.log_softmax(models.logits, -1).gather(-1, batch.ids[..., None])[..., 0]
        ratio = torch.where(mask, log_p - batch.old_log_probs, 0.0).sum(-1).exp()
        wanted = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        torch.testing.assert_close(loss, torch.where(mask.any(-1), wanted, 0.0))
        # REINFORCE: rows whose ratio moves freely have its gradient, weighed by the ratio; the others none.
        free = torch.where(advantages > 0, ratio < 1.2, ratio > 0.8)
        weight = torch.where(free, ratio * advantages, 0.0).detach()
        score = -(weight * torch.where(mask, log_p, 0.0).sum(-1)).sum()
        torch.testing.assert_close(found, torch.autograd.grad(score, models.logits)[0])
