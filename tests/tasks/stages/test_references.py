"""The images that prompts start from, in a store: for rewards that compare with them, wherever the files are now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowmill.configs.errors import ConfigError, CorruptError, NotCommittedError, PromptError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.rewards.similarity import structural_similarity
from flowmill.storage.trajectories import source_images
from flowmill.storage.trajectories.source_images import FILE
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.try_rewards import try_rewards
from flowmill.tasks.inputs.prompt_rows import read_picture
from flowmill.tasks.inputs.prompts import image_keys
from flowmill.tasks.metrics.samples import media_of
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.specs.plan import RunPlan
from tests.conftest import ROOT
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, stage_rows

SOURCE = "rewards=[{name: image_similarity, options: {to: source, by: ssim}}]"


def edits(folder: Path, *overrides: str) -> RunConfig:
    """Return the config of a tiny edit run, with a prompt file and more images of its own than are read at a time."""
    quiet_libraries()
    rows = []
    for number in range(20):
        Image.new("RGB", (64, 64), (12 * number, 255 - number, 9)).save(folder / f"{number}.png")
        images = [f"{number}.png", f"{19 - number}.png"][: 1 + number % 2]
        rows.append(json.dumps({"prompt": f"edit {number}", "images": images}))
    (folder / "edits.jsonl").write_text("\n".join(rows))
    given = [f"prompts.train={folder / 'edits.jsonl'}", f"store.root={folder / 'store'}", "run.name=edits", SOURCE]
    small = ["rollout.prompts_per_epoch=2", "rollout.group_size=2", "rollout.steps=2", "model.guidance_scale=1"]
    return load_config(ROOT / "configs" / "tiny_flux2_klein_edit.yaml", [*given, *small, *overrides])


def scored(context: RunContext) -> dict[str, float]:
    for stage, slot in (("rollout", ""), ("score", "image_similarity")):
        run_stage(context, stage, 1, slot)
    rows = stage_rows(context, 1, "score", "image_similarity").to_pylist()
    return {row["sample_id"]: row["reward"] for row in rows}


def test_a_reward_sees_what_every_sample_was_made_of_without_the_files(tmp_path: Path) -> None:
    config = edits(tmp_path)
    check_config(config)
    try_rewards(RunPlan(config))
    context = prepare(config)
    images = {prompt.id: [read_picture(path) for path in prompt.images] for prompt in context.source_prompts["train"]}
    for path in tmp_path.glob("*.png"):
        path.rename(path.with_suffix(".gone"))
    found = scored(context)
    media = media_of(context.store, context.chain.require(1, "rollout").ref)
    assert len(found) == 4
    for sample, reward in found.items():
        likeness = [structural_similarity(media[sample], image) for image in images[sample.split("-")[1]]]
        assert reward == pytest.approx(np.mean(likeness), rel=1e-5)


def test_every_image_is_read_and_only_as_it_was(tmp_path: Path) -> None:
    context = prepare(edits(tmp_path))
    prompts = context.source_prompts["train"]
    found = context.references([prompt.metadata for prompt in prompts])
    for prompt, images in zip(prompts, found, strict=True):
        assert [image.shape for image in images] == [(64, 64, 3)] * len(prompt.images)
        for path, image in zip(prompt.images, images, strict=True):
            np.testing.assert_array_equal(image, read_picture(path))
    # Equal prompts have the same arrays: what is sent to a server goes along once.
    again = context.references([prompts[1].metadata] * 2)
    assert again[0][0] is again[1][0]
    with pytest.raises(NotCommittedError, match=r"holds no image 0+, which none of its prompts"):
        context.references([{"image_xxh3": "0" * 32}])
    assert context.references([{}]) == [[]]
    key = image_keys(prompts[0].metadata)[0]
    context._reference_files._places[key] += 1
    with pytest.raises(CorruptError, match=f"image {key} has other content"):
        context.references([prompts[0].metadata])


def test_prompts_of_an_earlier_version_have_their_images_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(source_images, "write_references", lambda folder, keys, read: None)
        context = prepare(edits(tmp_path))
    ref = context.chain.require(0, "preprocess").ref
    assert FILE not in [file.name for file in context.store.shards(ref)[0].files]
    assert not context.holds_references
    found = scored(context)
    kept = tmp_path / "kept"
    kept.mkdir()
    assert scored(prepare(edits(kept))) == found
    # Another image of the same name is another one.
    with pytest.raises(NotCommittedError, match=r"Image \w+, which a prompt starts from, is neither in .* nor among"):
        context.references([{"image_xxh3": "0" * 32}])


def test_a_reward_that_compares_with_sources_wants_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compares with the images that prompts start from, but prompts\.image"):
        check_config(load_config(ROOT / "configs" / "tiny_flux2_klein.yaml", [SOURCE]))
    with pytest.raises(ConfigError, match=r"model\.options\.references of model\.policy 'flux2_klein' is 0"):
        check_config(edits(tmp_path, "model.options.references=0"))
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


def test_an_image_that_changes_while_a_run_begins_is_refused(tmp_path: Path) -> None:
    context = begin_run(edits(tmp_path))
    for stage in ("base", "encode"):
        run_stage(context, stage, 0)
    Image.new("RGB", (64, 64), "white").save(tmp_path / "3.png")
    with pytest.raises(PromptError, match=r"3\.png' was changed since the prompts were read"):
        run_stage(context, "preprocess", 0)


@pytest.mark.campaign
def test_edits_come_to_look_like_their_sources(tmp_path: Path) -> None:
    """From the same noise: a random model learns how like its sources a picture of its random autoencoder can be."""
    quiet_libraries()
    reward = "rewards=[{name: image_similarity, options: {to: source, by: pixels}}]"
    config = load_config(
        ROOT / "configs" / "tiny_flux2_klein_edit.yaml",
        [
            f"store.root={tmp_path}",
            "run.name=edits",
            "run.epochs=16",
            reward,
            "model.lora=null",
            "model.guidance_scale=1",
            "rollout.group_size=16",
            "rollout.sampler={name: flow_sde, options: {noise_level: 1.0}}",
            "optimize.learning_rate=5e-3",
            "optimize.updates_per_epoch=8",
            "optimize.algorithm.options.clip_range=0.2",
            "evaluate={every: 100, samples: 32}",
        ],
    )
    context, means = prepare(config), []
    evaluate(context, 0)
    for epoch in range(1, 17):
        run_epoch(context, epoch)
        rewards = stage_rows(context, epoch, "advantage").column("reward").to_pylist()
        means.append(np.mean(rewards))
    evaluate(context, 16)
    before, after = (
        np.mean(stage_rows(context, epoch, "judge", "image_similarity").column("reward").to_pylist())
        for epoch in (0, 16)
    )
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.001, means
    assert after > before + 0.001
