"""Chooses the given samples of an epoch, and the advantage of each: 1 without a rating, the rating's sign and size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.trajectories.tables import read_rows, write_rows
from tasks.inputs.data_rows import data_of
from tasks.runs.seeds import epoch_prompts
from tasks.stages.stage import Output, Stage

if TYPE_CHECKING:
    from configs.data import DataSection

_IDENTITY = ("sample_id", "prompt_id", "group_id")


def write_given_advantages(stage: Stage, folder: Path) -> Output:
    """Write the advantages of the given samples of an epoch: slices of one permutation of groups per pass."""
    section, (data,) = data_of(stage.config), stage.inputs()
    table = read_rows(stage.context.store, data, "rewards")
    names = pc.unique(table.column("group_id"))
    size = min(section.groups_per_epoch or len(names), len(names))
    chosen = epoch_prompts(len(names), size, seed=stage.config.run.seed, epoch=stage.epoch)
    kept = table.filter(pc.is_in(table.column("group_id"), value_set=names.take(pa.array(chosen))))
    rewards = kept.column("reward").to_numpy()
    advantages = given_advantages(rewards, section)
    columns = {
        **{name: kept.column(name).to_pylist() for name in _IDENTITY},
        "reward": kept.column("reward").to_pylist(),
        "advantage": advantages.tolist(),
    }
    write_rows("advantages", folder, columns, {"artifact": str(data)})
    summary = {"abs_mean": float(np.abs(advantages).mean()), "groups": size, "samples": kept.num_rows}
    if section.rating is not None:
        summary |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    return Output(rows=kept.num_rows, summary=summary)


def given_advantages(ratings: np.ndarray, section: DataSection) -> np.ndarray:
    """Return (N,) float32 advantages of (N,) ratings, NaN where there is none: 1 for chosen samples and for samples
    without ratings, -1 for rejected ones; a rating counts from its neutral value, in halves of the scale."""
    low, high = (0.0, 1.0) if section.paired else section.scale
    middle = 0.5 if section.paired else section.middle
    found = (ratings.astype(np.float64) - middle) / ((high - low) / 2)
    return np.where(np.isnan(found), 1.0, found).astype(np.float32)
