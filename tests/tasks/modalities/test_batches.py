"""The content of a micro-batch, row by row, against its samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from flowmill.configs.errors import CorruptError
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.transitions import FlowSDE
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.storage.trajectories.schema import ADVANTAGES
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from flowmill.tasks.algorithms.base import ForwardTimes, Requirements
from flowmill.tasks.algorithms.diffusion import ForwardBatch, TransitionBatch
from flowmill.tasks.modalities.diffusion.sample_sets import ForwardSet, SampleSet, TransitionSet
from flowmill.tasks.modalities.rows import Units
from tests.support.folder_files import FolderFiles
from tests.support.trajectories import write_samples

SIGMAS = [1.0, 0.8, 0.5, 0.25, 0.0]
#: Two epochs, two groups of three; group b of epoch 1 learned nothing.
ADVANTAGE = {
    "e1a0": 0.5,
    "e1a1": -1.0,
    "e1a2": 0.5,
    "e1b0": 0.0,
    "e1b1": 0.0,
    "e1b2": 0.0,
    "e2a0": 2.0,
    "e2a1": 0.0,
    "e2a2": -2.0,
    "e2b0": -1.0,
    "e2b1": 1.0,
    "e2b2": 3.0,
}
NAMES = list(ADVANTAGE)
LATENTS = np.random.default_rng(0).normal(size=(12, 5, 1, 2, 2)).astype(np.float32)
MEANS = np.random.default_rng(1).normal(size=(12, 2, 1, 2, 2)).astype(np.float32)
LOG_PROBS = np.random.default_rng(2).normal(size=(12, 2)).astype(np.float32)


def conditioning(ids: Sequence[str]) -> Conditioning:
    return Conditioning({"prompt": torch.tensor([{"a": 10.0, "b": 20.0}[each] for each in ids])})


#: Noise levels of the timesteps of a training.
TRAINED = torch.linspace(0.05, 0.95, 60, dtype=torch.float64)


#: What batches need besides what is stored.
WITH: dict[str, Any] = {"condition": conditioning, "device": torch.device("cpu")}


def steps_of(number: int) -> list[int]:
    """Groups have their own windows."""
    return [1, 2] if NAMES[number][2] == "a" else [0, 3]


def states_of(number: int, *, final: bool) -> list[int]:
    if final:
        return [4]
    return sorted({state for step in steps_of(number) for state in (step, step + 1)})


@pytest.fixture
def shards(tmp_path: Path, request: pytest.FixtureRequest) -> list[TrajectoryShard]:
    """Six shards of two samples; with the parameter 'final', of final latents."""
    final, store, made = getattr(request, "param", "") == "final", WebDatasetStore(), []
    for start in range(0, 12, 2):
        folder = tmp_path / str(start)
        folder.mkdir()
        write_samples(store, folder, [stored(n, final=final) for n in (start, start + 1)])
        made.append(store.open(FolderFiles(folder)))
    return made


def stored(number: int, *, final: bool) -> Sample:
    name, states = NAMES[number], states_of(number, final=final)
    return Sample(
        sample_id=name,
        prompt_id=name[2],
        group_id=name[2],
        prompt=name[2],
        epoch=int(name[1]),
        replica=int(name[3]),
        seed=number,
        policy="policies/x",
        sigmas=SIGMAS,
        steps=[] if final else steps_of(number),
        states=states,
        log_probs=np.zeros(0, np.float32) if final else LOG_PROBS[number],
        latents=LATENTS[number, states],
        means=None if final else MEANS[number],
    )


def table(names: list[str] = NAMES) -> pa.Table:
    # Another order than the samples'.
    rows = [
        {"sample_id": n, "prompt_id": n[2], "group_id": n[2], "reward": ADVANTAGE[n] / 10, "advantage": ADVANTAGE[n]}
        for n in reversed(names)
    ]
    return pa.Table.from_pylist(rows, schema=ADVANTAGES)


def transition_set(shards: list[TrajectoryShard], *, means: bool = True) -> TransitionSet:
    return TransitionSet(shards, table(), kernel=FlowSDE(0.7), means=means, **WITH)


def forward_set(shards: list[TrajectoryShard], *, seed: int = 0, **times: Any) -> ForwardSet:
    made = ForwardSet(shards, table(), times=ForwardTimes(**times), seed=seed, **WITH)
    made.trained_levels = TRAINED
    return made


def whole(samples: SampleSet, requires: Requirements) -> list[list[tuple[str, int]]]:
    """Return the rows of every unit, by name."""
    units = samples.units(requires)
    parts = [units.slice(i, i + 1).rows for i in range(len(units))]
    return [[(NAMES[sample], int(position)) for sample, position in rows] for rows in parts]


def test_a_sample_without_advantage_is_refused(shards: list[TrajectoryShard]) -> None:
    with pytest.raises(CorruptError, match="2 samples have no advantage, the first is e2b1"):
        TransitionSet(shards, table(NAMES[:-2]), kernel=FlowSDE(), means=False, **WITH)


def test_units_are_rows_pairs_or_groups_with_something_to_learn(shards: list[TrajectoryShard]) -> None:
    samples = transition_set(shards)
    assert samples.ages.tolist() == [1] * 6 + [0] * 6
    live = [name for name in NAMES if ADVANTAGE[name] != 0]
    assert whole(samples, Requirements()) == [[(name, i)] for name in live for i in (0, 1)]
    every = whole(samples, Requirements(zero_advantages=True))
    assert every == [[(name, i)] for name in NAMES for i in (0, 1)]
    groups = [[f"e{epoch}{group}{n}" for n in range(3)] for epoch, group in ((1, "a"), (2, "a"), (2, "b"))]
    expected = [[(name, i) for name in group] for group in groups for i in (0, 1)]
    assert whole(samples, Requirements(unit="group")) == expected
    pairs = whole(samples, Requirements(unit="pair"))
    assert pairs[2:] == [
        [("e2a0", 0), ("e2a2", 0)],
        [("e2a0", 1), ("e2a2", 1)],
        [("e2b2", 0), ("e2b0", 0)],
        [("e2b2", 1), ("e2b0", 1)],
    ]
    assert [pair[1] for pair in pairs[:2]] == [("e1a1", 0), ("e1a1", 1)]
    assert len(pairs) == 6


def test_transitions_row_by_row_and_padding(shards: list[TrajectoryShard]) -> None:
    samples = transition_set(shards)
    rows = np.array([[9, 1], [0, 0], [4, 1], [9, 0]], np.int64)
    batch = samples.batch(Units(rows, np.array([0, 1, 3, 4])), 6)
    assert isinstance(batch, TransitionBatch)
    assert batch.old_means is not None
    assert batch.weights.tolist() == [1, 1, 1, 1, 0, 0]
    assert batch.units.tolist() == [0, 1, 1, 2, 3, 3]
    assert batch.keys == ((9, 1), (0, 0), (4, 1), (9, 0), (9, 0), (9, 0))
    assert batch.importance.tolist() == [1.0] * 6
    for row, (number, position) in enumerate(batch.keys):
        step = steps_of(number)[position]
        np.testing.assert_array_equal(batch.latents[row], LATENTS[number, step])
        np.testing.assert_array_equal(batch.next_latents[row], LATENTS[number, step + 1])
        np.testing.assert_array_equal(batch.old_means[row], MEANS[number, position])
        assert float(batch.old_log_probs[row]) == LOG_PROBS[number, position]
        assert float(batch.grid.sigma[row]) == pytest.approx(SIGMAS[step])
        assert float(batch.grid.sigma_next[row]) == pytest.approx(SIGMAS[step + 1])
        assert float(batch.grid.sigma_second[row]) == pytest.approx(SIGMAS[1])
        assert float(batch.advantages[row]) == ADVANTAGE[NAMES[number]]
        assert int(batch.step[row]) == step
        assert int(batch.age[row]) == (NAMES[number][1] == "1")
        assert float(batch.conditioning.positive["prompt"][row]) == {"a": 10.0, "b": 20.0}[NAMES[number][2]]
    without = transition_set(shards, means=False).batch(Units(rows, np.array([0, 1, 3, 4])), 4)
    assert isinstance(without, TransitionBatch)
    assert without.old_means is None
    assert without.weights.tolist() == [1, 1, 1, 1]


def test_the_mean_std_of_nothing_is_one(shards: list[TrajectoryShard]) -> None:
    idle = table().set_column(4, "advantage", pa.array([0.0] * len(NAMES), pa.float32()))
    rows = TransitionSet(shards, idle, kernel=FlowSDE(0.7), means=False, **WITH)
    batch = rows.batch(Units(np.array([[0, 0]]), np.array([0, 1])), 2)
    assert isinstance(batch, TransitionBatch)
    assert batch.mean_std.tolist() == [1.0, 1.0]


def test_the_mean_std_is_that_of_the_rows_that_are_trained(shards: list[TrajectoryShard]) -> None:
    """Samples that are left out have no part in it; those of advantage 0 only where a KL trains them."""

    def mean(values: list[float], requires: Requirements) -> float:
        column = pa.array(values, pa.float32())
        rows = table().set_column(4, "advantage", column)
        made = TransitionSet(shards, rows, kernel=FlowSDE(0.7), means=False, requires=requires, **WITH)
        batch = made.batch(Units(np.array([[0, 0]]), np.array([0, 1])), 1)
        assert isinstance(batch, TransitionBatch)
        return float(batch.mean_std[0])

    one = [1.0] + [0.0] * (len(NAMES) - 1)
    left_out = [1.0] + [float("nan")] * (len(NAMES) - 1)
    everything = [1.0] * len(NAMES)
    plain, with_kl = Requirements(), Requirements(zero_advantages=True)
    assert mean(left_out, plain) == mean(one, plain) != mean(everything, plain)
    assert mean(one, with_kl) == mean(everything, plain)
    assert mean(left_out, with_kl) == mean(one, plain)


@pytest.mark.parametrize("shards", ["final"], indirect=True)
@pytest.mark.parametrize("kind", ["stratified", "grid", "logit_normal", "power", "timesteps"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_noised_samples_row_by_row(shards: list[TrajectoryShard], kind: Any, shared: bool, constant: bool) -> None:
    options = {"kind": kind, "shared": shared, "constant_noise": constant, "count": 3, "low": 0.1, "high": 0.7}
    samples = forward_set(shards, **options)
    rows = np.array([[s, i] for s in (0, 1, 6, 9) for i in range(3)], np.int64)
    units = Units(rows, np.arange(len(rows) + 1))
    batch, again = (samples.batch(units, 12) for _ in range(2))
    assert isinstance(batch, ForwardBatch)
    assert torch.equal(batch.latents, again.latents)
    assert batch.step.tolist() == [0, 1, 2] * 4
    assert batch.grid.sigma_next.tolist() == [0.0] * 12
    assert torch.equal(batch.grid.sigma_second, batch.grid.sigma)
    for row, (number, position) in enumerate(batch.keys):
        level = float(batch.grid.sigma[row])
        np.testing.assert_array_equal(batch.clean[row], LATENTS[number, 4])
        expected = (1 - level) * batch.clean[row] + level * batch.noise[row]
        torch.testing.assert_close(batch.latents[row], expected)
        if kind == "power":
            assert 0.01 + 0.16 * position <= level**2 <= 0.01 + 0.16 * (position + 1) + 1e-6
        if kind == "stratified":
            assert 0.1 + 0.2 * position <= level <= 0.1 + 0.2 * (position + 1) + 1e-6
    torch.testing.assert_close(batch.target, batch.noise - batch.clean)
    levels, noise = batch.grid.sigma.reshape(4, 3), batch.noise.reshape(4, 3, -1)
    assert [len({tuple(n.tolist()) for n in each}) for each in noise] == [1 if constant else 3] * 4
    # Samples 0, 1 and 6 are of prompt a.
    for other in (1, 2):
        assert torch.equal(levels[0], levels[other]) == shared
        assert torch.equal(noise[0], noise[other]) == shared
    assert not torch.equal(noise[0], noise[3])
    if kind == "grid":
        assert {round(float(level), 6) for level in levels.flatten()} <= set(SIGMAS[:-1])
        assert [len(set(each.tolist())) for each in levels] == [3] * 4
    elif kind == "logit_normal":
        assert bool(((levels > 0) & (levels < 1)).all())
    elif kind == "timesteps":
        places = (levels.double()[..., None] - TRAINED).abs().argmin(-1)
        assert torch.equal(TRAINED[places].float(), levels)
        assert torch.equal(places // 20, torch.arange(3).expand(4, 3))


@pytest.mark.parametrize("shards", ["final"], indirect=True)
def test_levels_and_noise_fill_their_range_and_follow_the_seed(shards: list[TrajectoryShard]) -> None:
    units = Units(np.array([[s, i] for s in range(12) for i in range(40)]), np.arange(481))
    drawn = {
        kind: forward_set(shards, kind=kind, count=40, low=0.2, high=0.6).batch(units, 480)
        for kind in ("stratified", "logit_normal", "grid", "power")
    }
    inside = drawn["stratified"].grid.sigma.reshape(12, 40)
    # Uniform within parts of 0.01.
    places = (inside - 0.2) / 0.01 - torch.arange(40)
    assert float(places.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(places.min()) < 0.05
    assert float(places.max()) > 0.95
    # A level is as likely as itself, so its square is uniform; with the power 0 levels are the stratified ones.
    squares = (drawn["power"].grid.sigma.reshape(12, 40).square() - 0.04) / 0.008 - torch.arange(40)
    assert float(squares.mean()) == pytest.approx(0.5, abs=0.05)
    assert -1e-4 < float(squares.min()) < 0.05
    assert 0.95 < float(squares.max()) < 1 + 1e-4
    flat = forward_set(shards, kind="power", power=0.0, count=40, low=0.2, high=0.6).batch(units, 480)
    torch.testing.assert_close(flat.grid.sigma, drawn["stratified"].grid.sigma)
    logits = torch.logit(drawn["logit_normal"].grid.sigma)
    assert float(logits.mean()) == pytest.approx(0.0, abs=0.15)
    assert float(logits.std()) == pytest.approx(1.0, abs=0.1)
    shifted = forward_set(shards, kind="logit_normal", shift=3.0, count=40).batch(units, 480).grid.sigma
    levels = drawn["logit_normal"].grid.sigma
    torch.testing.assert_close(shifted, 3 * levels / (1 + 2 * levels))
    # Every timestep of training, the first and the last too, is drawn as often.
    trained = forward_set(shards, kind="timesteps", count=40).batch(units, 480).grid.sigma
    steps = (trained.double()[:, None] - TRAINED).abs().argmin(-1).bincount(minlength=60)
    assert steps.min() >= 1
    assert steps.sum() == 480
    # Ten times round the four levels, in one order per sample.
    round_trip = drawn["grid"].grid.sigma.reshape(12, 10, 4)
    assert torch.equal(round_trip, round_trip[:, :1].expand(12, 10, 4))
    assert [sorted(each[0].tolist()) for each in round_trip] == [pytest.approx(sorted(SIGMAS[:-1]))] * 12
    assert len({tuple(each[0].tolist()) for each in round_trip}) > 3
    noise = drawn["stratified"]
    assert isinstance(noise, ForwardBatch)
    assert float(noise.noise.mean()) == pytest.approx(0.0, abs=0.1)
    assert float(noise.noise.std()) == pytest.approx(1.0, abs=0.1)
    other = forward_set(shards, seed=1, count=40, low=0.2, high=0.6).batch(units, 480)
    assert not torch.equal(other.grid.sigma, noise.grid.sigma)
    assert isinstance(other, ForwardBatch)
    assert not torch.equal(other.noise, noise.noise)
    assert forward_set(shards, count=3).positions().tolist() == [3] * 12


@pytest.mark.parametrize("shards", ["final"], indirect=True)
def test_rows_under_the_prompts_of_others(shards: list[TrajectoryShard]) -> None:
    samples = forward_set(shards, count=1)
    # Prompts are a a b a b b.
    units = Units(np.array([[s, 0] for s in (0, 1, 3, 2, 4, 9)]), np.arange(7))
    samples.pair_prompts(units)
    own, other = samples.batch(units, 8), samples.mismatched(units, 8)
    assert isinstance(own, ForwardBatch)
    assert isinstance(other, ForwardBatch)
    assert own.conditioning.positive["prompt"].tolist()[:6] == [10, 10, 20, 10, 20, 20]
    assert other.conditioning.positive["prompt"].tolist()[:6] == [20, 20, 10, 20, 10, 10]
    assert torch.equal(own.latents, other.latents)
    # With one prompt alone there are no others.
    alone = Units(np.array([[s, 0] for s in (0, 1, 2)]), np.arange(4))
    samples.pair_prompts(alone)
    batch = samples.mismatched(alone, 4)
    assert isinstance(batch, ForwardBatch)
    assert batch.conditioning.positive["prompt"].tolist() == [10] * 4
