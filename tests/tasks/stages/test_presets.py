"""Every tiny preset runs the whole pipeline of its family, and what it exports is what it evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from diffusers import DiffusionPipeline, ModularPipeline
from PIL import Image

from flowmill.configs.load import load_config
from flowmill.configs.model_families import families, spec_of
from flowmill.configs.registry import resolve
from flowmill.models.library_loading import quiet_libraries
from flowmill.models.policies import POLICIES
from flowmill.models.policies.parts import Part
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.maintenance.verify import verify_store
from flowmill.tasks.inputs.prompt_rows import read_picture
from flowmill.tasks.inputs.prompts import read_prompts
from flowmill.tasks.inputs.weight_sources import exported_folder
from flowmill.tasks.metrics.samples import artifact_table
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report.reading import read_run
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.seeds import generator
from flowmill.tasks.specs.graph import Node
from tests.conftest import ROOT
from tests.support.families import PIPELINES, UNPADDED, family_params, representatives
from tests.support.inside import evaluate, make_stage, prepare, run_epoch, run_stage, stored_shards

pytestmark = pytest.mark.slow

#: Families whose processor transformers loads where torchvision is, which the tests do without.
PROCESSED = ("qwen_image_edit", "qwen_image_edit_plus", "qwen_image21", "flux3")


#: Presets of families that edit where an option says so.
EDITING = ("flux2_klein_edit", "flux3_edit", "qwen_image21_edit")


@pytest.fixture(scope="module", params=family_params(representatives(), (*PIPELINES, *EDITING)))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    """One trained, evaluated and exported epoch of a family's tiny preset, which tests only look at."""
    quiet_libraries()
    preset = ROOT / "configs" / f"tiny_{request.param}.yaml"
    folder = tmp_path_factory.mktemp(request.param)
    config = load_config(preset, [f"store.root={folder / 'store'}", "run.name=tiny", "run.epochs=1"])
    context = prepare(config)
    run_epoch(context, 1)
    evaluate(context, 1)
    run_stage(context, "export", 1)
    return context


def evaluated(context: RunContext) -> list[dict[str, Any]]:
    """Return prompt, seed and media of the evaluation's samples."""
    shard = stored_shards(context, 1, "evaluate")[0]
    rows = shard.table.select(["prompt", "seed"]).to_pylist()
    section = context.config.prompts
    images = {prompt.text: prompt.images for prompt in read_prompts(section.train, section, where="prompts.train")}
    return [{**row, "media": shard.media(n), "images": images[row["prompt"]]} for n, row in enumerate(rows)]


def test_a_whole_run(finished: RunContext) -> None:
    store, model = finished.store, finished.config.model
    assert verify_store(store, deep=True)["problems"] == []
    summary = store.require(finished.chain.require(1, "optimize").ref).summary
    assert len(summary["updates"]) == finished.config.optimize.updates_per_epoch
    assert all(np.isfinite(update["loss"]) and update["grad_norm"] > 0 for update in summary["updates"])
    # On-policy: the first update sees the policy that made the rollouts.
    assert summary["updates"][0]["ratio_mean"] == 1
    assert summary["updates"][0].get("replay_gap_max", 0) < 1e-5

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


def test_a_store_gives_back_what_prompts_start_from(finished: RunContext) -> None:
    started = [prompt for prompt in finished.source_prompts["train"] if prompt.images]
    assert bool(started) == finished.holds_references == (finished.config.prompts.image is not None)
    if spec_of(finished.config.model.policy).references is not None and started:
        usage = json.loads(
            (exported_folder(finished.store, finished.chain.target(Node(1, "export"))) / "generation.json").read_text()
        )
        assert (usage["input_image"]["file"], usage["further_input_images"]) == (
            "images/input.png",
            ["images/input-2.png"],
        )
    found = finished.references([prompt.metadata for prompt in started])
    for prompt, images in zip(started, found, strict=True):
        assert len(images) == len(prompt.images)
        for path, image in zip(prompt.images, images, strict=True):
            np.testing.assert_array_equal(image, read_picture(path))
            assert not image.flags.writeable
    rollout = finished.chain.require(1, "rollout").ref
    samples = artifact_table(finished.store, rollout).column("sample_id").to_pylist()
    counts = {len(images) for images in RunView(finished).references(1, samples).values()}
    assert counts == {len(prompt.images) for prompt in finished.source_prompts["train"]}
    shots = read_run(finished).best
    assert all(shot.references for shot in shots) == bool(started)


