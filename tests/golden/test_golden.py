"""Our maths against numbers produced by the public implementations' own functions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.adapters import warm_decay
from models.guidance import guided, norm_preserving_guided
from models.kernels import CPS, DanceSDE, FlowDDIM, WanSDE, ddim_epsilon_step
from models.rewards.base import quoted_text
from models.rewards.jpeg import JpegCompressibility
from models.rewards.ocr import text_score
from models.schedules import AllSteps, Window
from models.solvers import DPMSolver2M, Euler
from models.transitions import ODE, FlowSDE, Gaussian, Grid, predictions, step_stds
from tasks.algorithms.advantages import (
    Normalizer,
    gdpo_advantages,
    group_advantages,
    group_statistics,
    running_advantages,
    shape_advantages,
)
from tasks.algorithms.base import BehaviorDecay
from tasks.algorithms.crd import CRD, crd_error
from tasks.algorithms.objectives import (
    awm_log_prob,
    clipped_surrogate,
    dgpo_weight,
    dpo_loss,
    guarded_log_ratio,
    nft_loss,
    policy_kl,
    preference,
    squared_error,
)


def load(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with np.load(folder / name) as file:
        data = {key: file[key] for key in file.files}
    return data, json.loads(bytes(data.pop("__meta__")))


def grid(data: dict[str, Any], index: int, dtype: torch.dtype) -> Grid:
    sigmas = torch.from_numpy(data["sigmas"]).to(dtype)
    steps = torch.from_numpy(data["step_index"][index])
    return Grid(sigmas[steps], sigmas[steps + 1], sigmas[torch.ones_like(steps)])


@pytest.mark.parametrize("name", ["flowgrpo_step_sd3.npz", "flowgrpo_step_flux.npz"])
def test_flow_sde_step(golden_dir: Path, name: str) -> None:
    data, meta = load(golden_dir, name)
    kernel = FlowSDE(meta["noise_level"])
    for i in range(len(data["x"])):
        where = grid(data, i, torch.float32)
        x, v, noise = (torch.from_numpy(data[key][i]) for key in ("x", "v", "noise"))
        step = kernel.step(x, v, where)
        np.testing.assert_allclose(kernel.scale(where), data["sde_std_dev_t"][i], rtol=1e-5)
        np.testing.assert_allclose(step.mean, data["sde_mean"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.sample(noise), data["sde_sampled_next"][i], rtol=1e-5, atol=1e-5)
        given = step.log_prob(torch.from_numpy(data["sde_given_next"][i]))
        np.testing.assert_allclose(given, data["sde_given_logp"][i], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["flowgrpo_step_sd3.npz", "flowgrpo_step_flux.npz"])
def test_flow_sde_step_in_float64(golden_dir: Path, name: str) -> None:
    data, meta = load(golden_dir, name)
    for i in range(len(data["x"])):
        x, v, given = (torch.from_numpy(data[key][i]).double() for key in ("x", "v", "sde_given_next"))
        step = FlowSDE(meta["noise_level"]).step(x, v, grid(data, i, torch.float64))
        np.testing.assert_allclose(step.mean, data["sde_f64_mean"][i], rtol=0, atol=1e-12)
        np.testing.assert_allclose(step.log_prob(given), data["sde_f64_given_logp"][i], rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["flowgrpo_step_sd3.npz", "flowgrpo_step_flux.npz"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cps_step(golden_dir: Path, name: str, dtype: torch.dtype) -> None:
    data, meta = load(golden_dir, name)
    kernel = CPS(meta["noise_level"], log_prob="squared")
    exact = dtype == torch.float64
    for i in range(len(data["x"])):
        x, v, given = (torch.from_numpy(data[key][i]).to(dtype) for key in ("x", "v", "cps_given_next"))
        step = kernel.step(x, v, grid(data, i, dtype))
        mean, logp = (data[f"cps_{'f64_' * exact}{key}"][i] for key in ("mean", "given_logp"))
        np.testing.assert_allclose(step.mean, mean, rtol=0 if exact else 1e-5, atol=1e-12 if exact else 1e-5)
        np.testing.assert_allclose(step.log_prob(given), logp, rtol=0 if exact else 1e-5, atol=1e-7 if exact else 1e-5)
        if not exact:
            sampled = step.sample(torch.from_numpy(data["noise"][i]))
            np.testing.assert_allclose(sampled, data["cps_sampled_next"][i], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(step.std, data["cps_std_dev_t"][i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["flowgrpo_step_sd3.npz", "flowgrpo_step_flux.npz"])
def test_outside_a_window_the_step_is_eulers(golden_dir: Path, name: str) -> None:
    data, _ = load(golden_dir, name)
    index = next(i for i in range(len(data["x"])) if len(set(data["step_index"][i])) == 1)
    sigmas = torch.from_numpy(data["sigmas"])
    x, v = (torch.from_numpy(data[key]) for key in ("nl0_x", "nl0_v"))
    for step in range(len(sigmas) - 1):
        at = Grid(*(sigmas[i].expand(len(x)) for i in (step, step + 1, 1)))
        ours = Euler().advance(x, v, at)
        if np.allclose(ours, data["nl0_sde_next"], rtol=1e-5, atol=1e-5):
            return
    raise AssertionError(f"no step of the schedule gives the stored Euler step ({index})")


@pytest.mark.parametrize("name", ["flowfactory_euler_step.npz", "flowfactory_unipc_step.npz"])
@pytest.mark.parametrize(
    ("prefix", "kernel"),
    [
        ("flowsde", FlowSDE),
        ("dancesde", DanceSDE),
        ("cps", lambda level: CPS(level, log_prob="squared")),
        ("ode", None),
    ],
)
def test_flow_factory_steps(golden_dir: Path, name: str, prefix: str, kernel: Any) -> None:
    data, meta = load(golden_dir, name)
    sigmas = torch.from_numpy(data["sigmas"])
    for i, number in enumerate(int(step) for step in meta["steps"]):
        if name.startswith("flowfactory_unipc") and prefix == "flowsde" and number == 0:
            # sigma is 0.999999 there and the public rule, which fires at exactly 1, lets s explode to 695.
            assert data["flowsde_std_dev_t"][i].max() > 100
            assert float(FlowSDE(meta["noise_level"]).scale(Grid(sigmas[:1], sigmas[1:2], sigmas[1:2]))) < 5
            continue
        rows = data["x"].shape[1]
        at = Grid(*(sigmas[index].expand(rows) for index in (number, number + 1, 1)))
        x, v, noise, given = (torch.from_numpy(data[key][i]) for key in ("x", "v", "noise", f"{prefix}_given_next"))
        step = (kernel(meta["noise_level"]) if kernel else ODE()).step(x, v, at)
        np.testing.assert_allclose(step.mean, data[f"{prefix}_mean"][i], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(step.sample(noise), data[f"{prefix}_sampled_next"][i], rtol=1e-5, atol=2e-5)
        if kernel:
            np.testing.assert_allclose(step.log_prob(given), data[f"{prefix}_given_logp"][i], rtol=1e-5, atol=5e-5)


def test_dance_step(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "dance_step.npz")
    sigmas = torch.from_numpy(data["sigmas"])
    for i, number in enumerate(data["step_index"]):
        rows = data["x"].shape[1]
        at = Grid(*(sigmas[index].expand(rows) for index in (number, number + 1, 1)))
        x, v, noise, given = (torch.from_numpy(data[key][i]) for key in ("x", "v", "noise", "given_next"))
        step = DanceSDE(meta["eta"]).step(x, v, at)
        np.testing.assert_allclose(step.mean, data["mean"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.sample(noise), data["sampled_next"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.log_prob(given), data["given_logp"][i], rtol=1e-5, atol=5e-5)
        np.testing.assert_allclose(predictions(x, v, at.sigma)[0], data["pred_x0"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(Euler().advance(x, v, at), data["ode_next"][i], rtol=1e-5, atol=1e-5)
        exact = DanceSDE(meta["eta"]).step(x.double(), v.double(), Grid(*(t.double() for t in _fields(at))))
        np.testing.assert_allclose(exact.mean, data["f64_mean"][i], rtol=0, atol=1e-7)


def _fields(at: Grid) -> tuple[torch.Tensor, ...]:
    return (at.sigma, at.sigma_next, at.sigma_second)


def test_wan_step(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "flowgrpo_wan_step.npz")
    sigmas = torch.from_numpy(data["sigmas"])
    for i, number in enumerate(meta["steps"]):
        rows = data["x"].shape[1]
        at = Grid(*(sigmas[index].expand(rows) for index in (int(number), int(number) + 1, 1)))
        x, v, noise, given = (torch.from_numpy(data[key][i]) for key in ("x", "v", "noise", "given_next"))
        step = WanSDE().step(x, v, at)
        np.testing.assert_allclose(step.mean, data["mean"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.sample(noise), data["sampled_next"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.log_prob(given), data["given_logp"][i], rtol=1e-5, atol=5e-5)
        np.testing.assert_allclose(Euler().advance(x, v, at), data["deterministic_next"][i], rtol=1e-5, atol=1e-5)


def test_ddpo_ddim_step(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "ddpo_ddim_step.npz")
    alphas = torch.from_numpy(data["alphas_cumprod"])
    for i in range(len(data["x"])):
        now = torch.from_numpy(data["timesteps"][i])
        before = (now - 1000 // meta["num_steps"]).clamp(min=0)
        x, eps, noise, given = (torch.from_numpy(data[key][i]) for key in ("x", "eps", "noise", "given_next"))
        step = ddim_epsilon_step(x, eps, alphas[now], alphas[before], meta["eta"])
        np.testing.assert_allclose(step.sample(noise), data["sampled_next"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.log_prob(given), data["given_logp"][i], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["tempflow_step_sd3.npz", "tempflow_step_flux.npz"])
def test_tempflow_steps_branches_and_normalizer(golden_dir: Path, name: str) -> None:
    data, meta = load(golden_dir, name)
    sigmas, kernel = torch.from_numpy(data["sigmas"]), FlowSDE(meta["noise_level"])
    for i, number in enumerate(int(step) for step in meta["steps"]):
        rows = data["x"].shape[1]
        at = Grid(*(sigmas[index].expand(rows) for index in (number, number + 1, 1)))
        x, v, given = (torch.from_numpy(data[key][i]) for key in ("x", "v", "given_next"))
        step = kernel.step(x, v, at)
        np.testing.assert_allclose(step.mean, data["mean"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(step.std, data["returned_std"][i].reshape(-1)[:rows], rtol=1e-5)
        np.testing.assert_allclose(step.log_prob(given), data["logp"][i], rtol=1e-5, atol=5e-5)
        branches = data["branch_noise"].shape[1]
        first = [tensor[:1].expand(branches, *tensor.shape[1:]) for tensor in (x, v)]
        fan = kernel.step(*first, Grid(*(t[:1].expand(branches) for t in _fields(at))))
        following = fan.sample(torch.from_numpy(data["branch_noise"][i]))
        np.testing.assert_allclose(following, data["branch_next"][i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(fan.log_prob(following), data["branch_logp"][i], rtol=1e-5, atol=5e-5)
    stds = step_stds(kernel, sigmas)
    np.testing.assert_allclose(stds, data["weights"], rtol=1e-5)
    np.testing.assert_allclose(1 / stds[:-1].mean(), data["inv_mean_weight_trained"], rtol=1e-5)


@pytest.mark.parametrize(("key", "solver"), [("flow", Euler), ("dpm2", DPMSolver2M)])
def test_deterministic_trajectories(golden_dir: Path, key: str, solver: Any) -> None:
    data, _ = load(golden_dir, "nft_solver.npz")
    sigmas = torch.from_numpy(data["sigmas"])
    latents, made = torch.from_numpy(data["z0"]), solver()
    for step in range(len(sigmas) - 1):
        velocity = torch.tanh(torch.from_numpy(data["A"]) * latents) * (0.5 + sigmas[step]) + 0.2 * torch.from_numpy(
            data["B"]
        )
        at = Grid(*(sigmas[index].expand(len(latents)) for index in (step, step + 1, 1)))
        latents = made.advance(latents, velocity, at)
        np.testing.assert_allclose(latents, data[f"{key}_traj"][step + 1], rtol=1e-4, atol=1e-4)


def test_first_order_solvers_are_euler_on_flow_sigmas(golden_dir: Path) -> None:
    data, _ = load(golden_dir, "nft_solver.npz")
    for key in ("ddim", "dpm1"):
        np.testing.assert_allclose(data[f"{key}_traj"], data["flow_traj"], rtol=1e-4, atol=1e-4)


def test_norm_preserving_guidance(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "qwen_norm_cfg.npz")
    negative, positive = torch.from_numpy(data["uncond"]), torch.from_numpy(data["cond"])
    scale = meta["true_cfg_scale"]
    np.testing.assert_allclose(guided(negative, positive, scale), data["plain_cfg"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm_preserving_guided(negative, positive, scale), data["out"], rtol=1e-5, atol=1e-6)


def test_nft_ddim_step(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "nft_solver.npz")
    sigmas, number = torch.from_numpy(data["sigmas"]), meta["step_index"]
    rows = len(data["step_x"])
    at = Grid(*(sigmas[index].expand(rows) for index in (number, number + 1, 1)))
    x, v = (torch.from_numpy(data[key]) for key in ("step_x", "step_v"))
    step = FlowDDIM(0.7).step(x, v, at)
    following = step.sample(torch.from_numpy(data["ddim_noise"]))
    np.testing.assert_allclose(following, data["ddim_next"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(step.log_prob(following), data["ddim_logp"], rtol=1e-5, atol=5e-5)
    flow = FlowSDE(0.7).step(x, v, at).log_prob(torch.from_numpy(data["given_next"]))
    np.testing.assert_allclose(flow, data["flow_given_logp"], rtol=1e-5, atol=5e-5)


def test_window_starts(golden_dir: Path) -> None:
    for case in json.loads((golden_dir / "schedules.json").read_text())["flowgrpo_fast_windows"]:
        first, stop = case["window_when_size0"]
        assert AllSteps().draw(case["num_steps"], 0, 1).trained == tuple(range(first, stop))
        if case["size"] == 0:
            continue
        low, high = case["range"]
        plan = Window(size=case["size"], low=low, high=high)
        drawn = {plan.draw(case["num_steps"], seed, 1).trained for seed in range(200)}
        assert sorted(window[0] for window in drawn) == case["allowed_starts"]
        assert all(window == tuple(range(window[0], window[0] + case["size"])) for window in drawn)


def rewards_of(folder: Path) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    data, _ = load(folder, "advantages.npz")
    groups = torch.from_numpy(np.unique(data["group_id"], return_inverse=True)[1])
    return data, torch.from_numpy(data["reward"]), groups


@pytest.mark.parametrize(("std", "key"), [("group", 0), ("global", 1)])
def test_flow_grpo_advantages(golden_dir: Path, std: Any, key: int) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    ours = group_advantages(rewards, groups, Normalizer(std=std))
    expected = data[f"flowgrpo_globalstd{key}"]
    for column in range(expected.shape[1]):
        np.testing.assert_allclose(ours, expected[:, column], rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(ours != 0, data[f"keep_mask_globalstd{key}"])
    per_step = data[f"flowgrpo_pertimestep_globalstd{key}"]
    for column in range(per_step.shape[1]):
        ours = group_advantages(torch.from_numpy(data["reward_t2"][:, column]), groups, Normalizer(std=std))
        np.testing.assert_allclose(ours, per_step[:, column], rtol=1e-6, atol=1e-9)


def test_best_and_worst_of_a_group(golden_dir: Path) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    ours = shape_advantages(rewards.double(), groups, mode="best_worst", clip=1e9)
    live = ~group_statistics(rewards, groups).constant[groups].numpy()
    # A group of equal rewards has no best: the public code gives its first sample +1 or -1 nevertheless.
    np.testing.assert_array_equal(ours.numpy()[live], data["flowgrpo_type_dpo"][live])
    np.testing.assert_array_equal((ours.numpy() > 0)[live], (data["flowgrpo_type_sft"] > 0)[live])
    np.testing.assert_allclose(rewards, data["flowgrpo_type_rwr"])


def test_ddpo_running_advantages(golden_dir: Path) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    _, meta = load(golden_dir, "advantages.npz")
    options = {"buffer": meta["ddpo_buffer"], "min_count": meta["ddpo_min_count"], "epsilon": 1e-6}
    nothing = [torch.zeros(0)] * (int(groups.max()) + 1)
    np.testing.assert_allclose(
        running_advantages(rewards, groups, nothing, **options), data["ddpo_epoch1"], rtol=1e-5, atol=1e-6
    )
    history = [rewards[groups == group] for group in range(int(groups.max()) + 1)]
    second = running_advantages(torch.from_numpy(data["ddpo_reward2"]), groups, history, **options)
    np.testing.assert_allclose(second, data["ddpo_epoch2"], rtol=1e-5, atol=1e-6)


def test_dance_advantages(golden_dir: Path) -> None:
    data, _, _ = rewards_of(golden_dir)
    _, meta = load(golden_dir, "advantages.npz")
    rewards = torch.from_numpy(data["dance_reward_sorted"])
    groups = torch.arange(len(rewards)) // meta["group_size"]
    ours = group_advantages(rewards, groups, Normalizer(epsilon=1e-8, unbiased=True))
    np.testing.assert_allclose(ours, data["dance_adv_sorted"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", [0, 1])
def test_flow_factory_advantages(golden_dir: Path, key: int) -> None:
    data, rewards, groups = rewards_of(golden_dir)
    _, meta = load(golden_dir, "advantages.npz")
    both, weights = [rewards, torch.from_numpy(data["reward_b"])], [meta["weights"]["a"], meta["weights"]["b"]]
    normalizer = Normalizer(std="global" if key else "group", epsilon=1e-6, floor="max")
    total = sum(weight * reward.double() for weight, reward in zip(weights, both, strict=True))
    assert isinstance(total, torch.Tensor)
    ours = group_advantages(total, groups, normalizer)
    np.testing.assert_allclose(ours, data[f"ff_sum_globalstd{key}_gather"], rtol=1e-6, atol=1e-9)
    # 'contig' takes the batch std in float32 from sums of squares.
    np.testing.assert_allclose(ours, data[f"ff_sum_globalstd{key}_contig"], rtol=1e-5, atol=1e-6)
    gdpo = gdpo_advantages(both, weights, groups, Normalizer(epsilon=1e-6, floor="max"))
    constant = torch.stack([group_statistics(reward, groups).constant for reward in both]).all(0)[groups].numpy()
    for kind in ("gather", "contig"):
        expected = data[f"ff_gdpo_globalstd{key}_{kind}"]
        np.testing.assert_allclose(gdpo.numpy()[~constant], expected[~constant], rtol=1e-5, atol=1e-5)


def test_grpo_loss_and_gradient(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "losses.npz")
    log_prob = torch.from_numpy(data["logp"]).requires_grad_()
    ratio = torch.exp(log_prob - torch.from_numpy(data["logp_old"]))
    advantages = torch.from_numpy(data["adv"]).clamp(-meta["adv_clip"], meta["adv_clip"])
    loss = clipped_surrogate(ratio, advantages, meta["clip"]).mean()
    loss.backward()
    np.testing.assert_allclose(ratio.detach(), data["grpo_ratio"], rtol=1e-6)
    np.testing.assert_allclose(loss.detach(), data["grpo_loss"], rtol=1e-5)
    np.testing.assert_allclose(log_prob.grad, data["grpo_grad_logp"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "key"), [("flow_grpo", "kl_flowgrpo_image"), ("gaussian", "kl_flowgrpo_wan"), ("velocity", "kl_v")]
)
def test_kl_scalings(golden_dir: Path, kind: str, key: str) -> None:
    data, meta = load(golden_dir, "losses.npz")
    rows = len(data["logp"])
    std = torch.full((rows,), meta["std_dev_t"] * meta["sqrt_dt"])
    new, reference = (Gaussian(torch.from_numpy(data[name]), std) for name in ("mean_new", "mean_ref"))
    velocities = (torch.from_numpy(data["v_new"]), torch.from_numpy(data["v_ref"]))
    scale = torch.full((rows,), meta["sqrt_dt"] ** 2)
    ours = policy_kl(kind, new, reference, velocities, scale).mean()
    np.testing.assert_allclose(ours, data[key], rtol=1e-5)


def losses(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    data, meta = load(folder, "losses.npz")
    tensors = {key: torch.from_numpy(value) for key, value in data.items()}
    tensors["adv"] = tensors["adv"].clamp(-meta["adv_clip"], meta["adv_clip"])
    return tensors, meta


def check_gradient(loss: torch.Tensor, at: torch.Tensor, expected: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(loss, at)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_tempflow_and_guard_losses(golden_dir: Path) -> None:
    data, meta = losses(golden_dir)
    std = torch.full((len(data["logp"]),), meta["std_dev_t"] * meta["sqrt_dt"])
    for name in ("temp", "guard_persample", "guard_fg", "guard_ff"):
        log_prob = data["logp"].clone().requires_grad_()
        log_ratio, advantages, clip = log_prob - data["logp_old"], data["adv"], meta["clip"]
        if name == "temp":
            # The public script's literal for FLUX is 1 / mean std of its schedule.
            advantages = 1.73 * std * advantages
        elif name == "guard_fg":
            # Its bias is one number per batch; ours is per sample, so the number is put in by hand here.
            log_ratio, clip = std * (log_ratio + data["guard_fg_bias"]), meta["guard_clip"]
        else:
            log_ratio = guarded_log_ratio(log_ratio, data["mean_new"], data["mean_old"], std)
            clip = meta["guard_clip"]
        ratio = torch.exp(log_ratio)
        loss = clipped_surrogate(ratio, advantages, clip).mean()
        if name in ("guard_fg", "guard_persample"):
            loss = loss / meta["sqrt_dt"] ** 2
        np.testing.assert_allclose(loss.detach(), data[f"{name}_loss"], rtol=2e-5, err_msg=name)
        if f"{name}_grad_logp" in data:
            check_gradient(loss, log_prob, data[f"{name}_grad_logp"])
        if f"{name}_ratio" in data:
            np.testing.assert_allclose(ratio.detach(), data[f"{name}_ratio"], rtol=1e-5)


def test_nft_loss(golden_dir: Path) -> None:
    data, meta = losses(golden_dir)
    weight = preference(data["adv"], meta["adv_clip"])
    state = (data["x_t"], data["x0"], data["t"])
    for beta in meta["nft_betas"]:
        velocity = data["v_new"].clone().requires_grad_()
        loss = meta["adv_clip"] * nft_loss(velocity, data["v_old"], state, weight, beta).mean()
        np.testing.assert_allclose(weight, data[f"nft_b{beta}_r"], rtol=1e-6)
        np.testing.assert_allclose(loss.detach(), data[f"nft_b{beta}_policy"], rtol=1e-6)
        kl = squared_error(velocity, data["v_ref"]).mean()
        total = loss + meta["nft_kl_beta"] * kl
        np.testing.assert_allclose(kl.detach(), data[f"nft_b{beta}_kl"], rtol=1e-5)
        np.testing.assert_allclose(total.detach(), data[f"nft_b{beta}_total"], rtol=1e-6)
        check_gradient(total, velocity, data[f"nft_b{beta}_grad_v"])


@pytest.mark.parametrize("weighting", ["Uniform", "t", "t2", "huber", "ghuber"])
def test_awm_loss(golden_dir: Path, weighting: str) -> None:
    data, meta = losses(golden_dir)
    velocity, target = data["v_new"].clone().requires_grad_(), data["eps"] - data["x0"]
    new, old = (
        awm_log_prob(squared_error(v, target), data["t"], weighting.lower(), meta["ghuber_power"]).float()
        for v in (velocity, data["v_old"])
    )
    np.testing.assert_allclose(new.detach(), data[f"awm_{weighting}_logp_new"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(old, data[f"awm_{weighting}_logp_old"], rtol=1e-5, atol=1e-6)
    loss = clipped_surrogate(torch.exp(new - old), data["adv"], meta["awm_clip"]).mean()
    np.testing.assert_allclose(loss.detach(), data[f"awm_{weighting}_loss"], rtol=1e-5)
    check_gradient(loss, velocity, data[f"awm_{weighting}_grad_v"])


def test_dpo_loss(golden_dir: Path) -> None:
    data, meta = losses(golden_dir)
    velocity, target = data["v_new"].clone().requires_grad_(), data["eps"] - data["x0"]
    error, reference = squared_error(velocity, target), squared_error(data["v_ref"], target)
    half = len(error) // 2
    loss = dpo_loss(error[:half] - error[half:], reference[:half] - reference[half:], meta["dpo_beta"]).mean()
    np.testing.assert_allclose(loss.detach(), data["dpo_loss"], rtol=1e-5)
    check_gradient(loss, velocity, data["dpo_grad_v"])


def test_dgpo_loss(golden_dir: Path) -> None:
    data, meta = losses(golden_dir)
    velocity, target = data["v_new"].clone().requires_grad_(), data["eps"] - data["x0"]
    error, old, reference = (squared_error(v, target) for v in (velocity, data["v_old"], data["v_ref"]))
    units = torch.unique(data["dgpo_group"], return_inverse=True)[1]
    ratio, clip, advantages = torch.exp(old - error).detach(), meta["dgpo_clip"], data["adv"]
    frozen = torch.where(advantages > 0, ratio > 1 + clip, ratio < 1 - clip)
    assert frozen.tolist() == data["dgpo_clipped"].tolist()
    weight = dgpo_weight(advantages, error.detach(), reference, units, meta["dgpo_beta"])
    loss = (weight * advantages * torch.where(frozen, error.detach(), error)).mean()
    np.testing.assert_allclose(loss.detach(), data["dgpo_loss"], rtol=1e-5)
    check_gradient(loss, velocity, data["dgpo_grad_v"])


@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.5])
@pytest.mark.parametrize("distance", ["mse", "bce"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_crd_loss(golden_dir: Path, temperature: float, distance: Any, adaptive: bool) -> None:
    data, meta = losses(golden_dir)
    velocity, target = data["v_new"].clone().requires_grad_(), data["eps"] - data["x0"]
    old, new = (crd_error(v, target, adaptive=adaptive) for v in (data["v_old"], velocity))
    wanted = preference(data["adv"], meta["adv_clip"]).to(new.dtype)
    algorithm = CRD(
        beta=meta["crd_beta"], distance=distance, temperature=temperature, detach_center=True, public_pools=True
    )
    # The vectors center over the whole batch.
    units = torch.zeros(len(wanted), dtype=torch.int64)
    loss = (meta["adv_clip"] / meta["crd_beta"]) * algorithm.compare(old - new, wanted, units).mean()
    key = f"crd_w{temperature}_{distance}_adaptive{int(adaptive)}"
    np.testing.assert_allclose(loss.detach(), data[key], rtol=1e-5)
    check_gradient(loss, velocity, data[f"{key}_grad_v"])


def test_kl_by_means(golden_dir: Path) -> None:
    data, _ = losses(golden_dir)
    steps = [Gaussian(data[name], torch.ones(len(data["adv"]))) for name in ("mean_new", "mean_ref")]
    ours = policy_kl("mean", *steps, (data["v_new"], data["v_ref"]), torch.ones(len(data["adv"]))).mean()
    np.testing.assert_allclose(ours, data["kl_ff_xbased"], rtol=1e-5)


def test_decays(golden_dir: Path) -> None:
    data = json.loads((golden_dir / "schedules.json").read_text())
    types = {"0": BehaviorDecay(), "1": BehaviorDecay(rate=0.001, maximum=0.5)}
    types["2"] = late = BehaviorDecay(flat=75, rate=0.0075, maximum=0.999)
    expected = {**data["decay"], **{f"nft{key}": values for key, values in data["decay"]["nft"].items()}}
    decays = {
        **{f"nft{key}": decay for key, decay in types.items()},
        "ff_piecewise": types["1"],
        "ff_linear": BehaviorDecay(rate=0.003, maximum=0.3),
        "dgpo_ema_ref": BehaviorDecay(rate=0.001, maximum=0.3),
        "crd_default_old": BehaviorDecay(start=0.25, rate=0.005, maximum=0.999),
        "crd_default_sampling": late,
        "ema_flowgrpo_0p9": partial(warm_decay, decay=0.9),
        "ff_power": partial(warm_decay, decay=0.995),
    }
    assert decays.keys() == expected.keys() - {"nft"}
    for name, decay in decays.items():
        assert [decay(step) for step in data["decay_steps"]] == pytest.approx(expected[name]), name


def test_ocr_score(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "ocr.json").read_text())["images"]
    assert cases
    for case in cases:
        if case["image_reward"] is None:
            # Flow-GRPO fails on a prompt without quotes; like Flow-Factory we then take the whole prompt.
            text = "".join(case["lines"] or [])
            ours, theirs = text_score(text, quoted_text(case["prompt"])), case["flowfactory_reward"]
        else:
            text = "".join(
                line for line, sure in zip(case["lines"] or [], case["confidences"] or [], strict=True) if sure > 0
            )
            ours, theirs = text_score(text, quoted_text(case["prompt"])), case["image_reward"]
        assert ours == pytest.approx(theirs, abs=1e-9), case


def test_jpeg_score(golden_dir: Path) -> None:
    data, _ = load(golden_dir, "jpeg_reward.npz")
    images = np.round(data["images"] * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    ours = JpegCompressibility().score(images, [""] * len(images), [{}] * len(images)).values
    # Depends on the libjpeg build.
    np.testing.assert_allclose(ours, data["compressibility"], rtol=0.01)
