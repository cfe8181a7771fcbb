"""The training loop: loss scaling of float16, learning-rate schedules, what a restart keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import FlowmillError
from flowmill.configs.load import load_config
from flowmill.configs.optimizer import ScheduleSection
from flowmill.configs.registry import resolve
from flowmill.configs.schema import OptimizeSection
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import replay
from flowmill.models.maths.transitions import FlowSDE, Grid
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionSettings, TrainableDenoiser
from flowmill.models.policies.parts import Part
from flowmill.models.policies.sd3 import SD3
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.tasks.algorithms.diffusion import DiffusionModels, TransitionBatch
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.checks.notes import training_notes
from flowmill.tasks.inputs.weight_sources import policy_folder
from flowmill.tasks.modalities.rows import single_rows
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.training.learning_rates import learning_rate
from flowmill.tasks.training.loop import Reading, TrainerState, run_updates
from flowmill.tasks.training.loss_scaling import LossScale, loss_scale
from flowmill.tasks.training.optimizers import make_optimizer
from tests.conftest import ROOT
from tests.golden.algorithms2026.rows import stepped
from tests.support.inside import Make, prepare, run_epoch, updates_of
from tests.tasks.stages.test_stages import continued

OPTIONS = {"max_sequence_length": 1, "schedule": "linear"}
ALONE = Ranks()
#: A clip norm nothing reaches.
SECTION = OptimizeSection(max_grad_norm=1e9, weight_decay=0.0)


def trainable(folder: Path, dtype: torch.dtype) -> TrainableDenoiser:
    settings = DiffusionSettings(height=16, width=32, dtype=dtype)
    return TrainableDenoiser(SD3.load(folder, settings, frozenset(Part), OPTIONS), None, seed=0)


def transitions(policy: TrainableDenoiser, rows: int) -> TransitionBatch:
    """Stored steps at different noise levels, made by a float32 policy."""
    drawn = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(rows, 4, 8, 16, generator=drawn) for _ in range(2))
    sigma = torch.linspace(0.9, 0.3, rows)
    grid = Grid(sigma, sigma - 0.125, torch.full_like(sigma, 0.875))
    conditioning = Conditioning(policy.policy.encode([f'"{row:02d}"' for row in range(rows)]))
    with torch.no_grad():
        step = FlowSDE().step(latents, policy.policy.velocity(latents, sigma, conditioning), grid)
    following = step.sample(noise)
    made = stepped(latents, following, grid, torch.linspace(-1, 1.5, rows), step.log_prob(following))
    return replace(made, conditioning=conditioning)


def update(
    folder: Path, batch: TransitionBatch, dtype: torch.dtype, rows: int, scale: LossScale | None, ranks: Ranks = ALONE
) -> tuple[Tensor, TrainerState]:
    """One update of ``rows`` rows, of which the batch holds some; returns the gradient from Adam's first moment."""
    policy = trainable(folder, dtype)
    cast = replace(batch, conditioning=batch.conditioning.map(lambda tensor: tensor.to(dtype)))
    state = TrainerState(policy, make_optimizer(policy.parameters(), SECTION), None, 0, scale=scale)
    run_updates(
        state,
        GRPO(clip_range=0.5),
        DiffusionModels(trainable=policy, kernel=FlowSDE()),
        [single_rows(np.arange(rows), np.ones(rows, np.int64))],
        reading=Reading(lambda units: cast),
        micro_batch_size=rows,
        section=SECTION,
        ranks=ranks,
        after_update=lambda done: None,
    )
    moments = [state.optimizer.state[p]["exp_avg"].flatten() for p in policy.parameters() if p in state.optimizer.state]
    return torch.cat(moments).double() / (1 - SECTION.betas[0]), state


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("rows", [2, 5184])
def test_float16_gradients_are_those_of_float32(tiny_base: Path, rows: int) -> None:
    batch = transitions(trainable(tiny_base, torch.float32), min(rows, 8))
    # Log-probs are means over 512 values here, over a hundred times as many in real models; advantages can be small.
    batch = replace(batch, advantages=batch.advantages / 1e4)
    exact, _ = update(tiny_base, batch, torch.float32, rows, None)
    scaled, state = update(tiny_base, batch, torch.float16, rows, loss_scale("float16"))
    assert cosine(exact, scaled) > 0.9999
    assert float(scaled.norm() / exact.norm()) == pytest.approx(1, abs=1e-2)
    assert state.metrics[0]["grad_norm"] == pytest.approx(float(exact.norm()), rel=1e-2)
    assert (state.metrics[0]["loss_scale"], state.metrics[0]["overflows"]) == (
        2.0 ** (16 + (1 if rows == 2 else 13)),
        0,
    )
    # What this is for: without a scale, gradients of many rows vanish and those of few are wrong.
    unscaled, _ = update(tiny_base, batch, torch.float16, rows, None)
    assert float(unscaled.norm()) == 0 if rows == 5184 else cosine(exact, unscaled) < 0.95