def test_other_frames_of_a_clip_are_other_scores(tmp_path: Path) -> None:
    store, found = ArtifactStore(str(tmp_path / "store")), []
    for choice in ("frames: first", "frames: clip", "frames: 1"):
        rewards = f"rewards=[{{name: jpeg_compressibility, {choice}}}]"
        config = load_config(ROOT / "configs" / "tiny_wan21.yaml", [rewards])
        context = RunContext(store, config, RunFolder(store, config.run.name))
        found.append(make_stage(context, "judge", 0, "jpeg_compressibility").options())
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def test_the_snippet_of_the_card_draws_the_evaluated_images(
    finished: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pipeline scales the image to edit to a megapixel; the preset takes it as small as it is.
    edit = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit.calculate_dimensions"
    monkeypatch.setattr(edit, lambda area, ratio: (64, 64, None))
    plus = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus"
    monkeypatch.setattr(f"{plus}.VAE_IMAGE_SIZE", 64 * 64)
    model = finished.config.model
    folder = exported_folder(finished.store, finished.chain.target(Node(1, "export")))
    usage = json.loads((folder / "generation.json").read_text())
    place = tmp_path / "place"
    shutil.copytree(folder, place)
    # As the card says of a base that is no repository: it is linked there under its name.
    (place / usage["base_model"]).symlink_to(finished.base_folder)
    monkeypatch.chdir(place)
    if model.policy in PROCESSED:
        given = resolve(POLICIES, model.policy, label="policy").components(finished.base_folder, frozenset(Part))
        load, fill = DiffusionPipeline.from_pretrained, ModularPipeline.load_components
        monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *a, **k: load(*a, **{**given, **k}))
        monkeypatch.setattr(
            ModularPipeline, "load_components", lambda p, **k: (p.update_components(**given), fill(p, **k))
        )
    found: dict[str, Any] = {}
    exec(compile((place / "README.md").read_text().split("```python\n")[1].split("```")[0], "card", "exec"), found)
    pipe, samples = found["pipe"], evaluated(finished)
    assert (found["prompt"], usage["seed"]) == (samples[0]["prompt"], samples[0]["seed"])

    def run() -> np.ndarray:
        # The pipelines take one image for all prompts, decode one clip at once, or pad texts to the longest.
        alone = model.policy in {*families(lambda spec: spec.starts_from != "text"), *UNPADDED, "hunyuan_video15"}
        size = 1 if alone or samples[0]["images"] else len(samples)
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        made = [draw(pipe, found["call"], usage, batch) for batch in batches]
        return (np.concatenate(made) * 255).round()

    ours = np.stack([sample["media"] for sample in samples]).astype(float)
    after = run()
    first = found["frames"] if model.frames > 1 else found["result"]
    assert (
        np.abs(
            np.stack([np.asarray(frame) for frame in first] if model.frames > 1 else np.asarray(first)[..., :3])
            - ours[0]
        ).max()
        <= 1
    )
    (pipe.unload_lora_weights if hasattr(pipe, "unload_lora_weights") else pipe.transformer.unload_lora)()
    before = run()
    assert np.abs(ours - after).max() <= 1
    assert np.abs(ours - before).mean() > np.abs(ours - after).mean()


def draw(pipe: Any, call: dict[str, Any], usage: dict[str, Any], samples: list[dict[str, Any]]) -> np.ndarray:
    start: dict[str, Any] = {}
    if "input_video" in usage:
        # Images are clips that stand still.
        (path,) = samples[0]["images"]
        start["video"] = [Image.open(path).convert("RGB")] * len(usage["input_video"])
    elif samples[0]["images"]:
        opened, size = [Image.open(path).convert("RGB") for path in samples[0]["images"]], usage["input_image"]["size"]
        scaled = [one if size is None else one.resize(tuple(size), Image.Resampling.LANCZOS) for one in opened]
        start["image"] = scaled[0] if len(scaled) == 1 else scaled
    if "negative_prompt" in call:
        start["negative_prompt"] = [call["negative_prompt"]] * len(samples)
    prompts, seeds = ([sample[key] for sample in samples] for key in ("prompt", "seed"))
    if isinstance(pipe, ModularPipeline):
        (prompts,), start = prompts, {k: v if k == "image" else v[0] for k, v in start.items()}
    made = pipe(prompt=prompts, generator=[generator(seed) for seed in seeds], output_type="np", **{**call, **start})
    shown = "frames" if hasattr(made, "frames") else "images"
    # A fourth channel, transparency, is left away by the run.
    return np.asarray(getattr(made, shown))[..., :3]
