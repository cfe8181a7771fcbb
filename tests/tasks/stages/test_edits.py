"""Editing models learn from a reward that sees the source images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from configs.load import load_config
from storage.trajectories.tables import read_rows
from tests.conftest import ROOT
from tests.support.inside import prepare, run_epoch


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_edits_come_nearer_to_the_images_they_start_from(tmp_path: Path, seed: int) -> None:
    options = ["rewards=[{name: image_similarity, options: {to: source, by: pixels}}]", f"store.root={tmp_path}"]
    options += ["model.height=32", "model.width=32", "model.lora=null", "evaluate.every=99", "run.epochs=16"]
    options += ["rollout={prompts_per_epoch: 4, group_size: 24, steps: 3}", f"run.seed={seed}"]
    options += [
        "optimize={learning_rate: 1e-2, updates_per_epoch: 4, algorithm: {name: grpo, options: {clip_range: 1e-2}}}"
    ]
    options += ["execution={rollout_batch_size: 48, micro_batch_size: 24}"]
    context = prepare(load_config(ROOT / "configs" / "tiny_flux2_klein_edit.yaml", options))
    found = []
    for epoch in range(1, 17):
        run_epoch(context, epoch)
        rows = read_rows(context.store, context.chain.require(epoch, "score", "image_similarity").ref)
        found.append(rows.column("reward").to_numpy().astype(np.float64).reshape(4, 24))
    # In standard deviations of the first epoch's samples within groups.
    assert (found[-1].mean() - found[0].mean()) / found[0].std(1).mean() > 1