def test_an_update_that_overflows_is_computed_again_at_a_smaller_scale(tiny_base: Path) -> None:
    batch = transitions(trainable(tiny_base, torch.float32), 4)
    exact, _ = update(tiny_base, batch, torch.float32, 4, None)
    repeated, state = update(tiny_base, batch, torch.float16, 4, LossScale(exponent=30, quiet=7))
    assert cosine(exact, repeated) > 0.9999
    overflows = int(state.metrics[0]["overflows"])
    assert overflows > 0
    # Two powers less at each overflow, and the count of quiet updates starts again.
    assert state.scale == LossScale(exponent=30 - 2 * overflows, quiet=1)
    assert state.metrics[0]["loss_scale"] == 2.0 ** (30 - 2 * overflows + 2)
    assert state.total_updates == 1


class OtherRankOverflows(Ranks):
    """Sums gradients with those of a rank that overflows the first time, far from this one's own."""

    calls = 0

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        OtherRankOverflows.calls += 1
        if OtherRankOverflows.calls == 1:
            gradient = parameters[0].grad
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")


def test_all_ranks_agree_on_an_overflow_of_one(tiny_base: Path) -> None:
    batch = transitions(trainable(tiny_base, torch.float32), 2)
    alone, _ = update(tiny_base, batch, torch.float16, 2, LossScale(exponent=14))
    together, state = update(tiny_base, batch, torch.float16, 2, LossScale(exponent=16), OtherRankOverflows())
    assert (OtherRankOverflows.calls, state.metrics[0]["overflows"]) == (2, 1)
    # The second attempt at 2^14 is what 2^14 gives at once.
    assert torch.equal(together, alone)
    assert state.scale == LossScale(exponent=14, quiet=1)


def test_the_scale_doubles_after_a_hundred_quiet_updates_and_stops_at_both_ends() -> None:
    scale = LossScale(exponent=16)
    for _ in range(99):
        scale = scale.after_update()
    assert scale == LossScale(exponent=16, quiet=99)
    assert scale.after_update() == LossScale(exponent=17, quiet=0)
    assert LossScale(exponent=40, quiet=99).after_update() == LossScale(exponent=40)
    assert LossScale(exponent=3, quiet=5).smaller() == LossScale(exponent=1)
    assert LossScale(exponent=1).smaller() == LossScale(exponent=0)
    assert LossScale(exponent=0).exhausted
    assert not LossScale(exponent=1).exhausted
    # 5184 rows lie between 2^12 and 2^13.
    assert [LossScale(exponent=16).factor(rows) for rows in (1, 2, 3, 5184)] == [2.0**e for e in (16, 17, 18, 29)]
    assert (loss_scale("float32"), loss_scale("bfloat16")) == (None, None)


def test_a_loss_that_is_not_finite_is_no_overflow(tiny_base: Path) -> None:
    batch = transitions(trainable(tiny_base, torch.float32), 2)
    broken = replace(batch, old_log_probs=torch.tensor([float("nan"), 0.0]))
    with pytest.raises(FlowmillError, match="has loss nan"):
        update(tiny_base, broken, torch.float16, 2, LossScale())
    # Nor is anything left to try below the smallest scale.
    huge = replace(batch, advantages=torch.tensor([1e30, -1e30]))
    with pytest.raises(FlowmillError, match=r"take model\.dtype bfloat16 instead of float16"):
        update(tiny_base, huge, torch.float16, 2, LossScale())


