"""Sampler steps, log-probs and deterministic solvers against numbers of the public implementations' own functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.guidance import guided, norm_preserving_guided
from flowmill.models.maths.kernels import CPS, DanceSDE, FlowDDIM, WanSDE
from flowmill.models.maths.sampling import Sampler, sample
from flowmill.models.maths.schedules import AllSteps, Subset
from flowmill.models.maths.solvers import DPMSolver2M, Euler
from flowmill.models.maths.transitions import ODE, FlowSDE, Gaussian, Grid, Kernel, expand, predictions, step_stds
from flowmill.models.policies.sd15 import SD15
from tests.golden.vectors import Vectors, load

#: One process: what these tests read is looked back at by the last of them.
pytestmark = pytest.mark.xdist_group("golden")

FLOW_GRPO = pytest.mark.parametrize("name", ["flowgrpo_step_sd3.npz", "flowgrpo_step_flux.npz"])
FLOW_FACTORY = pytest.mark.parametrize("name", ["flowfactory_euler_step.npz", "flowfactory_unipc_step.npz"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def squared_cps(level: float) -> Kernel:
    return CPS(level, log_prob="squared")


def near(ours: Tensor, expected: np.ndarray, *, atol: float = 1e-5, err_msg: str = "") -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=atol, err_msg=err_msg)


def exact(ours: Tensor, expected: np.ndarray, *, atol: float = 1e-12) -> None:
    assert ours.dtype == torch.float64
    np.testing.assert_allclose(ours, expected, rtol=0, atol=atol)


def at_steps(data: Vectors, steps: Tensor, dtype: torch.dtype = torch.float32) -> Grid:
    sigmas = data.tensor("sigmas", dtype)
    return Grid(sigmas[steps], sigmas[steps + 1], sigmas[torch.ones_like(steps)])


def at_step(data: Vectors, step: int, rows: int, dtype: torch.dtype = torch.float32) -> Grid:
    return at_steps(data, torch.full((rows,), step), dtype)


def doubled(at: Grid) -> Grid:
    return Grid(at.sigma.double(), at.sigma_next.double(), at.sigma_second.double())


@FLOW_GRPO
def test_flow_sde_step(golden_dir: Path, name: str) -> None:
    data, meta = load(golden_dir, name)
    kernel = FlowSDE(meta["noise_level"])
    for i, steps in enumerate(data.tensor("step_index")):
        where = at_steps(data, steps)
        x, v, noise, given = (data.tensor(key)[i] for key in ("x", "v", "noise", "sde_given_next"))
        step = kernel.step(x, v, where)
        near(kernel.scale(where), data["sde_std_dev_t"][i], atol=0)
        near(step.std, (data["sde_std_dev_t"] * data["sde_sqrt_dt"])[i], atol=0)
        near(step.mean, data["sde_mean"][i])
        near(step.sample(noise), data["sde_sampled_next"][i])
        near(step.log_prob(given), data["sde_given_logp"][i], atol=5e-5)
        near(step.log_prob(data.tensor("sde_sampled_next")[i]), data["sde_sampled_logp"][i], atol=5e-5)
        at = doubled(where)
        step = kernel.step(x.double(), v.double(), at)
        exact(kernel.scale(at), data["sde_f64_std_dev_t"][i])
        exact(step.mean, data["sde_f64_mean"][i])
        exact(step.log_prob(given.double()), data["sde_f64_given_logp"][i], atol=1e-7)


@FLOW_GRPO
@DTYPES
def test_cps_step(golden_dir: Path, name: str, dtype: torch.dtype) -> None:
    data, meta = load(golden_dir, name)
    kernel = squared_cps(meta["noise_level"])
    for i, steps in enumerate(data.tensor("step_index")):
        x, v, given = (data.tensor(key, dtype)[i] for key in ("x", "v", "cps_given_next"))
        step = kernel.step(x, v, at_steps(data, steps, dtype))
        if dtype == torch.float64:
            exact(step.std, data["cps_f64_std_dev_t"][i])
            exact(step.mean, data["cps_f64_mean"][i])
            exact(step.log_prob(given), data["cps_f64_given_logp"][i], atol=1e-7)
            continue
        near(step.std, data["cps_std_dev_t"][i])
        near(step.mean, data["cps_mean"][i])
        near(step.log_prob(given), data["cps_given_logp"][i])
        near(step.sample(data.tensor("noise")[i]), data["cps_sampled_next"][i])
        near(step.log_prob(data.tensor("cps_sampled_next")[i]), data["cps_sampled_logp"][i])


@FLOW_GRPO
def test_schedules_are_in_timesteps_of_a_thousand(golden_dir: Path, name: str) -> None:
    data, _ = load(golden_dir, name)
    sigmas = data.tensor("sigmas")
    near(1000 * sigmas[:-1], data["all_timesteps"])
    for i, steps in enumerate(data.tensor("step_index")):
        at = at_steps(data, steps)
        near(1000 * at.sigma, data["timesteps"][i])
        for prefix in ("sde", "cps"):
            near((at.sigma - at.sigma_next).sqrt(), data[f"{prefix}_sqrt_dt"][i])


@FLOW_GRPO
def test_outside_a_window_the_step_is_eulers(golden_dir: Path, name: str) -> None:
    data, _ = load(golden_dir, name)
    x, v = data.tensor("nl0_x"), data.tensor("nl0_v")
    steps = [at_step(data, step, len(x)) for step in range(len(data["sigmas"]) - 1)]
    matches = [at for at in steps if np.allclose(Euler().advance(x, v, at), data["nl0_sde_next"], rtol=1e-5, atol=1e-5)]
    assert len(matches) == 1
    ours = ODE().step(x, v, matches[0])
    near(ours.mean, data["nl0_cps_next"])
    # A step without noise has no density, and no distance to its own mean.
    assert np.isnan(data["nl0_sde_logp"]).all()
    assert ours.log_prob(ours.mean).isnan().all()
    still = Gaussian(ours.mean, ours.std, normalized=False)
    np.testing.assert_array_equal(still.log_prob(ours.mean), np.abs(data["nl0_cps_logp"]))


FACTORY_KERNELS: list[tuple[str, Callable[[float], Kernel]]] = [
    ("flowsde", FlowSDE),
    ("dancesde", DanceSDE),
    ("cps", squared_cps),
    ("ode", lambda level: ODE()),
]


def factory_scale(prefix: str, kernel: Kernel, step: Gaussian, at: Grid) -> Tensor:
    """Return what Flow-Factory calls std_dev_t."""
    if prefix == "dancesde":
        return step.std / (at.sigma - at.sigma_next).sqrt()
    return kernel.scale(at) if isinstance(kernel, FlowSDE) else step.std


@FLOW_FACTORY
@pytest.mark.parametrize(("prefix", "make"), FACTORY_KERNELS)
def test_flow_factory_steps(golden_dir: Path, name: str, prefix: str, make: Callable[[float], Kernel]) -> None:
    data, meta = load(golden_dir, name)
    # Its noise level is a float32 tensor, in its float64 run too.
    kernel, rounded = make(meta["noise_level"]), make(float(np.float32(meta["noise_level"])))
    for i, number in enumerate(int(step) for step in meta["steps"]):
        at = at_step(data, number, data["x"].shape[1])
        near(at.sigma_next - at.sigma, data["dt"][i], atol=1e-6)
        if name.startswith("flowfactory_unipc") and prefix == "flowsde" and number == 0:
            # sigma is 0.999999 there and the public rule, which fires at exactly 1, lets s explode to 695.
            assert data["flowsde_std_dev_t"][i].max() > 100
            assert float(FlowSDE(meta["noise_level"]).scale(at)[0]) < 5
            continue
        x, v, noise, given = (data.tensor(key)[i] for key in ("x", "v", "noise", f"{prefix}_given_next"))
        step = kernel.step(x, v, at)
        near(step.mean, data[f"{prefix}_mean"][i], atol=2e-5)
        near(step.sample(noise), data[f"{prefix}_sampled_next"][i], atol=2e-5)
        near(factory_scale(prefix, kernel, step, at), data[f"{prefix}_std_dev_t"][i])
        at = doubled(at)
        double = rounded.step(x.double(), v.double(), at)
        exact(double.mean, data[f"{prefix}_f64_mean"][i])
        if kernel.stochastic:
            near(step.log_prob(given), data[f"{prefix}_given_logp"][i], atol=5e-5)
            sampled = data.tensor(f"{prefix}_sampled_next")[i]
            near(step.log_prob(sampled), data[f"{prefix}_sampled_logp"][i], atol=5e-5)
            exact(double.log_prob(given.double()), data[f"{prefix}_f64_given_logp"][i], atol=1e-7)


@FLOW_FACTORY
@pytest.mark.parametrize(("prefix", "make"), FACTORY_KERNELS)
def test_flow_factory_steps_by_timestep(
    golden_dir: Path, name: str, prefix: str, make: Callable[[float], Kernel]
) -> None:
    """Sigma is t / 1000 there, which for UniPC's whole-number timesteps is another than the schedule's."""
    data, meta = load(golden_dir, name)
    kernel, levels = make(meta["noise_level"]), torch.cat([data.tensor("all_timesteps").float() / 1000, torch.zeros(1)])
    for i, number in enumerate(int(step) for step in meta["steps"]):
        x, v, given = (data.tensor(key)[i] for key in ("x", "v", f"{prefix}_given_next"))
        near(levels[number].expand(len(x)) * 1000, data["timesteps"][i])
        at = Grid(*(levels[index].expand(len(x)) for index in (number, number + 1, 1)))
        if name.startswith("flowfactory_unipc") and prefix == "flowsde" and number == 0:
            # The same explosion at 0.999, where s is 22; ours takes the second level.
            assert float(kernel.scale(at)[0]) < 5  # type: ignore[attr-defined]
            assert np.abs(data["flowsde_tnext_mean"][i]).max() > 4 * float(kernel.step(x, v, at).mean.abs().max())
            continue
        step = kernel.step(x, v, at)
        near(step.mean, data[f"{prefix}_tnext_mean"][i], atol=2e-5, err_msg=f"{number}")
        if kernel.stochastic:
            near(step.log_prob(given), data[f"{prefix}_tnext_logp"][i], atol=5e-5)


class Returns:
    """A policy that returns one velocity."""

    def __init__(self, velocity: Tensor) -> None:
        self._velocity = velocity

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._velocity


@FLOW_FACTORY
def test_bfloat16_latents_are_rounded_before_they_are_scored(golden_dir: Path, name: str) -> None:
    data, meta = load(golden_dir, name)
    x, v, noise = (data.tensor(f"bf16_{key}") for key in ("x", "v", "noise"))
    made = [
        sample(
            Returns(v),  # type: ignore[arg-type]
            Conditioning({}),
            x,
            data.tensor("sigmas")[[step, step + 1]],
            sampler=Sampler(kernel=FlowSDE(meta["noise_level"]), solver=Euler(), storage_dtype=torch.bfloat16),
            plans=[AllSteps(last="train").draw(1, 0, 1)] * len(x),
            noise=lambda step: noise,
        )
        for step in range(1, len(data["sigmas"]) - 1)
    ]
    matches = [r for r in made if np.array_equal(r.states[:, 1].float(), data["bf16_next"])]  # type: ignore[index]
    assert len(matches) == 1
    np.testing.assert_allclose(matches[0].log_probs[:, 0], data["bf16_logp"], rtol=1e-5)


@FLOW_FACTORY
def test_a_drawn_step_is_the_only_noisy_one(golden_dir: Path, name: str) -> None:
    data, meta = load(golden_dir, name)
    drawn = {Subset(count=1, candidates=(1, 2)).draw(meta["num_steps"], seed, 1).stochastic for seed in range(50)}
    steps = tuple(int(step) for step in data["window_steps"])
    assert drawn == {(1,), (2,)}
    assert steps in drawn
    levels = [meta["noise_level"] if step in steps else 0.0 for step in range(meta["num_steps"])]
    np.testing.assert_allclose(data["window_noise_levels"], levels, rtol=1e-6)


def test_dance_step(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "dance_step.npz")
    for i, number in enumerate(data["step_index"]):
        at = at_step(data, int(number), data["x"].shape[1])
        x, v, noise, given = (data.tensor(key)[i] for key in ("x", "v", "noise", "given_next"))
        step = DanceSDE(meta["eta"]).step(x, v, at)
        near(step.mean, data["mean"][i])
        near(step.sample(noise), data["sampled_next"][i])
        near(step.log_prob(given), data["given_logp"][i], atol=5e-5)
        near(step.log_prob(data.tensor("sampled_next")[i]), data["sampled_logp"][i], atol=5e-5)
        near(predictions(x, v, at.sigma)[0], data["pred_x0"][i])
        near(Euler().advance(x, v, at), data["ode_next"][i])
        exact(DanceSDE(meta["eta"]).step(x.double(), v.double(), doubled(at)).mean, data["f64_mean"][i])


def test_wan_step(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "flowgrpo_wan_step.npz")
    for i, number in enumerate(int(step) for step in meta["steps"]):
        at = at_step(data, number, data["x"].shape[1])
        # UniPC's timesteps are whole numbers: its schedule in thousands, cut.
        assert (data["timesteps"][i] == (1000 * at.sigma).long().numpy()).all()
        assert data["all_timesteps"][number] == data["timesteps"][i][0]
        x, v, noise, given = (data.tensor(key)[i] for key in ("x", "v", "noise", "given_next"))
        step = WanSDE().step(x, v, at)
        near(step.std, (data["std_dev_t"] * data["sqrt_dt"])[i].reshape(-1), atol=1e-7)
        near(step.mean, data["mean"][i])
        near(step.sample(noise), data["sampled_next"][i])
        near(step.log_prob(given), data["given_logp"][i], atol=5e-5)
        near(step.log_prob(data.tensor("sampled_next")[i]), data["sampled_logp"][i], atol=5e-5)
        near(Euler().advance(x, v, at), data["deterministic_next"][i])


def test_ddpo_steps_in_flow_coordinates(golden_dir: Path) -> None:
    """DDPO's DDIM step with eta of the variance-preserving x is ``ddim`` of x / (a + b) at sigma = b / (a + b)."""
    data, meta = load(golden_dir, "ddpo_ddim_step.npz")
    alphas, kernel = data.tensor("alphas_cumprod", torch.float64), FlowDDIM(meta["eta"])
    for i, now in enumerate(data.tensor("timesteps")):
        before = (now - 1000 // meta["num_steps"]).clamp(min=0)
        x, eps, noise, given = (data.tensor(key, torch.float64)[i] for key in ("x", "eps", "noise", "given_next"))
        (a, b), (a_next, b_next) = ((alphas[t].sqrt(), (1 - alphas[t]).sqrt()) for t in (now, before))
        length, length_next = expand(a + b, x), expand(a_next + b_next, x)
        clean = (x - expand(b, x) * eps) / expand(a, x)
        at = Grid(b / (a + b), b_next / (a_next + b_next), b / (a + b))
        step = kernel.step(x / length, eps - clean, at)
        near(step.sample(noise) * length_next, data["sampled_next"][i])
        # The density of x is that of x / (a + b), over a + b per dimension.
        change = torch.log(a_next + b_next)
        near(step.log_prob(given / length_next) - change, data["given_logp"][i])
        sampled = data.tensor("sampled_next", torch.float64)[i]
        near(step.log_prob(sampled / length_next) - change, data["sampled_logp"][i])


def test_the_schedule_of_stable_diffusion_1_is_ddpos(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "ddpo_ddim_step.npz")
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    settings = SimpleNamespace(device=torch.device("cpu"))
    family = SimpleNamespace(pipeline=SimpleNamespace(scheduler=scheduler), settings=settings)
    sigmas = SD15.sigmas(family, meta["num_steps"])  # type: ignore[arg-type]
    scheduler.set_timesteps(meta["num_steps"])
    np.testing.assert_array_equal(scheduler.timesteps, data["all_timesteps"])
    assert set(data["timesteps"].flatten()) <= set(data["all_timesteps"])
    alphas = data["alphas_cumprod"].astype(np.float64)[[*data["all_timesteps"], 0]]
    near(sigmas, np.sqrt(1 - alphas) / (np.sqrt(alphas) + np.sqrt(1 - alphas)), atol=1e-6)


@pytest.mark.parametrize("name", ["tempflow_step_sd3.npz", "tempflow_step_flux.npz"])
def test_tempflow_steps_branches_and_normalizer(golden_dir: Path, name: str) -> None:
    data, meta = load(golden_dir, name)
    kernel = FlowSDE(meta["noise_level"])
    for i, number in enumerate(int(step) for step in meta["steps"]):
        rows = data["x"].shape[1]
        at = at_step(data, number, rows)
        near(1000 * at.sigma, data["timesteps"][i])
        x, v, given = (data.tensor(key)[i] for key in ("x", "v", "given_next"))
        step = kernel.step(x, v, at)
        near(step.mean, data["mean"][i])
        near(step.std, data["returned_std"][i].reshape(-1)[:rows], atol=0)
        near(step.log_prob(given), data["logp"][i], atol=5e-5)
        straight = Euler().advance(x, v, at)
        near(straight, data["ode_next"][i])
        near(step.log_prob(straight), data["ode_logp_vs_sde_mean"][i], atol=5e-5)
        branches = data["branch_noise"].shape[1]
        first = [tensor[:1].expand(branches, *tensor.shape[1:]) for tensor in (x, v)]
        fan = kernel.step(*first, at_step(data, number, branches))
        following = fan.sample(data.tensor("branch_noise")[i])
        near(following, data["branch_next"][i])
        near(fan.log_prob(following), data["branch_logp"][i], atol=5e-5)
    stds = step_stds(kernel, data.tensor("sigmas"))
    near(stds, data["weights"], atol=0)
    near(1 / stds[:-1].mean(), data["inv_mean_weight_trained"], atol=0)


@pytest.mark.parametrize(("key", "solver"), [("flow", Euler), ("dpm2", DPMSolver2M)])
def test_deterministic_trajectories(golden_dir: Path, key: str, solver: Any) -> None:
    data, _ = load(golden_dir, "nft_solver.npz")
    sigmas, latents, made = data.tensor("sigmas"), data.tensor("z0"), solver()
    for step in range(len(sigmas) - 1):
        velocity = torch.tanh(data.tensor("A") * latents) * (0.5 + sigmas[step]) + 0.2 * data.tensor("B")
        latents = made.advance(latents, velocity, at_step(data, step, len(latents)))
        # Errors of float32 grow along a trajectory.
        np.testing.assert_allclose(latents, data[f"{key}_traj"][step + 1], rtol=1e-4, atol=1e-4)


def test_first_order_solvers_are_euler_on_flow_sigmas(golden_dir: Path) -> None:
    data, _ = load(golden_dir, "nft_solver.npz")
    for key in ("ddim", "dpm1"):
        np.testing.assert_allclose(data[f"{key}_traj"], data["flow_traj"], rtol=1e-4, atol=1e-4)


def test_steps_of_diffusion_nft(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "nft_solver.npz")
    x, v, given = (data.tensor(key) for key in ("step_x", "step_v", "given_next"))
    at = at_step(data, meta["step_index"], len(x))
    near(predictions(x, v, at.sigma)[0], data["pred_x0"])
    step = FlowDDIM(0.7).step(x, v, at)
    following = step.sample(data.tensor("ddim_noise"))
    near(following, data["ddim_next"])
    near(step.log_prob(following), data["ddim_logp"])
    near(FlowSDE(0.7).step(x, v, at).log_prob(given), data["flow_given_logp"])
    dance = DanceSDE(0.3).step(x, v, at)
    # Its Dance log-prob lacks the terms that do not depend on the value.
    near(dance.log_prob(given) - dance.log_prob(dance.mean), data["dance_given_logp"])


def test_norm_preserving_guidance(golden_dir: Path) -> None:
    data, meta = load(golden_dir, "qwen_norm_cfg.npz")
    negative, positive, scale = data.tensor("uncond"), data.tensor("cond"), meta["true_cfg_scale"]
    for key in ("plain_cfg", "comb"):
        near(guided(negative, positive, scale), data[key], atol=1e-6)
    near(norm_preserving_guided(negative, positive, scale), data["out"], atol=1e-6)
