"""Rows of earlier epochs, and which samples enter an update: on tiny stored trajectories of a linear policy."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from flowmill.configs.advantages import ReplaySection
from flowmill.configs.registry import create, resolve
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import grid_at
from flowmill.models.maths.transitions import FlowSDE, rectifiers, step_stds
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.algorithms.base import Algorithm, ForwardTimes, Requirements
from flowmill.tasks.algorithms.diffusion import DiffusionModels
from flowmill.tasks.modalities.diffusion.replay import recompute
from flowmill.tasks.modalities.diffusion.sample_sets import ForwardSet, SampleSet, TransitionSet
from flowmill.tasks.modalities.proximal import RowFile, importance_weights
from flowmill.tasks.training.metrics import RowFigures, entry
from tests.support.folder_files import FolderFiles
from tests.support.trajectories import write_samples
from tests.tasks.algorithms.cases import CASES, TOKEN_CASES

SIGMAS = (1.0, 0.8, 0.5, 0.2, 0.0)
SHAPE = (2, 3)
KERNEL = FlowSDE(0.7)


class Linear:
    """v = scale x, behind the interface of a trainable."""

    def __init__(self, scale: float) -> None:
        self.scale, self.policy = scale, self

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Any) -> Tensor:
        return self.scale * latents

    @contextmanager
    def holding(self, values: list[float]) -> Iterator[None]:
        own, self.scale = self.scale, values[0]
        try:
            yield
        finally:
            self.scale = own


def stored(number: int, epoch: int, scale: float, steps: tuple[int, ...], group: int) -> Sample:
    """A sample whose chain was made by the linear policy of a scale."""
    draw = torch.Generator().manual_seed(number)
    sigmas, states, means, log_probs = torch.tensor(SIGMAS), [torch.randn(1, *SHAPE, generator=draw)], [], []
    for step in range(len(SIGMAS) - 1):
        grid = grid_at(sigmas, torch.tensor([step]))
        made = KERNEL.step(states[-1], scale * states[-1], grid)
        following = made.sample(torch.randn(1, *SHAPE, generator=draw))
        means.append(made.mean[0].numpy())
        log_probs.append(float(made.log_prob(following)))
        states.append(following)
    kept = sorted({state for step in steps for state in (step, step + 1)} | {len(SIGMAS) - 1})
    return Sample(
        sample_id=f"e{epoch}-s{number:03d}",
        prompt_id=f"p{group}",
        group_id=f"p{group}",
        prompt=f"prompt {group}",
        epoch=epoch,
        replica=number,
        seed=number,
        policy="policies/x",
        sigmas=SIGMAS,
        steps=steps,
        states=kept,
        log_probs=np.array([log_probs[step] for step in steps], np.float32),
        latents=np.stack([states[state][0].numpy() for state in kept]),
        means=np.stack([means[step] for step in steps]) if steps else None,
    )


def shard(folder: Path, samples: list[Sample]) -> TrajectoryShard:
    folder.mkdir(parents=True)
    opener = resolve(TRAJECTORY_STORES, "webdataset", label="store")()
    write_samples(opener, folder, samples)
    opened: TrajectoryShard = opener.open(FolderFiles(folder))
    return opened


def table(advantages: Mapping[str, float], rewards: Mapping[str, float] | None = None) -> pa.Table:
    names = list(advantages)
    columns = {"sample_id": names, "advantage": pa.array([advantages[name] for name in names], pa.float32())}
    earned = rewards or advantages
    return pa.table({**columns, "reward": pa.array([earned[name] for name in names], pa.float32())})


@pytest.fixture
def replayed(tmp_path: Path) -> TransitionSet:
    """Four samples of the policy before and four of today's; one of each has advantage 0."""
    old = [stored(n, 1, 0.3, (0, 1, 2), n // 2) for n in range(4)]
    new = [stored(n, 2, 0.5, (0, 1, 2), n // 2) for n in range(4)]
    values = {sample.sample_id: value for each in (old, new) for sample, value in zip(each, (1, -1, 2, 0), strict=True)}
    shards = [shard(tmp_path / "new", new), shard(tmp_path / "old", old)]
    return TransitionSet(shards, table(values), kernel=KERNEL, means=True, **WITH)


def conditioning(ids: Sequence[str]) -> Conditioning:
    return Conditioning({"prompt": torch.zeros(len(ids), 1)})


#: What batches need besides what is stored.
WITH: dict[str, Any] = {"condition": conditioning, "device": torch.device("cpu")}


def corrected(samples: TransitionSet, requires: Requirements, section: ReplaySection, file: Any) -> DiffusionModels:
    """Correct stale rows as the stage does, for a policy whose epoch starts at scale 0.5."""
    trainable: Any = Linear(0.5)
    models = DiffusionModels(trainable=trainable, kernel=KERNEL)
    proximal = recompute(
        samples.stale(requires),
        lambda units: samples.batch(units, 5),
        models,
        micro_batch_size=5,
        means=RowFile(file) if requires.old_means else None,
    )
    samples.correct(proximal, section)
    return models


RATIOS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"from_means": True}),
    ("grpo", {"reduce": "sum", "clip_range": 1e-4}),
    ("grpo", {"reduce": "sum", "from_means": True, "clip_range": 1e-4}),
    ("tempflow", {}),
    ("flash_grpo", {}),
    ("grpo_guard", {}),
    ("grpo_guard", {"reduce": "sum"}),
    ("grpo_guard", {"from_means": True}),
    ("flow_dppo", {}),
]


@pytest.mark.parametrize(("name", "options"), RATIOS, ids=str)
def test_first_update_after_correction_is_on_policy(
    replayed: TransitionSet, name: str, options: dict[str, Any]
) -> None:
    algorithm: Algorithm = create(ALGORITHMS, name, options, label="algorithm")
    units = replayed.units(algorithm.requires)
    assert len(units) == 2 * 3 * 3
    before = algorithm.loss(
        replayed.batch(units, 18),
        DiffusionModels(trainable=Linear(0.5), kernel=KERNEL),  # type: ignore[arg-type]
    )
    assert float((before.metrics["ratio"] - 1).abs().max()) > 1e-3
    with tempfile.TemporaryFile() as file:
        models = corrected(replayed, algorithm.requires, ReplaySection(), file)
        batch = replayed.batch(units, 18)
        metrics = algorithm.loss(batch, models).metrics
    assert metrics["ratio"].tolist() == pytest.approx([1.0] * 18, abs=1e-6)
    assert float(metrics["clip_high"].sum() + metrics["clip_low"].sum()) == 0.0
    assert float(metrics.get("masked", torch.zeros(1)).sum()) == 0.0
    # What is off-policy is in the weights, of stale rows alone.
    assert bool(((batch.importance == 1) == (batch.age == 0)).all())


def test_stale_rows_weigh_what_todays_policy_makes_of_them(replayed: TransitionSet) -> None:
    algorithm: Algorithm = create(ALGORITHMS, "grpo", {"reduce": "mean"}, label="algorithm")
    units = replayed.units(algorithm.requires)
    today = DiffusionModels(trainable=Linear(0.5), kernel=KERNEL)  # type: ignore[arg-type]
    ratios = algorithm.loss(replayed.batch(units, 18), today).metrics["ratio"]
    with tempfile.TemporaryFile() as file:
        corrected(replayed, algorithm.requires, ReplaySection(max_importance=1e9), file)
    batch = replayed.batch(units, 18)
    stale = batch.age > 0
    torch.testing.assert_close(batch.importance[stale], ratios[stale].float(), rtol=1e-5, atol=0)


def test_rows_of_advantage_zero_are_corrected_where_a_kl_wants_them(replayed: TransitionSet) -> None:
    requires = create(ALGORITHMS, "grpo", {"kl_coef": 0.1}, label="algorithm").requires
    assert len(replayed.stale(requires)) == 4 * 3
    assert len(replayed.stale(Requirements())) == 3 * 3


def test_means_of_many_rows_are_read_back(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as file:
        rows = RowFile(file)
        arrays = {(n, n % 3): np.full((2, 3), n, np.float64) for n in range(5)}
        for key, array in arrays.items():
            rows.add(key, array)
            np.testing.assert_array_equal(rows[key], array)
        for key in reversed(arrays):
            np.testing.assert_array_equal(rows[key], arrays[key])


def test_importance_weights_by_hand() -> None:
    gaps = {(0, 0): 0.1, (0, 1): -0.3, (4, 0): 0.2}
    weights = importance_weights(gaps, ReplaySection(max_importance=1.2))
    assert weights == {(0, 0): math.exp(0.1), (0, 1): math.exp(-0.3), (4, 0): pytest.approx(1.2)}


def test_weights_are_reported_over_stale_rows_only(replayed: TransitionSet) -> None:
    algorithm = create(ALGORITHMS, "grpo", {}, label="algorithm")
    units = replayed.units(algorithm.requires)
    with tempfile.TemporaryFile() as file:
        models = corrected(replayed, algorithm.requires, ReplaySection(max_importance=10.0), file)
        batch = replayed.batch(units, 18)
        metrics = algorithm.loss(batch, models).metrics
    figures = RowFigures(18)
    figures.add(batch, metrics)
    found = entry(1, 18, 0.0, figures.totals())
    weights = batch.importance[batch.age > 0].double()
    assert len(weights) == 9
    assert found["importance"] == pytest.approx(float(weights.mean()))
    effective = float(weights.sum() ** 2 / (9 * (weights**2).sum()))
    assert found["effective_samples"] == pytest.approx(effective)
    assert found["behavior_kl"] == pytest.approx(float(-weights.log().mean()))
    assert found["clip_age1"] == 0.0
    assert "importance_squared" not in found


def transition_samples(folder: Path, steps: list[tuple[int, ...]], advantages: list[float]) -> TransitionSet:
    samples = [stored(n, 1, 0.3, each, n // 2) for n, each in enumerate(steps)]
    values = {sample.sample_id: value for sample, value in zip(samples, advantages, strict=True)}
    return TransitionSet([shard(folder / "shard", samples)], table(values), kernel=KERNEL, means=False, **WITH)


def test_tempflow_weights_have_mean_one_over_the_rows_that_are_trained(tmp_path: Path) -> None:
    # Step 0 has three rows, step 2 one; those of advantage 0 are not trained.
    samples = transition_samples(tmp_path, [(0,), (0,), (0,), (2,), (1,), (1,)], [1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    stds = step_stds(KERNEL, torch.tensor(SIGMAS)).double()
    batch = samples.batch(samples.units(Requirements()), 4)
    expected = float((3 * stds[0] + stds[2]) / 4)
    assert batch.mean_std.tolist() == pytest.approx([expected] * 4)  # type: ignore[attr-defined]
    weights = KERNEL.step(batch.latents, batch.latents, batch.grid).std / batch.mean_std  # type: ignore[attr-defined]
    assert float(weights.mean()) == pytest.approx(1.0)


def test_rectifiers_have_mean_one_over_the_rows_that_are_trained(tmp_path: Path) -> None:
    samples = transition_samples(tmp_path, [(0,), (0,), (0,), (2,), (1,), (1,)], [1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    batch = samples.batch(samples.units(Requirements()), 4)
    weights = rectifiers(KERNEL, batch.grid) / batch.mean_rectifier  # type: ignore[attr-defined]
    assert float(weights.mean()) == pytest.approx(1.0)
    assert float(weights.max()) > float(weights.min())


def test_the_best_samples_of_earlier_epochs_and_their_noisy_steps_are_trained_on_again(replayed: TransitionSet) -> None:
    requires = Requirements()

    def rows(samples: SampleSet) -> list[tuple[str, int]]:
        names = samples.reader.sample_ids
        return sorted((str(names[s].as_py()), int(i)) for s, i in samples.units(requires).rows)

    everything = rows(replayed)
    assert len(everything) == 2 * 3 * 3
    mean = float(replayed.batch(replayed.units(requires).slice(0, 1), 1).mean_std[0])  # type: ignore[attr-defined]
    # Rewards are 1, -1, 2 and 0: half of the earlier epoch are the first and the third sample.
    replayed.choose(ReplaySection(share=0.5, steps=2), requires)
    own = [row for row in everything if row[0].startswith("e2")]
    assert rows(replayed) == sorted([*own, *((f"e1-s00{n}", step) for n in (0, 2) for step in (0, 1))])
    stale = replayed.stale(requires)
    assert len(stale) == 4
    # Means are over what is left: nine rows of today, three of each step, and two of each early one.
    stds = step_stds(KERNEL, torch.tensor(SIGMAS)).double()
    batch = replayed.batch(replayed.units(requires).slice(0, 1), 1)
    found = float(batch.mean_std[0])  # type: ignore[attr-defined]
    assert found == pytest.approx(float(5 * stds[0] + 5 * stds[1] + 3 * stds[2]) / 13, rel=1e-6)
    assert found != mean


def test_whole_groups_are_chosen_where_samples_are_compared(tmp_path: Path) -> None:
    old = [stored(n, 1, 0.3, (0, 1, 2), n // 2) for n in range(6)]
    new = [stored(n, 2, 0.5, (0, 1, 2), n // 2) for n in range(6)]
    rewards = [0.0, 3.0, 2.0, 2.5, -1.0, 1.0]
    values = {s.sample_id: r for each in (old, new) for s, r in zip(each, rewards, strict=True)}
    for unit, most in (("group", 2), ("pair", 2)):
        requires = Requirements(unit=unit)  # type: ignore[arg-type]
        shards = [shard(tmp_path / f"{unit}-new", new), shard(tmp_path / f"{unit}-old", old)]
        samples = TransitionSet(shards, table(values), kernel=KERNEL, means=False, **WITH)
        assert len(samples.units(requires)) == 18
        # Means of groups are 1.5, 2.25 and 0: two of three are kept, and of their three steps one.
        samples.choose(ReplaySection(share=0.5, steps=1), requires)
        units = samples.units(requires)
        assert len(units) == 9 + 2
        names = {str(samples.reader.sample_ids[s].as_py()) for s, _ in units.rows}
        assert {name for name in names if name.startswith("e1")} == {"e1-s000", "e1-s001", "e1-s002", "e1-s003"}
        assert units.sizes.tolist() == [most] * 11


def forward_samples(folder: Path, advantages: list[float], rewards: list[float] | None = None) -> SampleSet:
    samples = [stored(n, 1, 0.3, (), n // 3) for n in range(len(advantages))]
    names = [sample.sample_id for sample in samples]
    rated = table(dict(zip(names, advantages, strict=True)), dict(zip(names, rewards or advantages, strict=True)))
    return ForwardSet([shard(folder / "shard", samples)], rated, times=ForwardTimes(count=1), seed=0, **WITH)


def members(samples: SampleSet, requires: Requirements) -> list[list[int]]:
    units = samples.units(requires)
    return [units.rows[a:b, 0].tolist() for a, b in zip(units.bounds[:-1], units.bounds[1:], strict=True)]


@pytest.mark.parametrize(("name", "options"), [*CASES, *TOKEN_CASES], ids=str)
def test_an_algorithm_trains_on_the_samples_that_it_requires(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    table = ALGORITHMS if (name, options) in CASES else TOKEN_ALGORITHMS
    requires: Requirements = create(table, name, options, label="algorithm").requires
    advantages = [1.0, 0.0, -1.0, math.nan, 0.5, -2.0]
    samples = forward_samples(tmp_path, advantages)
    if requires.unit != "row":
        assert members(samples, requires) == ([[0, 2], [4, 5]] if requires.unit == "pair" else [[0, 1, 2], [4, 5]])
        return
    counts = {1, 0, -1} if requires.zero_advantages else {1, -1}
    signs = {1} if requires.desired else counts
    expected = [[number] for number, value in enumerate(advantages) if np.sign(value) in signs]
    assert members(samples, requires) == expected


def test_pairs_are_ranked_by_reward_where_clipping_made_them_equal(tmp_path: Path) -> None:
    samples = forward_samples(tmp_path, [5.0, 5.0, -5.0, 1.0, 1.0, 1.0], [6.0, 9.0, -7.0, 1.0, 2.0, 3.0])
    assert members(samples, Requirements(unit="pair")) == [[1, 2]]
    # A KL wants all groups, also one without a pair.
    assert members(samples, Requirements(unit="pair", zero_advantages=True)) == [[1, 2], [5, 3]]


def test_groups_without_advantages_are_kept_for_a_kl_alone(tmp_path: Path) -> None:
    samples = forward_samples(tmp_path, [0.0, 0.0, 0.0, 1.0, 0.0, -1.0])
    assert members(samples, Requirements(unit="group")) == [[3, 4, 5]]
    assert members(samples, Requirements(unit="group", zero_advantages=True)) == [[0, 1, 2], [3, 4, 5]]
