"""Clips with sound, judged apart: what an epoch of a tiny LTX-2 stores of each modality, and learns from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flowmill
from configs.load import load_config
from models.library_loading import quiet_libraries
from models.rewards.loudness import Loudness
from storage.trajectories.base import TrajectoryShard
from storage.trajectories.tables import read_rows
from tasks.metrics.samples import shards_of
from tasks.runs.context import RunContext
from tests.conftest import ROOT
from tests.support.inside import prepare, run_epoch

#: One of each modality, on scales of their own.
REWARDS = (
    "rewards=[{name: 'tests.support.rewards:brightness', label: seen, weight: 2, modality: video}, "
    "{name: loudness, label: heard, modality: audio}]"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """One epoch of two groups of four."""
    quiet_libraries()
    sizes = ["rollout={prompts_per_epoch: 2, group_size: 4, steps: 3}", "model.guidance_scale=1", "run.epochs=1"]
    root = tmp_path_factory.mktemp("modalities") / "store"
    config = load_config(ROOT / "configs" / "tiny_ltx2.yaml", [f"store.root={root}", "run.name=m", REWARDS, *sizes])
    context = prepare(config)
    run_epoch(context, 1)
    return context


def shards(context: RunContext) -> list[TrajectoryShard]:
    return list(shards_of(context.store, context.chain.require(1, "rollout").ref))


def scores(context: RunContext, slot: str) -> np.ndarray:
    return read_rows(context.store, context.chain.require(1, "score", slot).ref).column("reward").to_numpy()


def test_log_probs_of_modalities_are_means_over_their_own_latents(trained: RunContext) -> None:
    for shard in shards(trained):
        for row, log_probs in enumerate(shard.table.column("log_probs").to_pylist()):
            apart = shard.array("modality_log_probs", row)
            assert (apart.dtype, apart.shape) == (np.float32, (2, 2))
            # 8 tokens of the clip and 9 of the sound, all 16 wide.
            np.testing.assert_allclose(apart @ np.array([8, 9]) / 17, log_probs, atol=1e-6)
            assert not np.allclose(apart[:, 0], apart[:, 1])


def test_rewards_of_sound_hear_what_is_stored(trained: RunContext) -> None:
    sounds = [shard.sound(row) for shard in shards(trained) for row in range(shard.table.num_rows)]
    assert {(sound.rate, sound.samples.shape) for sound in sounds} == {(16000, (5280, 2))}
    media = np.stack([sound.samples for sound in sounds]).astype(np.float32) / 32768
    np.testing.assert_array_equal(scores(trained, "heard"), Loudness().score(media, [], []).values)


def test_each_modality_is_normalized_alone(trained: RunContext) -> None:
    ref = trained.chain.require(1, "advantage").ref
    apart, whole = read_rows(trained.store, ref, "modality_advantages"), read_rows(trained.store, ref)
    assert apart.column("modalities").to_pylist() == [["video", "audio"]] * 8
    found = np.array(apart.column("modality_advantages").to_pylist())
    for number, (slot, weight) in enumerate((("seen", 2), ("heard", 1))):
        earned = weight * scores(trained, slot).astype(np.float64).reshape(2, 4)
        expected = (earned - earned.mean(1, keepdims=True)) / (earned.std(1, keepdims=True) + 1e-4)
        np.testing.assert_allclose(found[:, number].reshape(2, 4), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(whole.column("advantage").to_numpy(), found.mean(1), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        whole.column("reward").to_numpy(), 2 * scores(trained, "seen") + scores(trained, "heard"), rtol=1e-6
    )
    samples = flowmill.open(str(trained.config.store.root)).run("m").samples(1).to_pandas()
    np.testing.assert_allclose(np.stack(samples.modality_advantages), found)


def test_training_starts_at_ratio_one_and_moves_the_policy(trained: RunContext) -> None:
    update, _ = trained.store.require(trained.chain.require(1, "optimize").ref).summary["updates"]
    assert (update["ratio_mean"], update["ratio_std"]) == (1.0, 0.0)
    assert update["grad_norm"] > 0


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_routed_advantages_learn_two_rewards_where_a_summed_one_learns_one(tmp_path: Path, seed: int) -> None:
    def learned(*modalities: str) -> tuple[float, float]:
        """Return how far both rewards rose, in standard deviations of the first epoch's samples within groups."""
        seen, heard = modalities
        rewards = REWARDS.replace("weight: 2, modality: video", f"modality: {seen}")
        options = ["run.epochs=14", "model.guidance_scale=1", "model.lora=null", "evaluate.every=99"]
        options += ["rollout={prompts_per_epoch: 4, group_size: 12, steps: 4}", f"run.seed={seed}"]
        options += ["optimize={learning_rate: 2e-3, updates_per_epoch: 2}"]
        options += ["execution={rollout_batch_size: 24, micro_batch_size: 24}", f"store.root={tmp_path / seen}"]
        options += [rewards.replace("modality: audio", f"modality: {heard}")]
        context = prepare(load_config(ROOT / "configs" / "tiny_ltx2.yaml", options))
        for epoch in range(1, 15):
            run_epoch(context, epoch)
        return rise(context, "seen"), rise(context, "heard")

    routed, summed = learned("video", "audio"), learned("null", "null")
    assert min(routed) > 1
    assert summed[1] > 1
    assert summed[0] < 0.5


def rise(context: RunContext, slot: str) -> float:
    first, last = (read_rows(context.store, context.chain.require(epoch, "score", slot).ref) for epoch in (1, 14))
    before, after = (table.column("reward").to_numpy().astype(np.float64) for table in (first, last))
    groups = first.column("group_id").to_pylist()
    spread = np.mean([before[[each == name for each in groups]].std() for name in set(groups)])
    return float((after.mean() - before.mean()) / spread)