HALF = ["model.dtype=float16", "optimize.updates_per_epoch=4", "execution.checkpoint_every=1"]


@pytest.mark.slow
def test_the_scale_survives_a_kill_and_the_end_of_an_epoch(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Begins too high and doubles soon, so that overflow, repetition and growth all happen.
    monkeypatch.setattr("flowmill.tasks.training.epoch.loss_scale", lambda dtype: LossScale(exponent=28))
    monkeypatch.setattr("flowmill.tasks.training.loss_scaling._PATIENCE", 2)
    whole, again = continued(make_config, tmp_path / "whole", *HALF)
    updates = [u for epoch in (1, 2) for u in updates_of(whole, epoch)]
    assert updates[0]["overflows"] > 0
    assert [update["update"] for update in updates] == list(range(1, 9))
    kept = [json.loads((policy_folder(w.store, w.policy_ref(2)) / "metrics.json").read_text()) for w in (whole, again)]
    assert kept[0]["loss_scale"] == kept[1]["loss_scale"]
    # A scale that began again would overflow again in the second epoch.
    assert kept[0]["loss_scale"]["exponent"] < 28
    assert updates[4]["overflows"] < updates[0]["overflows"]
    assert len({update["loss_scale"] for update in updates}) > 1


@pytest.mark.parametrize("done", range(12))
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_learning_rates_are_those_of_torch(name: Any, done: int) -> None:
    schedule = ScheduleSection(name=name, warmup_updates=3, total_updates=9, final=0.1)
    section = OptimizeSection(learning_rate=2e-3, schedule=schedule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=2e-3)
    schedulers = torch.optim.lr_scheduler
    warmup = schedulers.LinearLR(optimizer, start_factor=1 / 4, total_iters=3)
    falling: Any = (
        schedulers.CosineAnnealingLR(optimizer, T_max=6, eta_min=2e-4)
        if name == "cosine"
        else schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=6)
    )
    sequence = schedulers.SequentialLR(optimizer, [warmup, falling], milestones=[3])
    # torch's cosine rises again after its end; ours stays there.
    for _ in range(min(done, 9)):
        optimizer.step()
        sequence.step()
    assert learning_rate(section, done) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_learning_rates_by_hand() -> None:
    def rates(schedule: ScheduleSection | None, *done: int) -> list[float]:
        return [learning_rate(OptimizeSection(learning_rate=1.0, schedule=schedule), n) for n in done]

    assert rates(None, 0, 1000) == [1.0, 1.0]
    assert rates(ScheduleSection(warmup_updates=3), 0, 1, 2, 3, 99) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(ScheduleSection(name="linear", total_updates=4), 0, 1, 3, 4, 9) == [1.0, 0.75, 0.25, 0.0, 0.0]
    cosine_rates = rates(ScheduleSection(name="cosine", total_updates=6, final=0.5), 0, 2, 3, 6, 7)
    assert cosine_rates == pytest.approx([1.0, 0.875, 0.75, 0.5, 0.5])


@pytest.mark.slow
def test_the_rate_is_used_and_logged_whatever_interrupts_the_run(make_config: Make, tmp_path: Path) -> None:
    extra = [
        "optimize.schedule={name: linear, warmup_updates: 1, total_updates: 5}",
        "optimize.updates_per_epoch=3",
        "optimize.learning_rate=0.01",
        "execution.checkpoint_every=1",
    ]
    whole, _ = continued(make_config, tmp_path / "whole", *extra)
    updates = [u for epoch in (1, 2) for u in updates_of(whole, epoch)]
    assert [update["lr"] for update in updates] == pytest.approx([0.005, 0.01, 0.0075, 0.005, 0.0025, 0.0])
    constant = prepare(make_config(f"store.root={tmp_path / 'constant'}", *extra[1:]))
    run_epoch(constant, 1)
    first = updates_of(constant, 1)[0]
    assert (first["lr"], first["grad_norm"]) == (0.01, updates[0]["grad_norm"])
    assert constant.policy_ref(1) != whole.policy_ref(1)


