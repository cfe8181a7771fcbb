"""Chains that end above level 0: training takes the latents that were decoded and scored, not their shorter ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.preserving import clean_ends, flow_length
from flowmill.models.maths.transitions import FlowSDE, Grid
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.sd15 import SD15
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.storage.trajectories.schema import ADVANTAGES
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from flowmill.tasks.algorithms.base import ForwardTimes, Requirements
from flowmill.tasks.algorithms.diffusion import ForwardBatch, StateBatch, TransitionBatch
from flowmill.tasks.algorithms.refl import ReFL
from flowmill.tasks.modalities.diffusion.sample_sets import ForwardSet, TransitionSet
from flowmill.tasks.modalities.rows import Units
from tests.support.folder_files import FolderFiles
from tests.support.toy import common, subjects_of
from tests.support.trajectories import write_samples

END, STEPS = 0.0283, 4
LATENTS = np.random.default_rng(0).normal(size=(2, 3, 1, 2, 2)).astype(np.float32)
GRADIENTS = np.random.default_rng(1).normal(size=(2, 1, 2, 2)).astype(np.float32)
ROWS = Units(np.array([[0, 0], [1, 0]], np.int64), np.arange(3))
WITH: dict[str, Any] = {"condition": lambda ids: Conditioning({}), "device": torch.device("cpu")}


def shard(folder: Path, end: float) -> TrajectoryShard:
    common = {"prompt_id": "a", "group_id": "a", "prompt": "a", "epoch": 1, "seed": 0, "policy": "policies/x"}
    samples = [
        Sample(
            **common,
            sample_id=f"s{row}",
            replica=row,
            sigmas=[0.9, 0.5, end],
            steps=[0],
            states=[0, 1, 2],
            log_probs=np.zeros(1, np.float32),
            latents=LATENTS[row],
        )
        for row in range(2)
    ]
    write_samples(WebDatasetStore(), folder, samples)
    return WebDatasetStore().open(FolderFiles(folder))


def advantages() -> pa.Table:
    rows = [{"sample_id": f"s{n}", "prompt_id": "a", "group_id": "a", "reward": n, "advantage": 1.0} for n in range(2)]
    return pa.Table.from_pylist(rows, schema=ADVANTAGES)


@pytest.mark.parametrize("end", [END, 0.0])
def test_what_is_noised_is_what_was_decoded(tmp_path: Path, end: float) -> None:
    slopes: Any = SimpleNamespace(of=lambda name: GRADIENTS[int(name[1:])], has=lambda name: True)
    rows = ForwardSet(
        [shard(tmp_path, end)], advantages(), times=ForwardTimes(count=1), seed=0, gradients=slopes, **WITH
    ).batch(ROWS, 2)
    assert isinstance(rows, ForwardBatch)
    length = float(flow_length(torch.tensor(end)))
    decoded = torch.from_numpy(LATENTS[:, -1]) / length
    assert length == pytest.approx(0.9721, abs=1e-4) if end else length == 1.0
    torch.testing.assert_close(rows.clean, decoded, rtol=1e-6 if end else 0, atol=0)
    level = rows.grid.sigma.reshape(-1, 1, 1, 1)
    torch.testing.assert_close(rows.latents, (1 - level) * decoded + level * rows.noise)
    # By the chain rule: final latents are the clean ones times their length.
    assert rows.gradients is not None
    torch.testing.assert_close(rows.gradients, torch.from_numpy(GRADIENTS) * length, rtol=1e-6 if end else 0, atol=0)


@pytest.mark.parametrize("end", [END, 0.0])
def test_what_is_compared_is_what_was_decoded(tmp_path: Path, end: float) -> None:
    requires = Requirements(finals=True, unit="pair")
    kept = TransitionSet(
        [shard(tmp_path, end)], advantages(), kernel=FlowSDE(), means=False, requires=requires, **WITH
    ).batch(ROWS, 2)
    assert isinstance(kept, TransitionBatch)
    assert kept.finals is not None
    assert torch.equal(kept.finals, clean_ends(torch.from_numpy(LATENTS[:, -1]), torch.tensor([end])))


def test_a_prediction_of_clean_latents_is_decoded_as_it_is(tmp_path: Path) -> None:
    """ReFL's last prediction is ``pred_original_sample`` of the scheduler."""
    build_tiny("sd15").save_pretrained(tmp_path)
    settings = DiffusionSettings(height=32, width=32)
    policy = SD15.load(tmp_path, settings, frozenset(Part), {"steps": STEPS})
    rows, sigmas, seen = policy.encode(["a cat", "two dogs"]), policy.sigmas(STEPS), list[Tensor]()
    state = 0.7 * torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    scheduler = policy.pipeline.scheduler
    scheduler.set_timesteps(STEPS)
    last = scheduler.timesteps[-1]
    noisy = state / flow_length(sigmas[-2])
    with torch.no_grad():
        noise = policy.pipeline.unet(noisy, last, encoder_hidden_states=rows["prompt_embeds"]).sample
        expected = scheduler.step(noise, last, noisy).pred_original_sample
    level = sigmas[-2].expand(2)
    about = {**common([0.0, 0.0], [0, 1]), "conditioning": Conditioning(rows)}
    batch = StateBatch(
        latents=state,
        grid=Grid(level, sigmas[-1:].expand(2), sigmas[1:2].expand(2)),
        levels=level[:, None],
        subjects=subjects_of(2),
        **about,
    )
    scale = policy.decode_scaled
    policy.decode_scaled = lambda latents: (seen.append(latents.detach()), scale(latents))[1]  # type: ignore[method-assign]
    models: Any = SimpleNamespace(
        velocity=lambda rows: policy.velocity(rows.latents, rows.grid.sigma, rows.conditioning),
        rewards_of=lambda latents, rows: policy.decode_smoothly(latents).flatten(1).mean(1),
    )
    ReFL().loss(dataclasses.replace(batch), models)
    torch.testing.assert_close(seen[-1], expected, rtol=1e-4, atol=1e-4)
