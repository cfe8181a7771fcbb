"""Editing models learn from a reward that sees the source images, and from given edits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from diffusers import FluxKontextPipeline
from PIL import Image

from flowmill.configs.errors import DataError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.load import load_config, override_config
from flowmill.configs.schema import RunConfig
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.metrics.view import RunView
from tests.conftest import ROOT
from tests.support.given import only_batch, picture, png, write_jsonl, write_members
from tests.support.inside import evaluate, prepare, run_epoch, run_stage, stage_rows, updates_of


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
        rows = stage_rows(context, epoch, "score", "image_similarity")
        found.append(rows.column("reward").to_numpy().astype(np.float64).reshape(4, 24))
    # In standard deviations of the first epoch's samples within groups.
    assert (found[-1].mean() - found[0].mean()) / found[0].std(1).mean() > 1


def test_given_edits_are_trained_as_a_plain_loop_of_diffusers_does(tmp_path: Path) -> None:
    """The pipeline prepares text and source image, and its autoencoder encodes the target."""
    whole = ["model.lora=null", "run.epochs=1", "optimize.updates_per_epoch=1"]
    config = load_config("tiny_edit_sft", [f"store.root={tmp_path}", *whole])
    remember(config)
    context = prepare(config)
    run_stage(context, "advantage", 1)
    trained = only_batch(context)
    pipeline = cast(Any, FluxKontextPipeline.from_pretrained(context.base_folder))
    folder, size = ROOT / "configs" / "prompts", (config.model.height, config.model.width)
    given, errors = [json.loads(line) for line in (folder / "given-edits.jsonl").open()], []
    for row, (number, _) in enumerate(trained.keys):
        source, target = (
            pipeline.image_processor.preprocess(Image.open(folder / given[number][name]).convert("RGB"), *size)
            for name in ("source", "image")
        )
        noise, sigma = trained.noise[row : row + 1], trained.grid.sigma[row : row + 1]
        with torch.no_grad():
            length = int(config.model.options["max_sequence_length"])
            embeds, pooled, text_ids = pipeline.encode_prompt(given[number]["prompt"], max_sequence_length=length)
            latents = pipeline._encode_vae_image(target, None)
            clean = pipeline._pack_latents(latents, *latents.shape)
            _, image, ids, image_ids = pipeline.prepare_latents(
                source, 1, latents.shape[1], *size, embeds.dtype, "cpu", None, noise
            )
            predicted = pipeline.transformer(
                hidden_states=torch.cat([sigma * noise + (1 - sigma) * clean, image], dim=1),
                timestep=sigma,
                guidance=torch.full((1,), config.model.guidance_scale),
                pooled_projections=pooled,
                encoder_hidden_states=embeds,
                txt_ids=text_ids,
                img_ids=torch.cat([ids, image_ids]),
                return_dict=False,
            )[0][:, : noise.shape[1]]
        errors.append((predicted - (noise - clean)).square().mean().item())
    assert len(errors) == 2 * len(given)
    run_epoch(context, 1)
    (update,) = updates_of(context, 1)
    assert update["loss"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert update["grad_norm"] > 0


def edits(folder: Path, rows: list[dict[str, Any]] | str, **section: Any) -> RunConfig:
    """Return a config that trains on edits of one row or two; their images become files."""
    source = rows if isinstance(rows, str) else str(write_jsonl(folder / f"rows-{len(list(folder.iterdir()))}", rows))
    data = {"train": source, "prompt_image": "source", **section}
    name = f"edits-{fingerprint([*map(str, data.values())])[:8]}"
    extends = {"extends": str(ROOT / "configs" / "tiny_edit_sft.yaml"), "run": {"epochs": 1, "name": name}}
    similarity = {"name": "image_similarity", "options": {"to": "source", "by": "ssim"}}
    small = {
        "store": {"root": str(folder / "store")},
        "model": {"height": 32, "width": 32},
        "evaluate": {"samples": 2},
        "rewards": ["jpeg_compressibility", similarity],
    }
    (folder / "edits.yaml").write_text(yaml.safe_dump({**extends, **small, "data": data}))
    config = load_config(folder / "edits.yaml")
    remember(config)
    return config


def edit(number: int, source: int = 50, **named: Any) -> dict[str, Any]:
    return {"prompt": f"make it {number}", "source": picture(source), "image": picture(number), **named}


def test_held_out_edits_have_a_loss_and_no_instruction_and_source_in_common(tmp_path: Path) -> None:
    apart = write_jsonl(tmp_path / "apart", [edit(8), edit(9)])
    context = prepare(edits(tmp_path, [edit(1), edit(2)], heldout=str(apart)))
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    before, after = [figures["loss"] for _, _, figures in RunView(context).summaries("validate")]
    assert before != after
    # Rewards of evaluations see the source images, also several, which score nothing in training.
    keys = set(RunView(context).curves().column("key").to_pylist())
    assert {"eval/train/image_similarity_mean", "heldout/loss"} <= keys
    # The same instruction with another source is another prompt, and the same source with another one too.
    assert check_config(edits(tmp_path, [edit(1), {**edit(8, 51), "image": picture(7)}], heldout=str(apart)))
    with pytest.raises(DataError, match=r"line 2 has a prompt or sample of data\.heldout"):
        check_config(edits(tmp_path, [edit(1), {**edit(8), "image": picture(7)}], heldout=str(apart)))
    with pytest.raises(DataError, match=r"line 2 repeats .*line 1"):
        check_config(edits(tmp_path, [edit(1), edit(1)]))
    lacking = edits(tmp_path, [edit(1), {**edit(2), "source": "none.png"}], bad_rows="leave_out")
    assert len(RunView(prepare(lacking)).ingested().refused) == 1  # type: ignore[union-attr]


@pytest.mark.slow
def test_edits_come_from_tars_and_as_pairs(tmp_path: Path) -> None:
    members = {"png": png(picture(3)), "source.png": png(picture(4)), "prompt": b"make it red"}
    write_members(tmp_path / "edits.tar", [(1, members)])
    context = prepare(edits(tmp_path, str(tmp_path / "edits.tar"), prompt_image="source.png"))
    run_epoch(context, 1)
    (prompt,) = context.prompts["train"]
    assert np.array_equal(context.references([prompt.metadata])[0][0], np.asarray(picture(4)))
    pairs = [{**edit(n), "chosen": picture(n), "rejected": picture(20 + n)} for n in (1, 2)]
    compared = edits(tmp_path, pairs, chosen="chosen", rejected="rejected")
    dpo = {"name": "dpo", "options": {"times": {"count": 2}, "beta": 20}}
    context = prepare(override_config(compared, [f"optimize.algorithm={json.dumps(dpo)}"]))
    run_epoch(context, 1)
    assert updates_of(context, 1)[0]["grad_norm"] > 0
