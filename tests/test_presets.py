"""Every tiny preset runs the whole pipeline of its family, and what it exports is what it evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image

from configs.load import load_config
from configs.registry import resolve
from models.libraries import quiet_libraries
from models.policies import IMAGE_CONDITIONED, POLICIES
from models.policies.base import Part
from storage.commit import ArtifactStore
from storage.lineage import RunFolder
from storage.verify import verify_store
from tasks.prompts import read_prompts
from tasks.rollout import open_trajectory_store
from tasks.seeds import generator
from tasks.sources import PIPELINE
from tasks.stage import StageRun
from tasks.stages import make_stage
from tasks.workspace import Workspace
from tests import conftest
from tests.conftest import ROOT, prepare, run_epoch
from tests.contracts.test_policies import TINY


@pytest.fixture(params=sorted(POLICIES))
def finished(request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
    """One trained, evaluated and exported epoch of a family's tiny preset."""
    quiet_libraries()
    preset = ROOT / "configs" / f"tiny_{request.param}.yaml"
    config = load_config(preset, [f"store.root={tmp_path / 'store'}", "run.name=tiny", "run.epochs=1"])
    workspace = prepare(config)
    run_epoch(workspace, 1)
    conftest.evaluated(workspace, 1)
    StageRun(make_stage(workspace, "export", 1)).execute()
    return workspace


def evaluated(workspace: Workspace) -> list[dict[str, Any]]:
    """Return prompt, seed and media of the evaluation's samples."""
    store, ref = workspace.store, workspace.chain.require(1, "evaluate").ref
    shard = open_trajectory_store("webdataset").open(store.files(ref, store.shards(ref)[0]))
    rows = shard.table.select(["prompt", "seed"]).to_pylist()
    section = workspace.config.prompts
    images = {prompt.text: prompt.image for prompt in read_prompts(section.train, section, where="prompts.train")}
    return [{**row, "media": shard.media(n), "image": images[row["prompt"]]} for n, row in enumerate(rows)]


def test_a_whole_run(finished: Workspace) -> None:
    store, model = finished.store, finished.config.model
    assert verify_store(store, deep=True)["problems"] == []
    summary = store.require(finished.chain.require(1, "optimize").ref).summary
    assert len(summary["updates"]) == finished.config.optimize.updates_per_epoch
    assert all(np.isfinite(update["loss"]) and update["grad_norm"] > 0 for update in summary["updates"])
    # On-policy: the first update sees the policy that made the rollouts.
    assert summary["updates"][0]["ratio_mean"] == pytest.approx(1, abs=1e-5)

    samples = evaluated(finished)
    frames = (model.frames,) if model.frames > 1 else ()
    assert {sample["media"].shape for sample in samples} == {(*frames, model.height, model.width, 3)}
    ref = finished.chain.require(1, "evaluate").ref
    folder = store.folder(ref, store.shards(ref)[0])
    assert (folder / "clips").exists() == (model.frames > 1)
    for path in (folder / "clips").glob("*.mp4"):
        with av.open(str(path)) as clip:
            assert clip.streams.video[0].codec_context.pix_fmt == "yuv420p"
            assert len(list(clip.decode(video=0))) == model.frames


def test_other_frames_of_a_clip_are_other_scores(tmp_path: Path) -> None:
    store, found = ArtifactStore(str(tmp_path / "store")), []
    for frames in ("first", "clip"):
        rewards = f"rewards=[{{name: jpeg_compressibility, frames: {frames}}}]"
        config = load_config(ROOT / "configs" / "tiny_wan21.yaml", [rewards])
        workspace = Workspace(store, config, RunFolder(store, config.run.name))
        found.append(make_stage(workspace, "judge", 0, "jpeg_compressibility").options())
    assert found[0] != found[1]


def test_the_exported_lora_gives_the_evaluated_images_in_plain_diffusers(
    finished: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pipeline scales the image to edit to a megapixel; the preset takes it as small as it is.
    edit = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions"
    monkeypatch.setattr(edit, lambda area, ratio: (64, 64, None))
    model, tiny = finished.config.model, TINY[finished.config.model.policy]
    export = finished.chain.require(1, "export").ref
    lora = finished.store.folder(export, finished.store.shards(export)[0]) / PIPELINE
    family = resolve(POLICIES, model.policy, what="policy")
    given = family.components(finished.base_folder, frozenset(Part))
    pipeline = DiffusionPipeline.from_pretrained(finished.base_folder, **given)
    pipeline.set_progress_bar_config(disable=True)
    if model.frames > 1:
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    if model.policy == "sd3":
        tiny_call: dict[str, Any] = {"max_sequence_length": 256}
    else:
        tiny_call = dict(tiny.call)
    call = {**tiny_call, "height": model.height, "width": model.width}
    call[tiny.guidance] = model.guidance_scale + tiny.guidance_offset
    if "guidance_scale_2" in model.options:
        call["guidance_scale_2"] = model.options["guidance_scale_2"]
    samples = evaluated(finished)

    def run_some(some: list[dict[str, Any]]) -> np.ndarray:
        start: dict[str, Any] = {}
        if some[0]["image"] is not None:
            start["image"] = Image.open(some[0]["image"]).convert("RGB")
        if tiny.guidance != "guidance_scale":
            start["negative_prompt"] = [model.negative_prompt] * len(some)
        made = pipeline(
            prompt=[sample["prompt"] for sample in some],
            generator=[generator(sample["seed"]) for sample in some],
            num_inference_steps=finished.config.rollout.steps,
            output_type="np",
            **start,
            **call,
        )
        images = made.frames if model.frames > 1 else made.images
        return (np.asarray(images) * 255).round()

    def run() -> np.ndarray:
        if model.policy not in IMAGE_CONDITIONED:
            return run_some(samples)
        # The pipelines take one image for all prompts.
        return np.concatenate([run_some([sample]) for sample in samples])

    ours = np.stack([sample["media"] for sample in samples]).astype(float)
    before = run()
    pipeline.load_lora_weights(lora)
    if (lora / "transformer_2").exists():
        pipeline.load_lora_weights(lora / "transformer_2", load_into_transformer_2=True)
    after = run()
    assert np.abs(ours - after).max() <= 1
    assert np.abs(ours - before).mean() > np.abs(ours - after).mean()
