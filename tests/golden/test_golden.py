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
from models.transitions import FlowSDE, Gaussian, Grid
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
