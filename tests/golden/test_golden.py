"""Our maths against numbers produced by the public implementations' own functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.rewards.base import quoted_text
from models.rewards.jpeg import JpegCompressibility
from models.rewards.ocr import text_score
from models.schedules import AllSteps, Window
from models.solvers import DPMSolver2M, Euler
from models.transitions import (
    CPS,
    ODE,
    DanceSDE,
    FlowDDIM,
    FlowSDE,
    Gaussian,
    Grid,
    WanSDE,
    ddim_epsilon_step,
    predictions,
    step_stds,
)
from tasks.algorithms.advantages import group_advantages
from tasks.algorithms.objectives import clipped_surrogate, policy_kl


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


@pytest.mark.parametrize(("std", "key"), [("group", 0), ("global", 1)])
def test_group_advantages(golden_dir: Path, std: Any, key: int) -> None:
    data, _ = load(golden_dir, "advantages.npz")
    groups = torch.from_numpy(np.unique(data["group_id"], return_inverse=True)[1])
    ours = group_advantages(torch.from_numpy(data["reward"]), groups, std=std, epsilon=1e-4, clip=1e9)
    expected = data[f"flowgrpo_globalstd{key}"]
    for column in range(expected.shape[1]):
        np.testing.assert_allclose(ours, expected[:, column], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ours != 0, data[f"keep_mask_globalstd{key}"])


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
