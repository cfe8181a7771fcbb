"""The sampling loop, the replay and branching against one row and one step at a time, on a policy in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.models.maths.branching import branch
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Rollout, Sampler, grid_at, ode_plan, replay, sample
from flowmill.models.maths.schedules import AllSteps, BranchEveryStep, FinalOnly, Steps
from flowmill.models.maths.solvers import DPMSolver2M, Euler
from flowmill.models.maths.transitions import FlowSDE, Grid
from flowmill.tasks.modalities.media import decode_in_slices

SIGMAS = torch.tensor([1.0, 0.85, 0.6, 0.3, 0.0])
LATENTS = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
KERNEL = FlowSDE(0.5)


class Linear:
    """v = 0.6 x - sigma / 2 + what the prompt and the negative one say."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        self.sizes.append(len(latents))
        assert conditioning.negative is not None
        shift = 1.5 * conditioning.positive["shift"] - 0.5 * conditioning.negative["shift"]
        assert len(latents) == len(sigma) == len(shift)
        return 0.6 * latents - 0.5 * sigma.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1)


def base(latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
    return 0.4 * latents + conditioning.positive["shift"].reshape(-1, 1, 1)


CONDITIONING = Conditioning({"shift": torch.tensor([0.0, 0.7, -0.4])}, {"shift": torch.tensor([0.3, -0.2, 0.1])})


def noise(step: int, number: int = 0) -> Tensor:
    return torch.randn(LATENTS.shape, generator=torch.Generator().manual_seed(10 * step + number))


def rollout(plans: list[Steps], **settings: Any) -> Rollout:
    sampler = Sampler(**{"kernel": KERNEL, "solver": Euler(), **settings})
    return sample(Linear(), CONDITIONING, LATENTS, SIGMAS, sampler=sampler, plans=plans, noise=noise)  # type: ignore[arg-type]


def at(step: int) -> Grid:
    return Grid(*(SIGMAS[index].reshape(1) for index in (step, step + 1, 1)))


def one_row(row: int, plan: Steps, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Denoise one row by itself, Euler steps outside its plan."""
    x, policy, prompt = LATENTS[row : row + 1], Linear(), CONDITIONING.rows(torch.tensor([row]))
    states: dict[int, Tensor] = {}
    scored: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for step in range(4):
        if step in plan.states:
            x = x.to(dtype).float()
            states[step] = x
        v = policy.velocity(x, SIGMAS[step : step + 1], prompt)
        if step in plan.stochastic:
            drawn, plain = (
                KERNEL.step(x, velocity, at(step)) for velocity in (v, base(x, SIGMAS[step : step + 1], prompt))
            )
            x = (drawn.mean + drawn.std * noise(step)[row : row + 1]).to(dtype).float()
            kl = ((drawn.mean - plain.mean) ** 2).mean() / (2 * drawn.std**2)
            scored[step] = (drawn.log_prob(x)[0], drawn.mean[0], kl[0])
        else:
            x = x + (SIGMAS[step + 1] - SIGMAS[step]) * v
    if 4 in plan.states:
        x = x.to(dtype).float()
        states[4] = x
    return {
        "final": x[0],
        "states": torch.cat([states[step] for step in plan.states]) if plan.states else None,
        **{name: [scored[step][i] for step in plan.trained] for i, name in enumerate(("log_probs", "means", "kl"))},
    }


def window(start: int) -> Steps:
    return Steps(stochastic=(start, start + 1), trained=(start, start + 1), kept=(4,))


PLANS = {
    "all": [AllSteps().draw(4, 0, 1)] * 3,
    "all_noisy": [AllSteps(last="sde").draw(4, 0, 1)] * 3,
    "own_windows": [Steps(stochastic=(s, s + 1), trained=(s, s + 1)) for s in (0, 1, 1)],
    "kept": [window(1)] * 3,
    "final": [FinalOnly().draw(4, 0, 1)] * 3,
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_batch_is_its_rows_one_by_one(name: str, dtype: torch.dtype) -> None:
    plans = PLANS[name]
    made = rollout(plans, storage_dtype=dtype, reference=base)
    for row, plan in enumerate(plans):
        expected = one_row(row, plan, dtype)
        torch.testing.assert_close(made.final[row], expected["final"], rtol=1e-5, atol=1e-6)
        assert made.states is not None
        assert made.states.dtype == dtype
        torch.testing.assert_close(made.states[row].float(), expected["states"], rtol=1e-3, atol=1e-6)
        assert made.log_probs.shape[1] == made.reference_kl.shape[1] == len(plan.trained)
        for i in range(len(plan.trained)):
            torch.testing.assert_close(made.log_probs[row, i], expected["log_probs"][i], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(made.means[row, i], expected["means"][i], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(made.reference_kl[row, i], expected["kl"][i], rtol=1e-4, atol=1e-7)


def test_noise_is_drawn_for_noisy_steps_alone_and_nothing_stored_without_a_plan() -> None:
    asked: list[int] = []

    def counted(step: int) -> Tensor:
        asked.append(step)
        return noise(step)

    plans = [Steps(stochastic=(s,), trained=(s,)) for s in (1, 2, 1)]
    sampler = Sampler(kernel=KERNEL, solver=Euler())
    arguments = {"sampler": sampler, "plans": plans, "noise": counted}
    made = sample(Linear(), CONDITIONING, LATENTS, SIGMAS, **arguments)  # type: ignore[arg-type]
    assert asked == [1, 2]
    assert made.reference_kl.shape == (3, 0)
    plain = rollout([ode_plan()] * 3)
    assert plain.states is None
    assert plain.log_probs.shape == plain.means.shape == (3, 0)
    assert (ode_plan().stochastic, ode_plan().trained, ode_plan().states) == ((), (), ())


def test_a_solver_forgets_at_a_noisy_step() -> None:
    plan = Steps(stochastic=(1,), trained=(1,))
    made = rollout([plan] * 3, solver=DPMSolver2M())
    x, policy, solver = LATENTS, Linear(), DPMSolver2M()
    for step in range(4):
        grid = grid_at(SIGMAS, torch.full((3,), step))
        v = policy.velocity(x, grid.sigma, CONDITIONING)
        if step == 1:
            x, solver = KERNEL.step(x, v, grid).sample(noise(1)), DPMSolver2M()
        else:
            x = solver.advance(x, v, grid)
    torch.testing.assert_close(made.final, x)


def test_grids_are_those_of_the_steps() -> None:
    grid = grid_at(SIGMAS, torch.tensor([0, 2, 3]))
    assert grid.sigma.tolist() == SIGMAS[[0, 2, 3]].tolist()
    assert grid.sigma_next.tolist() == SIGMAS[[1, 3, 4]].tolist()
    assert grid.sigma_second.tolist() == SIGMAS[[1, 1, 1]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_replay_of_stored_steps_is_the_rollout_bit_for_bit(dtype: torch.dtype) -> None:
    plan = AllSteps().draw(4, 0, 1)
    made = rollout([plan] * 3, storage_dtype=dtype)
    assert made.states is not None
    for i, step in enumerate(plan.trained):
        x, following = (made.states[:, plan.states.index(s)].float() for s in (step, step + 1))
        grid = grid_at(SIGMAS, torch.full((3,), step))
        distribution, log_probs = replay(KERNEL, x, Linear().velocity(x, grid.sigma, CONDITIONING), following, grid)
        assert torch.equal(log_probs, made.log_probs[:, i])
        assert torch.equal(distribution.mean, made.means[:, i])


@pytest.mark.parametrize("max_rows", [1, 4, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("steps", [None, (2,), (0, 3)])
def test_branches_are_the_nested_loop(max_rows: int, dtype: torch.dtype, steps: tuple[int, ...] | None) -> None:
    plan, policy = BranchEveryStep(branches=2, steps=steps).draw(4, 0, 1), Linear()
    made = branch(
        policy,  # type: ignore[arg-type]
        CONDITIONING,
        LATENTS,
        SIGMAS,
        sampler=Sampler(kernel=KERNEL, solver=Euler(), storage_dtype=dtype),
        plan=plan,
        noise=noise,
        max_rows=max_rows,
    )
    assert set(policy.sizes) == {max_rows}
    born = [3 + 6 * sum(earlier < step for earlier in plan.trained) for step in range(4)]
    assert len(policy.sizes) == sum(-(-rows // max_rows) for rows in born)
    keys = [(step, trunk, number) for step in plan.trained for number in range(2) for trunk in range(3)]
    assert list(zip(made.step.tolist(), made.trunk.tolist(), made.number.tolist(), strict=True)) == keys
    assert made.before.dtype == made.after.dtype == dtype
    for row, (chosen, trunk, number) in enumerate(keys):
        x, prompt = LATENTS[trunk : trunk + 1], CONDITIONING.rows(torch.tensor([trunk]))
        for step in range(4):
            if step in plan.trained and step <= chosen:
                x = x.to(dtype).float()
            v = Linear().velocity(x, SIGMAS[step : step + 1], prompt)
            if step != chosen:
                x = x + (SIGMAS[step + 1] - SIGMAS[step]) * v
                continue
            torch.testing.assert_close(made.before[row].float(), x[0], rtol=1e-3, atol=1e-6)
            drawn = KERNEL.step(x, v, at(step))
            torch.testing.assert_close(made.means[row], drawn.mean[0], rtol=1e-5, atol=1e-6)
            x = drawn.sample(noise(step, number)[trunk : trunk + 1]).to(dtype).float()
            torch.testing.assert_close(made.after[row].float(), x[0], rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(made.log_probs[row], drawn.log_prob(x)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(made.final[row], x[0], rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_decoding_in_slices_of_one_size_gives_every_row_once(size: int) -> None:
    sizes: list[int] = []

    class Decoder:
        meter = None

        def decode(self, latents: Tensor) -> Tensor:
            sizes.append(len(latents))
            return latents.to(torch.uint8)

    latents = torch.arange(5.0).reshape(5, 1)
    assert decode_in_slices(Decoder(), Decoder().decode, latents, size).tolist() == [[0], [1], [2], [3], [4]]  # type: ignore[arg-type]
    assert sizes == [size] * -(-5 // size)
