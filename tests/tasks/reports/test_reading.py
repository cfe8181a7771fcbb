"""What people read of a run from Python: joined by sample, equal to what the artifacts hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import flowmill
from tests.conftest import ROOT
from tests.support.inside import Make, evaluate, prepare, run_epoch


@pytest.fixture
def run(make_config: Make) -> flowmill.Run:
    config = make_config("monitors=[{name: jpeg_incompressibility}]", "evaluate.every=1")
    context = prepare(config)
    run_epoch(context, 1)
    evaluate(context, 1)
    return flowmill.open(str(config.store.root)).run("small")


def test_samples_come_with_what_they_earned(run: flowmill.Run) -> None:
    assert (run.epochs, run.rollouts) == ([1], [1])
    samples = run.samples(1).to_pandas()
    rewards, advantages = run.rewards(1).to_pandas(), run.advantages(1).to_pandas()
    label = run.config.rewards[0].slot
    assert list(samples.sample_id) == list(run.trajectories(1).to_pandas().sample_id)
    by_sample = samples.set_index("sample_id")
    assert by_sample.loc[rewards.sample_id, f"reward.{label}"].tolist() == rewards.reward.tolist()
    assert by_sample.loc[advantages.sample_id, "advantage"].tolist() == advantages.advantage.tolist()
    assert by_sample["reward.jpeg_incompressibility"].notna().all()
    assert not {"arrays", "media_offset"} & set(samples.columns)


def test_images_and_arrays_are_those_of_the_samples(run: flowmill.Run) -> None:
    samples = run.samples(1).to_pandas()
    wanted = [samples.sample_id.iloc[-1], samples.sample_id.iloc[0]]
    images = run.images(1, wanted)
    assert set(images) == set(wanted)
    everything = run.images(1)
    assert len(everything) == len(samples)
    image = images[wanted[0]]
    assert isinstance(image, Image.Image)
    assert np.array_equal(np.asarray(image), np.asarray(everything[wanted[0]]))
    latents = run.arrays(1, samples=wanted)[wanted[0]]
    assert len(latents) == len(samples.states.iloc[-1])
    latents[:] = 0  # a copy: the store is not touched
    assert run.arrays(1, samples=wanted)[wanted[0]].any()
    assert set(run.images(1, evaluation=True)) == set(run.evaluation(1).to_pandas().sample_id)
    with pytest.raises(flowmill.FlowmillError, match="has no sample 'missing'"):
        run.images(1, ["missing"])
    with pytest.raises(flowmill.FlowmillError, match=r"stores no 'nonsense' of sample '.*', only: latents"):
        run.arrays(1, "nonsense")
    # The id of one sample is no collection of letters.
    assert list(run.images(1, wanted[0])) == list(run.arrays(1, samples=wanted[0])) == wanted[:1]


def test_a_run_is_described_as_elsewhere(run: flowmill.Run) -> None:
    lineage = run.lineage().to_pandas().set_index(["epoch", "stage", "slot"])
    assert lineage.loc[1, "optimize", ""].state == "fresh"
    assert lineage.loc[2, "optimize", ""].state == "missing"
    rollout = lineage.loc[1, "rollout", ""].artifact
    assert rollout in lineage.loc[1, "optimize", ""].inputs
    assert run.store.table(rollout.partition("/")[2][:9]).num_rows == run.samples(1).num_rows
    figures, curves = run.figures().to_pandas(), run.curves().to_pandas()
    assert set(figures.list) == {"train", "heldout"}
    assert {"monitor/jpeg_incompressibility_correlation", "optimize/ratio_mean"} <= set(curves.key)
    sample = run.samples(1)["sample_id"][0].as_py()
    assert run.trace(1, sample)["runs"]["small"]["updates"]
    with pytest.raises(flowmill.FlowmillError, match="epoch 2"):
        run.samples(2)
    with pytest.raises(flowmill.FlowmillError, match="has no table of rows"):
        run.store.table(lineage.loc[1, "optimize", ""].artifact)


def test_another_process_s_work_is_seen_after_a_look(run: flowmill.Run, make_config: Make) -> None:
    assert run.epochs == [1]
    asked = run.config.run.epochs
    longer = ("monitors=[{name: jpeg_incompressibility}]", "evaluate.every=1", f"run.epochs={asked + 3}")
    run_epoch(prepare(make_config(*longer)), 2)
    assert (run.epochs, run.config.run.epochs) == ([1], asked)
    run.refresh()
    assert (run.epochs, run.config.run.epochs) == ([1, 2], asked + 3)


def test_a_mistake_in_a_config_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(flowmill.FlowmillError, match=r"appears 2 times.*label"):
        flowmill.start("tiny_sd3", overrides=["monitors=[{name: jpeg_compressibility}]"], root=str(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_reading_imports_nothing_heavy() -> None:
    code = "import sys, flowmill; sys.exit(bool({'torch', 'prefect', 'mlflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
