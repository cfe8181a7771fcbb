"""Losses and gradients of the public trainers against our algorithms' own ``loss``.

The policy, the reference, the behavior policy and, where the vectors hold log-probs, the step are stand-ins that return
the stored numbers; everything between them and the loss is the product's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.models.maths.transitions import FlowSDE, Grid, Kernel
from flowmill.tasks.advantages.groups import shape_advantages
from flowmill.tasks.algorithms.awm import AWM
from flowmill.tasks.algorithms.base import Algorithm, RowLoss
from flowmill.tasks.algorithms.crd import CRD
from flowmill.tasks.algorithms.dgpo import DGPO
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch, TransitionBatch
from flowmill.tasks.algorithms.dpo import DPO
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.algorithms.grpo_guard import GRPOGuard
from flowmill.tasks.algorithms.nft import NFT
from flowmill.tasks.algorithms.objectives import awm_log_prob, squared_error
from flowmill.tasks.algorithms.opd import OnPolicyDistillation
from flowmill.tasks.algorithms.tempflow import TempFlow
from tests.golden.algorithms2026.rows import common
from tests.golden.given import Given, GivenStep
from tests.golden.vectors import Vectors, load

#: One process: what these tests read is looked back at by the last of them.
pytestmark = pytest.mark.xdist_group("golden")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@dataclass(frozen=True, slots=True)
class Case:
    """The vectors of losses.npz in one dtype."""

    data: Vectors
    meta: dict[str, Any]
    dtype: torch.dtype

    def __getitem__(self, key: str) -> Tensor:
        return self.data.tensor(key, self.dtype)

    @property
    def rows(self) -> int:
        return len(self.data["adv"])

    @property
    def std(self) -> Tensor:
        return torch.full((self.rows,), self.meta["std_dev_t"] * self.meta["sqrt_dt"], dtype=self.dtype)

    def common(self, latents: Tensor, units: Tensor | None = None) -> dict[str, Any]:
        groups = torch.zeros(self.rows, dtype=torch.int64)
        clipped = shape_advantages(self["adv"], groups, clip=self.meta["adv_clip"]).to(self.dtype)
        return {"latents": latents, **common(clipped, units)}

    def transitions(self, **changes: Any) -> TransitionBatch:
        # At sigma 1/2 the Flow-SDE's s is its noise level.
        sigma = torch.full((self.rows,), 0.5, dtype=self.dtype)
        own = {
            **self.common(self["mean_old"]),
            "next_latents": self["mean_old"],
            "grid": Grid(sigma, sigma - self.meta["sqrt_dt"] ** 2, sigma),
            "old_log_probs": self["logp_old"],
            # The public script's literal for FLUX is 1 / mean std of its schedule.
            "mean_std": torch.full((self.rows,), 1 / 1.73, dtype=self.dtype),
            "mean_rectifier": torch.ones(self.rows, dtype=self.dtype),
            "old_means": self["mean_old"],
        }
        return TransitionBatch(**{**own, **changes})

    def noised(self, units: Tensor | None = None, **changes: Any) -> ForwardBatch:
        time, zero = self["t"], torch.zeros(self.rows, dtype=self.dtype)
        own = {**self.common(self["x_t"], units), "clean": self["x0"], "noise": self["eps"]}
        return ForwardBatch(**{**own, "grid": Grid(time, zero, time), **changes})

    def on_steps(self, algorithm: Algorithm, **changes: Any) -> tuple[RowLoss, Tensor, Tensor]:
        """Return the loss of stored steps, and the leaves: log-probs and means."""
        log_prob, mean = (self[key].clone().requires_grad_() for key in ("logp", "mean_new"))
        result = algorithm.loss(
            self.transitions(**changes),
            self.models(mean, self["mean_ref"], GivenStep(self.meta["std_dev_t"], log_prob)),
        )
        return result, log_prob, mean

    def on_samples(self, algorithm: Algorithm, batch: DiffusionBatch) -> tuple[RowLoss, Tensor]:
        """Return the loss of noised samples, and the leaf: velocities."""
        velocity = self["v_new"].clone().requires_grad_()
        return algorithm.loss(batch, self.models(velocity, self["v_ref"], FlowSDE())), velocity

    def models(self, velocity: Tensor, reference: Tensor, kernel: Kernel) -> DiffusionModels:
        given = Given(velocity, reference)
        return DiffusionModels(trainable=given, kernel=kernel, behavior=[self["v_old"]])  # type: ignore[arg-type]

    def check(self, value: Tensor, key: str, *, rtol: float = 1e-5) -> None:
        """Compare the mean loss with the stored one."""
        np.testing.assert_allclose(value.mean().detach(), self.data[key], rtol=rtol, err_msg=key)

    def check_gradient(self, loss: Tensor, at: Tensor, key: str) -> None:
        """Compare the gradient of the mean loss with the stored one."""
        (gradient,) = torch.autograd.grad(loss.mean(), at)
        scale = float(np.abs(self.data[key]).max())
        np.testing.assert_allclose(gradient, self.data[key], rtol=1e-5, atol=1e-5 * scale, err_msg=key)


@pytest.fixture
def case(golden_dir: Path, dtype: torch.dtype) -> Case:
    return Case(*load(golden_dir, "losses.npz"), dtype)


@DTYPES
def test_grpo(case: Case) -> None:
    result, log_prob, _ = case.on_steps(GRPO(clip_range=case.meta["clip"]))
    np.testing.assert_allclose(result.metrics["ratio"], case.data["grpo_ratio"], rtol=1e-6)
    clipped = result.metrics["clip_high"] + result.metrics["clip_low"]
    case.check(clipped, "grpo_clipfrac")
    case.check(result.loss, "grpo_loss")
    case.check_gradient(result.loss, log_prob, "grpo_grad_logp")


@DTYPES
def test_tempflow(case: Case) -> None:
    result, log_prob, _ = case.on_steps(TempFlow(clip_range=case.meta["clip"]))
    case.check(result.loss, "temp_loss")
    case.check_gradient(result.loss, log_prob, "temp_grad_logp")


@DTYPES
def test_guard_of_flow_grpo(case: Case) -> None:
    algorithm = GRPOGuard(clip_range=case.meta["guard_clip"])
    result, _, _ = case.on_steps(algorithm)
    np.testing.assert_allclose(result.metrics["ratio"], case.data["guard_persample_ratio"], rtol=1e-6)
    case.check(result.loss, "guard_persample_loss")
    bias = squared_error(case["mean_new"], case["mean_old"]) / (2 * case.std**2)
    np.testing.assert_allclose(bias, case.data["guard_persample_bias"], rtol=1e-5)
    # The public script's bias is one number per batch: means that are that far away from ours give it to every row.
    far = case["mean_new"] - torch.sqrt(2 * case.std**2 * case["guard_fg_bias"]).reshape(
        -1, *[1] * (case["mean_new"].ndim - 1)
    )
    result, log_prob, _ = case.on_steps(algorithm, old_means=far)
    np.testing.assert_allclose(result.metrics["ratio"], case.data["guard_fg_ratio"], rtol=1e-6)
    case.check(result.loss, "guard_fg_loss")
    case.check_gradient(result.loss, log_prob, "guard_fg_grad_logp")


@DTYPES
def test_guard_of_flow_factory(case: Case) -> None:
    result, log_prob, _ = case.on_steps(GRPOGuard(clip_range=case.meta["guard_clip"], divide_by_dt=False))
    np.testing.assert_allclose(result.metrics["ratio"], case.data["guard_ff_ratio_row0"], rtol=1e-6)
    case.check(result.loss, "guard_ff_loss")
    case.check_gradient(result.loss, log_prob, "guard_ff_grad_logp")


@DTYPES
@pytest.mark.parametrize(
    ("kind", "key"), [("flow_grpo", "kl_flowgrpo_image"), ("gaussian", "kl_flowgrpo_wan"), ("mean", "kl_ff_xbased")]
)
def test_kl_of_steps(case: Case, kind: Any, key: str) -> None:
    nothing = torch.zeros(case.rows, dtype=case.dtype)
    result, _, mean = case.on_steps(GRPO(kl=kind, kl_coef=1.0), advantages=nothing)
    case.check(result.loss, key)
    case.check(result.metrics["kl"], key)
    if kind == "flow_grpo":
        case.check_gradient(result.loss, mean, "kl_flowgrpo_image_grad_mean")


@DTYPES
def test_kl_of_velocities(case: Case) -> None:
    nothing = torch.zeros(case.rows, dtype=case.dtype)
    velocity = case["v_new"]
    models = case.models(velocity, case["v_ref"], GivenStep(case.meta["std_dev_t"], case["logp"]))
    case.check(GRPO(kl="velocity", kl_coef=1.0).loss(case.transitions(advantages=nothing), models).loss, "kl_v")


@DTYPES
def test_distillation_is_the_kl_of_steps(case: Case) -> None:
    result, _, _ = case.on_steps(OnPolicyDistillation(teacher="given"))
    case.check(result.loss, "kl_flowgrpo_wan")


@DTYPES
def test_nft(case: Case) -> None:
    scale, weight = case.meta["adv_clip"], case.meta["nft_kl_beta"]
    for beta in case.meta["nft_betas"]:
        rows, name = case.noised(), f"nft_b{beta}"
        plain, _ = case.on_samples(NFT(beta=beta, scale=scale), rows)
        np.testing.assert_allclose(plain.metrics["preference"], case.data[f"{name}_r"], rtol=1e-6)
        np.testing.assert_allclose(plain.loss.detach() / scale, case.data[f"{name}_ori"], rtol=1e-6)
        case.check(plain.loss, f"{name}_policy", rtol=1e-6)
        result, velocity = case.on_samples(NFT(beta=beta, scale=scale, kl_coef=weight), rows)
        case.check(result.metrics["kl"], f"{name}_kl")
        case.check(result.loss, f"{name}_total", rtol=1e-6)
        case.check_gradient(result.loss, velocity, f"{name}_grad_v")
        for sign, key in ((1, "pos"), (-1, "neg")):
            extreme = torch.full((case.rows,), sign * scale, dtype=case.dtype)
            one, _ = case.on_samples(NFT(beta=beta, scale=scale), case.noised(advantages=extreme))
            np.testing.assert_allclose(one.loss.detach() * beta / scale, case.data[f"{name}_{key}"], rtol=1e-6)


@DTYPES
@pytest.mark.parametrize("weighting", ["Uniform", "t", "t2", "huber", "ghuber"])
def test_awm(case: Case, weighting: str) -> None:
    chosen: Any = weighting.lower()
    algorithm = AWM(clip_range=case.meta["awm_clip"], weighting=chosen, power=case.meta["ghuber_power"])
    result, velocity = case.on_samples(algorithm, case.noised())
    target = case["eps"] - case["x0"]
    scores = []
    for kind in ("new", "old"):
        error = squared_error(case[f"v_{kind}"], target)
        scores.append(awm_log_prob(error, case["t"], chosen, case.meta["ghuber_power"]))
        np.testing.assert_allclose(scores[-1], case.data[f"awm_{weighting}_logp_{kind}"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.metrics["ratio"].double(), torch.exp(scores[0] - scores[1]), rtol=1e-6, atol=0)
    case.check(result.loss, f"awm_{weighting}_loss")
    case.check_gradient(result.loss, velocity, f"awm_{weighting}_grad_v")


@DTYPES
def test_dpo(case: Case) -> None:
    # The first half was chosen, the second rejected.
    half = case.rows // 2
    won = torch.tensor([1.0] * half + [-1.0] * half, dtype=case.dtype)
    rows = case.noised(torch.arange(half).repeat(2), advantages=won)
    result, velocity = case.on_samples(DPO(beta=case.meta["dpo_beta"]), rows)
    case.check(result.loss, "dpo_loss")
    case.check_gradient(result.loss, velocity, "dpo_grad_v")


@DTYPES
def test_dgpo(case: Case) -> None:
    units = torch.unique(case["dgpo_group"], return_inverse=True)[1]
    algorithm = DGPO(beta=case.meta["dgpo_beta"], clip_range=case.meta["dgpo_clip"])
    result, velocity = case.on_samples(algorithm, case.noised(units))
    assert result.metrics["frozen"].tolist() == case.data["dgpo_clipped"].astype(float).tolist()
    case.check(result.loss, "dgpo_loss")
    case.check_gradient(result.loss, velocity, "dgpo_grad_v")


@DTYPES
@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.5])
@pytest.mark.parametrize("distance", ["mse", "bce"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_crd(case: Case, temperature: float, distance: Any, adaptive: bool) -> None:
    algorithm = CRD(
        beta=case.meta["crd_beta"],
        scale=case.meta["adv_clip"],
        distance=distance,
        temperature=temperature,
        adaptive=adaptive,
        detach_center=True,
        public_pools=temperature == 0,
    )
    # The vectors center over the whole batch.
    result, velocity = case.on_samples(algorithm, case.noised(torch.zeros(case.rows, dtype=torch.int64)))
    key = f"crd_w{temperature}_{distance}_adaptive{int(adaptive)}"
    case.check(result.loss, key)
    case.check_gradient(result.loss, velocity, f"{key}_grad_v")