def test_what_a_person_should_know_is_noted(make_config: Make) -> None:
    assert training_notes(RunPlan(make_config()), updates=4) == []
    guided = ["model.guidance_scale=4.5", "optimize.guidance_gradient=conditional"]
    assert training_notes(RunPlan(make_config(guided[0])), updates=4) == []
    (note,) = training_notes(RunPlan(make_config(*guided)), updates=4)
    assert "is not the gradient of the log-prob that is replayed: with model.guidance_scale 4.5 its slope" in note
    assert training_notes(RunPlan(make_config(guided[0], "optimize.guidance_gradient=both")), updates=4) == []
    # Where guidance is an input of the model there is one half only.
    assert training_notes(RunPlan(load_config(ROOT / "configs" / "flux1_dev.yaml", [guided[1]])), updates=4) == []
    linear = "optimize.schedule={name: linear, total_updates: 3}"
    (note,) = training_notes(RunPlan(make_config("rewards=[{name: video_align, frames: clip}]")), updates=4)
    assert "monitors=[{name: exposure}]" in note
    watched = ("rewards=[{name: video_align, frames: clip}]", "monitors=[{name: exposure}]")
    assert training_notes(RunPlan(make_config(*watched)), updates=4) == []
    (note,) = training_notes(RunPlan(make_config(linear)), updates=4)
    assert "from there on the learning rate is 0" in note
    assert training_notes(RunPlan(make_config(linear)), updates=3) == []
    assert training_notes(RunPlan(make_config(linear, "optimize.schedule.final=0.1")), updates=4) == []
    (note,) = training_notes(RunPlan(make_config("optimize.schedule={warmup_updates: 4}")), updates=4)
    assert "the full learning rate is never reached" in note


@pytest.mark.parametrize(
    ("family", "length", "scale", "slope", "similarity"),
    [("sd3", 16, 4.5, 4.4, 0.93), ("qwen_image", 64, 4.0, 4.0, 0.99)],
)
def test_which_gradient_of_guidance_is_that_of_the_replayed_log_prob(
    tmp_path: Path, family: str, length: int, scale: float, slope: float, similarity: float
) -> None:
    quiet_libraries()
    build_tiny(family).save_pretrained(tmp_path)

    def measure(train_negative: bool) -> tuple[float, Tensor]:
        """Return the gradient's norm over the finite-difference slope along it, and the gradient."""
        settings = DiffusionSettings(height=64, width=64, guidance_scale=scale, train_negative=train_negative)
        options = {"max_sequence_length": length}
        policy = resolve(POLICIES, family, label="policy").load(tmp_path, settings, frozenset(Part), options)
        parameters = TrainableDenoiser(policy, None, seed=0).parameters()
        conditioning = Conditioning(policy.encode(["a red cube", "two cats"]), policy.encode([" ", " "]))
        latents = policy.initial_latents([torch.Generator().manual_seed(row) for row in range(2)])
        noise = policy.initial_latents([torch.Generator().manual_seed(row) for row in range(2, 4)])
        sigma = torch.tensor([0.7, 0.5])
        grid = Grid(sigma, sigma - 0.1, torch.full_like(sigma, 0.9))
        with torch.no_grad():
            start = FlowSDE().step(latents, policy.velocity(latents, sigma, conditioning), grid)
        following = start.sample(noise)

        def log_prob() -> Tensor:
            velocity = policy.velocity(latents, sigma, conditioning)
            return replay(FlowSDE(), latents, velocity, following, grid)[1].double().sum()

        log_prob().backward()
        used = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad.clone() for parameter in used if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
        values = []
        # float32: a step large enough that rounding is a thousandth of the difference.
        for size in (2e-3, -4e-3):
            torch._foreach_add_([p.data for p in used], gradients, alpha=size / float(flat.norm()))
            with torch.no_grad():
                values.append(float(log_prob()))
        return float(flat.norm()) / ((values[0] - values[1]) / 4e-3), flat

    ratio_both, both = measure(True)
    ratio_conditional, conditional = measure(False)
    assert ratio_both == pytest.approx(1, abs=0.01)
    # The tiny SD3 tokenizer splits words differently from process to process, so its embeddings are not always equal.
    assert ratio_conditional == pytest.approx(slope, abs=0.25)
    assert cosine(both, conditional) == pytest.approx(similarity, abs=0.04 if family == "sd3" else 0.005)
