"""One optimizer update by hand: what is summed over micro-batches, clipped, averaged and reported."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flowmill.configs.errors import FlowmillError
from flowmill.configs.schema import OptimizeSection
from flowmill.models.weights.ema import Ema
from flowmill.tasks.algorithms.base import LARGEST, Requirements, RowLoss
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels
from flowmill.tasks.modalities.rows import Units, plan_updates, single_rows
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.loop import Reading, TrainerState, run_updates
from flowmill.tasks.training.metrics import RowFigures, entry
from flowmill.tasks.training.optimizers import make_optimizer
from tests.support.toy import START, transitions, vector

ROWS = 7
#: Slopes of the seven rows: row r's loss is slope[r] . theta.
SLOPES = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.0, 3.0], [2.0, -2.0], [0.5, 0.5], [-3.0, 1.0], [1.0, 1.0]])
RATIOS = torch.tensor([1.5, 0.5, 1.0, 1.1, 0.9, 2.0, 1.0])


class _Rated:
    """The interface that training needs of an optimizer in addition to torch's methods."""

    moment_bytes, step_bytes = 4.0, 4
    param_groups: list[dict[str, Any]]

    def set_learning_rate(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def begin(self, parameter: torch.nn.Parameter) -> None:
        raise NotImplementedError

    def moments(self, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
        raise NotImplementedError


class Descent(_Rated, torch.optim.SGD):
    """Steps along the gradient."""


class Adam(_Rated, torch.optim.Adam):
    """With momentum."""


class Plain:
    """A trainable of two parameters."""

    sharded = False
    policy = SimpleNamespace(trained={})

    def __init__(self) -> None:
        self.theta = nn.Parameter(torch.tensor([0.3, -0.7]))

    def parameters(self) -> list[nn.Parameter]:
        return [self.theta]

    def changed(self) -> None:
        """Nothing is made of the parameters."""


class Linear:
    """An algorithm with a linear loss per row and given figures."""

    requires = Requirements()

    def __init__(self, scale: float = 1.0, ratios: bool = True) -> None:
        self.scale, self.ratios, self.on_policy = scale, ratios, []  # type: ignore[var-annotated]

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        self.on_policy.append(models.on_policy)
        rows = torch.tensor([sample for sample, _ in batch.keys])
        loss = self.scale * SLOPES[rows] @ models.trainable.parameters()[0]
        ratio = RATIOS[rows]
        figures = {"ratio": ratio, "ratio_change_squared": (ratio - 1) ** 2}
        figures |= {"clip_high": (ratio > 1.2).float(), "clip_low": (ratio < 0.8).float()}
        return RowLoss(loss=loss, metrics=figures if self.ratios else {"error": ratio})


def batches_of(size: int = 3, **changes: Tensor) -> Callable[[Units], DiffusionBatch]:
    """Return micro-batches of a fixed size, padded with the last row at weight 0; ``changes`` are per row."""

    def make(units: Units) -> DiffusionBatch:
        count = len(units.rows)
        samples = [*units.rows[:, 0].tolist(), *[int(units.rows[-1, 0])] * (size - count)]
        own = {name: values[samples] for name, values in changes.items()}
        base = transitions([1.0] * size, vector(START), sigma=[0.5] * size)
        fields: dict[str, Any] = {
            "weights": torch.tensor([float(i < count) for i in range(size)]),
            "count": count,
            "importance": torch.ones(size),
            "age": torch.zeros(size, dtype=torch.int64),
            "step": torch.tensor(samples) % 2,
            "keys": tuple((sample, 0) for sample in samples),
        }
        return dataclasses.replace(base, **{**fields, **own})

    return make


def plan(updates: int = 1) -> list[Units]:
    units = single_rows(np.arange(ROWS), np.ones(ROWS, np.int64))
    return plan_updates(units, updates=updates, inner_epochs=1, seed=0, epoch=1)


def train(
    algorithm: Linear, *, updates: int = 1, size: int = 3, state: TrainerState | None = None, **settings: Any
) -> tuple[TrainerState, list[int]]:
    """Train with plain gradient descent at rate 1, so that the parameters move by the gradient."""
    trainable, done = Plain(), []  # type: ignore[var-annotated]
    changes = {name: settings.pop(name) for name in ("age", "importance", "step") if name in settings}
    ranks = settings.pop("ranks", Ranks())
    section = OptimizeSection(**{"max_grad_norm": 1e9, "learning_rate": 1.0, **settings})
    if state is None:
        descent = Descent(trainable.parameters(), lr=1.0)
        ema = Ema(trainable.parameters(), decay=section.ema.decay) if section.ema else None
        state = TrainerState(trainable, descent, ema, 0)  # type: ignore[arg-type]
    models = DiffusionModels(trainable=state.trainable, kernel=None, on_policy=True)  # type: ignore[arg-type]
    run_updates(
        state,
        algorithm,
        models,
        plan(updates),
        reading=Reading(batches_of(size, **changes)),
        micro_batch_size=size,
        section=section,
        ranks=ranks,
        after_update=done.append,
    )
    return state, done


def moved(state: TrainerState) -> Tensor:
    return state.trainable.parameters()[0].detach() - torch.tensor([0.3, -0.7])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
def test_an_update_is_the_mean_over_all_its_rows_whatever_the_micro_batch(size: int) -> None:
    state, done = train(Linear(), size=size)
    torch.testing.assert_close(moved(state), -SLOPES.mean(0))
    (entry,) = state.metrics
    assert done == [1]
    assert state.total_updates == entry["update"] == 1
    assert entry["rows"] == ROWS
    assert entry["loss"] == pytest.approx(float((SLOPES @ torch.tensor([0.3, -0.7])).mean()), rel=1e-5)
    assert entry["grad_norm"] == pytest.approx(float(SLOPES.mean(0).norm()), rel=1e-5)
    assert entry["ratio_mean"] == pytest.approx(float(RATIOS.mean()), rel=1e-6)
    assert entry["ratio_std"] == pytest.approx(float(RATIOS.std(correction=0)), rel=1e-5)
    assert entry["clip_high"] == pytest.approx(2 / 7)
    assert entry["clip_low"] == pytest.approx(1 / 7)
    assert entry["ratio_step0"] == pytest.approx(float(RATIOS[[0, 2, 4, 6]].mean()), rel=1e-6)
    assert entry["ratio_step1"] == pytest.approx(float(RATIOS[[1, 3, 5]].mean()), rel=1e-6)
    assert not {"ratio", "ratio_change_squared", "share_ratio_step0", "clip_age0", "importance"} & set(entry)


def test_replayed_rows_are_weighted_and_reported() -> None:
    importance = torch.tensor([0.5, 2.0, 1.0, 0.25, 1.5, 1.0, 4.0])
    age = torch.tensor([1, 2, 1, 2, 1, 2, 1])
    state, _ = train(Linear(), importance=importance, age=age)
    torch.testing.assert_close(moved(state), -(SLOPES * importance[:, None]).mean(0))
    (entry,) = state.metrics
    assert entry["effective_samples"] == pytest.approx(
        float(importance.sum() ** 2 / (7 * (importance**2).sum())), rel=1e-5
    )
    assert entry["importance"] == pytest.approx(float(importance.mean()), rel=1e-6)
    assert entry["behavior_kl"] == pytest.approx(-float(importance.log().mean()), rel=1e-5)
    clipped = ((RATIOS > 1.2) | (RATIOS < 0.8)).float()
    for each in (1, 2):
        assert entry[f"clip_age{each}"] == pytest.approx(float(clipped[age == each].mean()), rel=1e-6)
    assert "clip_age0" not in entry


@pytest.mark.parametrize("ranks", [[[0, 1]], [[0], [1]]])
def test_fresh_rows_are_reported_whichever_rank_has_the_stale_ones(ranks: list[list[int]]) -> None:
    ages, clipped = [[0, 0], [0, 1]], [[1.0, 1.0], [0.0, 1.0]]
    totals: Counter[str] = Counter()
    for parts in ranks:
        figures = RowFigures(4)
        for part in parts:
            age, high, zero = torch.tensor(ages[part]), torch.tensor(clipped[part]), torch.zeros(2)
            batch = SimpleNamespace(count=2, age=age, step=torch.zeros(2, dtype=torch.int64), weighed=False)
            values = {"loss": zero, "ratio": zero + 1, "ratio_change_squared": zero}
            figures.add(cast(Any, batch), values | {"clip_high": high, "clip_low": zero})
        totals.update(figures.totals())
    found = entry(1, 4, 0.0, totals)
    assert (found["clip_age0"], found["clip_age1"]) == (pytest.approx(2 / 3), 1.0)


def test_rows_without_ratios_are_reported_as_they_are() -> None:
    state, _ = train(Linear(ratios=False))
    (entry,) = state.metrics
    assert set(entry) - {"lr"} == {"update", "rows", "grad_norm", "loss", "error"}
    assert entry["error"] == pytest.approx(float(RATIOS.mean()), rel=1e-6)


def test_updates_follow_each_other_and_only_the_first_is_on_policy() -> None:
    algorithm = Linear()
    state, done = train(algorithm, updates=3)
    assert done == [1, 2, 3]
    assert [entry["rows"] for entry in state.metrics] == [3, 2, 2]
    assert [entry["update"] for entry in state.metrics] == [1, 2, 3]
    assert algorithm.on_policy == [True, False, False]
    expected = torch.zeros(2)
    for units in plan(3):
        expected -= SLOPES[units.rows[:, 0]].mean(0)
    torch.testing.assert_close(moved(state), expected)


def test_updates_that_are_done_are_not_done_again() -> None:
    state, _ = train(Linear(), updates=1)
    state.metrics[:] = [{"update": 5.0}, {"update": 6.0}]
    before, total = moved(state), state.total_updates
    state, done = train(Linear(), updates=3, state=state)
    assert done == [3]
    assert state.total_updates == total + 1
    torch.testing.assert_close(moved(state) - before, -SLOPES[plan(3)[2].rows[:, 0]].mean(0))


class TwoParts(Plain):
    """A trainable with a part that not every update reaches, as one of two transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(()))

    def parameters(self) -> list[nn.Parameter]:
        return [self.theta, self.other]


class OtherFirst(Linear):
    """Reaches the other part in the first update only."""

    def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        result = super().loss(batch, models)
        if not models.on_policy:
            return result
        return dataclasses.replace(result, loss=result.loss + models.trainable.parameters()[1])


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_a_part_without_gradient_is_not_moved_by_its_momentum(updates: int) -> None:
    trainable: Any = TwoParts()
    state = TrainerState(trainable, Adam(trainable.parameters(), lr=0.1), None, 0)
    train(OtherFirst(), updates=updates, state=state, learning_rate=0.1)
    assert trainable.other.item() == pytest.approx(0.9)


def test_long_gradients_are_cut_and_reported_in_full() -> None:
    state, _ = train(Linear(), max_grad_norm=0.5)
    torch.testing.assert_close(moved(state), -0.5 * SLOPES.mean(0) / SLOPES.mean(0).norm(), rtol=1e-4, atol=1e-6)
    assert state.metrics[0]["grad_norm"] == pytest.approx(float(SLOPES.mean(0).norm()), rel=1e-5)


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3]), (2, [2]), (5, [])])
def test_the_average_follows_every_so_many_updates(every: int, expected: list[int]) -> None:
    seen: list[int] = []

    class Counting(Ema):
        def update(self, parameters: Any, count: int) -> None:
            seen.append(count)
            super().update(parameters, count)

    trainable = Plain()
    descent = Descent(trainable.parameters(), lr=1.0)
    average = Counting(trainable.parameters(), decay=0.9)
    state = TrainerState(trainable, descent, average, 0)  # type: ignore[arg-type]
    train(Linear(), updates=3, state=state, ema={"decay": 0.9, "every": every})
    assert seen == expected


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_what_is_not_finite_is_never_stepped_on(scale: float) -> None:
    trainable = Plain()
    descent = Descent(trainable.parameters(), lr=1.0)
    state = TrainerState(trainable, descent, None, 0)  # type: ignore[arg-type]
    state.metrics[:] = [{"update": 1.0}]
    with pytest.raises(FlowmillError, match="update 2 of this epoch has loss"):
        train(Linear(scale), updates=3, state=state)
    assert moved(state).tolist() == [0.0, 0.0]
    assert len(state.metrics) == 1
    assert state.total_updates == 0


def test_ranks_take_micro_batches_in_turn_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one after the other: what the other one would send is put in by hand."""
    seen: dict[int, list[int]] = {0: [], 1: []}

    class Two(Ranks):
        def sum_gradients(self, parameters: Any) -> None:
            torch.testing.assert_close(parameters[0].grad, share(self.rank), rtol=1e-5, atol=1e-6)

        def sum(self, values: Tensor) -> Tensor:
            return values * 2

        def largest(self, values: Tensor) -> Tensor:
            return values

    def share(rank: int) -> Tensor:
        return SLOPES[seen[rank]].sum(0) / ROWS

    class Recording(Linear):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
            seen[self.rank] += [key[0] for key, weight in zip(batch.keys, batch.weights, strict=True) if weight]
            return super().loss(batch, models)

    def gather(gathered: list[list[str]], names: list[str], group: None) -> None:
        gathered[0], gathered[1] = names, ["only_there", *names]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for rank in (0, 1):
        state, _ = train(Recording(rank), ranks=Two(rank, 2))
        (entry,) = state.metrics
        assert entry["only_there"] == 0.0
        own = SLOPES[seen[rank]] @ torch.tensor([0.3, -0.7])
        assert entry["loss"] == pytest.approx(float(2 * own.sum() / ROWS), rel=1e-4)
    order = plan()[0].rows[:, 0].tolist()
    assert seen == {0: [*order[:3], order[6]], 1: order[3:6]}


def test_the_first_update_says_how_far_log_probs_are_from_those_of_the_rollout() -> None:
    gaps = torch.tensor([0.0, 1e-3, 0.0, 0.0, 5e-3, 0.0, 0.0], dtype=torch.float64)

    class Apart(Linear):
        def loss(self, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
            found = super().loss(batch, models)
            own = gaps[[key[0] for key in batch.keys]]
            return RowLoss(loss=found.loss, metrics={**found.metrics, "gap": own, f"{LARGEST}other": own})

    ages = torch.tensor([0, 0, 0, 0, 1, 0, 0])
    state, _ = train(Apart(), updates=2, size=3, age=ages)
    first, second = state.metrics
    rows = plan(2)[0].rows[:, 0]
    fresh = [row for row in rows.tolist() if ages[row] == 0]
    assert first["replay_gap"] == pytest.approx(float(gaps[fresh].mean()))
    assert first["replay_gap_max"] == pytest.approx(float(gaps[fresh].max()))
    odd = [row for row in fresh if row % 2 == 1]
    assert first["replay_gap_step1"] == pytest.approx(float(gaps[odd].mean()))
    others = [float(gaps[part.rows[:, 0]].max()) for part in plan(2)]
    assert [each["other"] for each in state.metrics] == pytest.approx(others)
    assert max(others) == 5e-3
    assert not [name for name in second if "gap" in name], "later updates moved away from the rollout on purpose"


def test_the_optimizer_has_the_configured_settings() -> None:
    section = OptimizeSection(learning_rate=0.02, betas=(0.8, 0.95), weight_decay=0.3, epsilon=1e-5)
    settings: Mapping[str, Any] = make_optimizer(Plain().parameters(), section).param_groups[0]
    assert (settings["lr"], settings["betas"], settings["weight_decay"], settings["eps"]) == (
        0.02,
        (0.8, 0.95),
        0.3,
        1e-5,
    )
