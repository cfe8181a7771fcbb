"""Clips with sound: an epoch of a tiny LTX-2 whose rewards see and hear."""

from __future__ import annotations

import numpy as np
import pytest

from flowmill.configs.load import load_config
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.rewards.loudness import Loudness
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.runs.context import RunContext
from tests.conftest import ROOT
from tests.support.inside import prepare, run_epoch, stage_rows, stored_shards, summary_of

REWARDS = "rewards=[{name: 'tests.support.rewards:brightness', label: seen, weight: 2}, {name: loudness, label: heard}]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """One epoch of two groups of four."""
    quiet_libraries()
    sizes = ["rollout={prompts_per_epoch: 2, group_size: 4, steps: 3}", "model.guidance_scale=1", "run.epochs=1"]
    root = tmp_path_factory.mktemp("sounds") / "store"
    config = load_config(ROOT / "configs" / "tiny_ltx2.yaml", [f"store.root={root}", "run.name=m", REWARDS, *sizes])
    context = prepare(config)
    run_epoch(context, 1)
    return context


def shards(context: RunContext) -> list[TrajectoryShard]:
    return list(stored_shards(context, 1, "rollout"))


def scores(context: RunContext, slot: str) -> np.ndarray:
    return stage_rows(context, 1, "score", slot).column("reward").to_numpy()


def test_rewards_of_sound_hear_what_is_stored(trained: RunContext) -> None:
    sounds = [shard.sound(row) for shard in shards(trained) for row in range(shard.table.num_rows)]
    assert {(sound.rate, sound.samples.shape) for sound in sounds} == {(16000, (5280, 2))}
    media = np.stack([sound.samples for sound in sounds]).astype(np.float32) / 32768
    np.testing.assert_array_equal(scores(trained, "heard"), Loudness().score(media, [], []).values)


def test_training_starts_at_ratio_one_and_moves_the_policy(trained: RunContext) -> None:
    update, _ = summary_of(trained, 1, "optimize")["updates"]
    assert (update["ratio_mean"], update["ratio_std"]) == (1.0, 0.0)
    assert update["grad_norm"] > 0
