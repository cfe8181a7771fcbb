"""Language models that write edits of the prompts' images for a frozen edit model: its inputs, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import Flux2KleinPipeline
from PIL import Image

from flowmill.configs.errors import FlowmillError
from flowmill.configs.load import load_config
from flowmill.configs.schema import RunConfig
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.metrics.evaluations import evaluation_figures
from flowmill.tasks.metrics.samples import artifact_table, media_of
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.tokens.estimate import _prompt_tokens
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import evaluate, make_stage, prepare, run_epoch, run_stage, stage_rows, stage_run, train
from tests.support.language_models import texts_data
from tests.support.vision_classes import vision_data

#: Sizes of images that a prompt comes with one or two of.
_SIZES = ((64, 96), (80, 80), (64, 128))


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("klein")
    build_tiny("flux2_klein").save_pretrained(folder)
    return folder


def edit_data(folder: Path, klein: Path, data: dict[str, Any]) -> RunConfig:
    rng = np.random.default_rng(0)
    for number, size in enumerate(_SIZES):
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    rows = [{"prompt": f"{n}+1=", "image": [f"{n}.png", f"{(n + 1) % 3}.png"][: 1 + n % 2]} for n in range(3)]
    for name, part in (("train", rows[:2]), ("heldout", rows[2:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    options = {"max_sequence_length": 64, "references": 2}
    model = {"policy": "flux2_klein", "path": str(klein), "height": 64, "width": 64, "options": options}
    data["prompts"]["image"] = "image"
    data["rollout"] |= {"prompts_per_epoch": 2, "group_size": 2, "groups_per_shard": 1}
    similar = {"name": "image_similarity", "options": {"to": "source", "by": "ssim"}}
    data |= {"render": {"model": {**model, "guidance_scale": 3.0}, "steps": 2}, "rewards": [similar]}
    data["execution"] |= {"render_rows": 3}
    (folder / "edits.yaml").write_text(yaml.safe_dump(data))
    return load_config(folder / "edits.yaml")


def test_texts_edit_the_images_that_the_policy_saw(klein: Path, tmp_path: Path) -> None:
    config = edit_data(tmp_path, klein, vision_data(tmp_path))
    check_config(config)
    context = prepare(config)
    run_epoch(context, 1)
    evaluate(context, 1)
    ref = context.chain.require(1, "render").ref
    rows = artifact_table(context.store, ref).to_pylist()
    media = media_of(context.store, ref)
    pipeline = Flux2KleinPipeline.from_pretrained(klein)
    pipeline.set_progress_bar_config(disable=True)
    renderer = make_stage(context, "render", 1).host.renderer
    assert renderer is not None
    for row in rows:
        images = context.references([json.loads(row["metadata"])])[0]
        edited = pipeline(
            prompt=renderer.policy().as_plain(row["text"]),
            image=[Image.fromarray(image) for image in images],
            generator=torch.Generator().manual_seed(row["seed"]),
            output_type="np",
            height=64,
            width=64,
            num_inference_steps=2,
            guidance_scale=3.0,
            max_sequence_length=64,
        ).images[0]
        # Decoders round differently in batches.
        np.testing.assert_allclose(media[row["sample_id"]].astype(int), (edited * 255).round(), rtol=0, atol=1)
    assert sorted({len(json.loads(row["metadata"])["image_xxh3"].split(",")) for row in rows}) == [1, 2]
    scores = stage_rows(context, 1, "score", "image_similarity")
    assert len(set(scores.column("reward").to_pylist())) == 4
    sample = rows[0]["sample_id"]
    np.testing.assert_array_equal(
        RunView(context).references(1, [sample])[sample][0], context.references([json.loads(rows[0]["metadata"])])[0][0]
    )
    assert run_report(context).count('alt="starts from"') > 2


def test_an_interrupted_render_goes_on_without_the_files_of_images(klein: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("whole", "stopped"):
        data = {**texts_data(tmp_path), "store": {"root": str(tmp_path / name)}}
        context = prepare(edit_data(tmp_path, klein, data))
        run_stage(context, "rollout", 1)
        run = stage_run(context, "render", 1)
        if name == "stopped":
            run.run_shard(run.pending()[0])
            context = prepare(context.config)
            for number in range(len(_SIZES)):
                (tmp_path / f"{number}.png").unlink()
            run = stage_run(context, "render", 1)
            assert len(run.pending()) == 1
        manifest = run.execute()
        assert manifest is not None
        digests.append(manifest.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["prompts.image=null"], "render: model.policy 'flux2_klein' starts from images, but prompts.image is not set"),
        (["render.model.options={references: 1}"], "render: .* comes with 2 images, but .* 'flux2_klein' takes 1"),
        (["render.model.options={references: 0}"], "render: .* model.options.references of .* 'flux2_klein' is 0"),
        (["render.model.policy=wan21_v2v"], "render: .* makes clips"),
    ],
)
def test_an_edit_model_that_cannot_take_the_images_is_refused(
    overrides: list[str], said: str, klein: Path, tmp_path: Path
) -> None:
    edit_data(tmp_path, klein, vision_data(tmp_path))
    with pytest.raises(FlowmillError, match=said):
        check_config(load_config(tmp_path / "edits.yaml", overrides))


def test_one_of_policy_and_image_model_must_read_the_images(tiny_base: Path, klein: Path, tmp_path: Path) -> None:
    edit_data(tmp_path, klein, vision_data(tmp_path))
    words = ["render.model.policy=sd3", f"render.model.path={tiny_base}", "render.model.height=16"]
    words += ["render.model.options={max_sequence_length: 1, schedule: linear}", "render.model.width=32"]
    check_config(load_config(tmp_path / "edits.yaml", words))
    blind = ["model.policy=causal_lm", f"model.path={tmp_path / 'lm'}"]
    texts_data(tmp_path)
    edit_data(tmp_path, klein, vision_data(tmp_path))
    check_config(load_config(tmp_path / "edits.yaml", blind))
    _, (note,) = _prompt_tokens(RunPlan(load_config("flux1_kontext_enhancer", ["model.policy=causal_lm"])), None)
    assert "because the tokenizer is not here" in note, "its prompts have no tokens of images"
    with pytest.raises(FlowmillError, match=r"neither model.policy 'causal_lm' nor render.model.policy 'sd3' takes"):
        check_config(load_config(tmp_path / "edits.yaml", [*words, *blind]))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_the_tiny_edit_enhancer_learns_to_read_and_how_its_edit_model_is_asked(tmp_path: Path) -> None:
    context = train(load_config("tiny_edit_enhancer", ["run.epochs=10", f"store.root={tmp_path}"]))
    before, after = (evaluation_figures(context.chain, epoch)["heldout"]["digits"]["exact"] for epoch in (0, 10))
    assert before < 0.25
    assert after > before + 0.25
