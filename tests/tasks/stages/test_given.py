"""Runs that train on given samples: ingest, resume, supervised fine-tuning, pairs and ratings."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

import flowmill
from flowmill.configs.errors import ConfigError, DataError
from flowmill.configs.load import load_config, parse_config
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.diffusion import DiffusionPolicy
from flowmill.models.policies.parts import Part
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.data_section import data_of
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.ingested import ingested_figures
from flowmill.tasks.reports.dataset import export_run
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, finished_result, mark_finished, open_run
from flowmill.tasks.runs.staleness import Freshness, status_of
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.tracking.descriptions import description
from tests.support.given import given_data, pairs, picture, png, rated, singles, write_jsonl
from tests.support.inside import (
    Make,
    evaluate,
    make_stage,
    prepare,
    run_epoch,
    run_stage,
    session_of,
    stage_rows,
    stage_run,
    stored_shards,
    updates_of,
)
from tests.support.language_models import texts_data

SFT = {"name": "sft", "options": {"times": {"count": 2}}}


@pytest.fixture
def given(config_data: dict[str, Any], config_file: Path, tmp_path: Path) -> Make:
    """Returns the small config with given samples instead of rollouts."""

    def make(rows: list[dict[str, Any]] | str, algorithm: Any = SFT, *overrides: str, **section: Any) -> RunConfig:
        source = rows if isinstance(rows, str) else str(write_jsonl(tmp_path / "given", rows))
        data = {**config_data, "data": {"train": source, "rows_per_shard": 2, **section}}
        data["prompts"] = {"heldout": config_data["prompts"]["heldout"]}
        data["optimize"] = {"learning_rate": 1e-3, "algorithm": algorithm}
        path = tmp_path / "given.yaml"
        path.write_text(yaml.safe_dump(data))
        config = load_config(path, list(overrides))
        remember(config)
        return config

    return make


def samples_of(context: RunContext) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return prompt, clean latents and media of all ingested samples."""
    found = []
    for shard in stored_shards(context, 0, "ingest"):
        texts = shard.table.column("prompt").to_pylist()
        found += [(text, shard.final_latents(row), shard.media(row)) for row, text in enumerate(texts)]
    return found


def test_images_are_encoded_once_by_the_policys_autoencoder(given: Make) -> None:
    context = prepare(given(singles()))
    policy = cast(DiffusionPolicy, session_of(context).host.load(frozenset({Part.VAE})))
    for (text, latents, media), row in zip(samples_of(context), singles(), strict=True):
        assert text == row["prompt"]
        fitted = np.asarray(Image.fromarray(np.asarray(row["image"])).crop((0, 2, 40, 22)).resize((32, 16), 1))
        assert np.abs(fitted.astype(int) - media.astype(int)).mean() < 12, "cropped in the middle and scaled"
        pixels = torch.from_numpy(media.copy()).movedim(-1, 0)[None].float() / 127.5 - 1
        torch.testing.assert_close(torch.from_numpy(latents.copy())[None], policy.encode_media(pixels))


@pytest.mark.campaign_cases("dpo", "kto")
@pytest.mark.slow_cases("sft")
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto"])
def test_training_on_given_samples_changes_the_policy_and_resumes(given: Make, tmp_path: Path, algorithm: str) -> None:
    rows, section = {
        "sft": (singles(), {}),
        "dpo": (pairs(), {"chosen": "chosen", "rejected": "rejected"}),
        "kto": (rated(), {"rating": "stars", "scale": (1, 5)}),
    }[algorithm]
    beta = {} if algorithm == "sft" else {"beta": 20}
    options = {"name": algorithm, "options": {"times": {"count": 2}, **beta}}
    whole = prepare(given(rows, options, f"store.root={tmp_path / 'whole'}", **section))
    evaluate(whole, 0)
    for epoch in (1, 2):
        run_epoch(whole, epoch)
    updates = updates_of(whole, 2)
    assert all(update["grad_norm"] > 0 for update in updates)

    # The same run, stopped in ingest after a shard, with other shards afterwards.
    context = begin_run(given(rows, options, **section))
    for name in ("base", "encode", "preprocess"):
        run_stage(context, name, 0)
    stage = stage_run(context, "ingest", 0)
    stage.run_shard(stage.pending()[1])
    again = prepare(given(rows, options, **{**section, "rows_per_shard": 5}))
    evaluate(again, 0)
    for epoch in (1, 2):
        run_epoch(again, epoch)
    assert again.chain.digest() == whole.chain.digest()


def test_an_epoch_trains_some_groups_and_a_pass_trains_all(given: Make) -> None:
    context = prepare(given(pairs(), "dpo", chosen="chosen", rejected="rejected", groups_per_epoch=2))
    seen: list[str] = []
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
        table = stage_rows(context, epoch, "advantage")
        assert table.column("advantage").to_pylist() == [1.0, -1.0] * 2
        seen += dict.fromkeys(table.column("group_id").to_pylist())
    assert len(set(seen)) == len(pairs())


def test_ratings_count_from_the_neutral_one(given: Make) -> None:
    context = prepare(given(rated(), "kto", rating="stars", scale=(1, 5), neutral=2))
    run_epoch(context, 1)
    table = stage_rows(context, 1, "advantage")
    found = dict(zip(table.column("reward").to_pylist(), table.column("advantage").to_pylist(), strict=True))
    assert found == {1.0: -0.5, 2.0: 0.0, 3.0: 0.5, 4.0: 1.0, 5.0: 1.5}


def test_the_loss_is_that_of_a_plain_loop(given: Make) -> None:
    """The mean error of velocities over the same latents, levels and noise, with AdamW on all weights."""
    config = given(singles(), SFT, "optimize.updates_per_epoch=1")
    context = prepare(config)
    host = session_of(context).host
    for epoch in (1, 2):
        run_stage(context, "advantage", epoch)
    losses, section = [], config.optimize
    trainable = cast(Any, host.fresh())
    optimizer = torch.optim.AdamW(
        trainable.parameters(), section.learning_rate, section.betas, section.epsilon, section.weight_decay
    )
    for epoch in (1, 2):
        data = given_data(context, epoch)
        samples = data.samples(host)
        (units,) = data.plan(samples)
        rows = cast(Any, samples.batch(units, len(units.rows)))
        velocity = trainable.policy.velocity(rows.latents, rows.grid.sigma, rows.conditioning)
        loss = (velocity - (rows.noise - rows.clean)).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable.parameters(), section.max_grad_norm)
        optimizer.step()
    again = prepare(config)
    for epoch in (1, 2):
        run_epoch(again, epoch)
    found = [updates_of(again, epoch)[0]["loss"] for epoch in (1, 2)]
    assert found == pytest.approx(losses, rel=1e-5)


BUCKETS = ((16, 32), (24, 24), (32, 16))
SHAPES = [(40, 24), (30, 30), (20, 44), (41, 20), (33, 30), (24, 48)]


def shaped(key: str, seed: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f'"{n:02d}"', key: picture(seed + n, size)} for n, size in enumerate(SHAPES)]


@pytest.mark.slow
def test_images_of_several_sizes_train_in_buckets(given: Make, tmp_path: Path) -> None:
    """Nothing is stretched, micro-batches have one size, and neither ranks' batches nor a resume change the result."""
    sizes = {"buckets": BUCKETS, "rows_per_shard": 4}
    context = prepare(given(shaped("image"), SFT, **sizes))
    found = samples_of(context)
    assert [media.shape[:2] for _, _, media in found] == [(16, 32), (24, 24), (32, 16), (16, 32), (24, 24), (32, 16)]
    for (_, latents, media), row in zip(found, shaped("image"), strict=True):
        height, width = media.shape[:2]
        assert latents.shape[-2:] == (height // 2, width // 2)
        fitted = np.asarray(ImageOps.fit(row["image"], (width, height), Image.Resampling.LANCZOS))
        assert np.array_equal(fitted, media)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    few = [f"store.root={tmp_path / 'few'}", "execution.micro_batch_size=4"]
    single = prepare(given(shaped("image"), SFT, *few, **sizes))
    for epoch in (1, 2):
        run_epoch(single, epoch)
    updates = [updates_of(each, 2) for each in (context, single)]
    for ours, theirs in zip(*updates, strict=True):
        assert ours["rows"] == theirs["rows"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    once = prepare(given(shaped("image"), SFT, f"store.root={tmp_path / 'once'}"))
    assert once.chain.ref(Node(0, "ingest")) != context.chain.ref(Node(0, "ingest"))


def test_buckets_that_the_model_cannot_make_are_refused(given: Make) -> None:
    with pytest.raises(ConfigError, match=r"data.buckets \[16, 33\]: .*width"):
        check_config(given(singles(), buckets=((16, 33),)), rewards=False)


def test_both_images_of_a_pair_get_the_size_of_the_chosen_one(given: Make) -> None:
    rows = [{**row, "rejected": picture(50 + n, (30, 31))} for n, row in enumerate(shaped("chosen"))]
    context = prepare(given(rows, "dpo", buckets=BUCKETS, chosen="chosen", rejected="rejected"))
    media = [media.shape for _, _, media in samples_of(context)]
    assert media[::2] == media[1::2]
    assert len(set(media)) == len(BUCKETS)
    run_epoch(context, 1)
    assert updates_of(context, 1)[0]["grad_norm"] > 0


def test_a_changed_sample_makes_ingest_stale_and_a_moved_one_does_not(given: Make, tmp_path: Path) -> None:
    context = prepare(given(singles()))
    run_epoch(context, 1)
    moved = open_run(context.store.root.uri, "small")
    assert status_of(moved.chain, Node(1, "optimize")).state is Freshness.FRESH
    changed = singles()
    changed[0]["image"] = picture(50)
    write_jsonl(tmp_path / "given", changed)
    stale = open_run(context.store.root.uri, "small")
    assert status_of(stale.chain, Node(1, "optimize")).state is Freshness.STALE


@pytest.mark.parametrize("changed", ["given", "heldout"])
def test_a_finished_run_goes_on_if_its_samples_change(given: Make, tmp_path: Path, changed: str) -> None:
    rows = {"given": singles(), "heldout": [{"prompt": '"77"', "image": picture(70)}]}
    config = given(rows["given"], heldout=str(write_jsonl(tmp_path / "heldout", rows["heldout"])))
    context = begin_run(config)
    mark_finished(context, {"text": "done"})
    assert finished_result(RunContext(context.store, config, context.run)) == {"text": "done"}
    rows[changed][0]["image"] = picture(50)
    write_jsonl(tmp_path / changed, rows[changed])
    assert finished_result(RunContext(context.store, config, context.run)) is None


@pytest.mark.parametrize(
    ("algorithm", "rows", "message"),
    [
        ("dpo", rated(), "no prompt has two samples of different ratings, and optimize.algorithm 'dpo' compares"),
        ("dpo", [{**row, "prompt": '"00"', "stars": 5} for row in rated()], "no prompt has two samples of different"),
        ("kto", [{**row, "stars": 3} for row in rated()], "all ratings are neutral .* 'kto' learns nothing"),
        ("sft", [{**row, "stars": 3} for row in rated()], "no sample is chosen or rated above .* 'sft' trains on such"),
        ("sft", [{**row, "stars": 1} for row in rated()], "no sample is chosen or rated above .* 'sft' trains on such"),
    ],
)
def test_ratings_that_train_nothing_are_refused(
    given: Make, algorithm: str, rows: list[dict[str, Any]], message: str
) -> None:
    context = prepare(given(rows, algorithm, rating="stars", scale=(1, 5)))
    with pytest.raises(DataError, match=message):
        run_epoch(context, 1)
    context = prepare(given(rows, algorithm, "run.name=parts", rating="stars", scale=(1, 5), groups_per_epoch=2))
    reported: list[str] = []
    context.reporter.message = reported.append  # type: ignore[method-assign]
    run_epoch(context, 1)
    assert re.search(f"epoch 1: data.train: {message}.* Other epochs", "\n".join(reported))


def test_ratings_without_a_pair_are_refused_after_a_run_that_can_use_them(given: Make) -> None:
    """The two algorithms share the artifact of advantages."""
    run_epoch(prepare(given(rated(), "kto", "run.name=other", rating="stars", scale=(1, 5))), 1)
    context = prepare(given(rated(), "dpo", rating="stars", scale=(1, 5)))
    with pytest.raises(DataError, match="no prompt has two samples of different ratings"):
        run_epoch(context, 1)


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG file that claims a size."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(bytes(1000))
    chunks = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in (head, data)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def text_bomb() -> bytes:
    """Return a PNG file with a text that grows to 256 MiB."""
    about = PngInfo()
    about.add_text("a", "x" * (1 << 28), zip=True)
    return png(picture(1), pnginfo=about)


BAD_FILES: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "bomb": (bomb(9_000, 9_000), "has 81,000,000 pixels, more than"),
    "larger bomb": (bomb(2**31 - 1, 2**31 - 1), "pixels"),
    "no size": (bomb(0, 5), "cannot be read as an image or clip"),
    "text bomb": (text_bomb, "cannot be read as an image or clip"),
    "several pages": (
        png(picture(1), format="TIFF", save_all=True, append_images=[picture(2), picture(3)]),
        "animation of 3 frames",
    ),
    "moving": (png(picture(1), format="WEBP", save_all=True, append_images=[picture(2)]), "animation of 2 frames"),
    "half a JPEG": (png(picture(1, (200, 200)), format="JPEG")[:4000], "cannot be read as an image or clip"),
    "no brightness": (png(Image.fromarray(np.full((4, 4), -1.0, np.float32)), format="TIFF"), "no brightness"),
    "program": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read as an image or clip"),
    "animation": (png(picture(1), format="GIF", save_all=True, append_images=[picture(2)]), "animation of 2 frames"),
}


@pytest.mark.slow_cases("half a JPEG")
@pytest.mark.parametrize("kind", list(BAD_FILES))
def test_a_file_that_cannot_be_decoded_is_named_or_left_out(given: Make, tmp_path: Path, kind: str) -> None:
    data, message = BAD_FILES[kind]
    config = given(singles())
    (tmp_path / "given" / "2-image.png").write_bytes(data() if callable(data) else data)
    with pytest.raises(DataError, match=f"line 3: 2-image.png .*{message}"):
        prepare(config)
    context = prepare(given(config.data.train if config.data else "", bad_rows="leave_out"))
    ref = context.chain.ref(Node(0, "ingest"))
    assert context.store.require(ref).summary == {"rows": 6, "refused": 1, "samples": 5}
    ((place, reason),) = ingested_figures(context.store, ref, data_of(context.config)).refused
    assert place.endswith("line 3")
    assert not re.search("0x[0-9a-f]", reason), "the bytes of the artifact depend on no process"


def test_a_dataset_begins_after_a_shard_without_samples(given: Make, tmp_path: Path) -> None:
    config = given(singles(), bad_rows="leave_out", rows_per_shard=1)
    (tmp_path / "given" / "0-image.png").write_bytes(b"")
    context = prepare(config)
    assert next(iter(context.store.shards(context.chain.ref(Node(0, "ingest"))))).rows == 0
    assert len(list(flowmill.open(context.store.root.uri).run("small").dataset(0))) == 5


def test_a_pair_of_equal_pictures_is_named_or_left_out(given: Make, tmp_path: Path) -> None:
    """Files of other bytes that show the same."""
    columns = {"chosen": "chosen", "rejected": "rejected"}
    config = given(pairs(), "dpo", **columns)
    same = picture(2).convert("RGBA")
    same.save(tmp_path / "given" / "2-rejected.png", compress_level=1)
    with pytest.raises(DataError, match="line 3: chosen and rejected sample are equal, as the model sees them"):
        prepare(config)
    context = prepare(given(config.data.train if config.data else "", "dpo", bad_rows="leave_out", **columns))
    assert context.store.require(context.chain.ref(Node(0, "ingest"))).summary["refused"] == 1


@pytest.mark.parametrize("mode", ["CMYK", "L", "I;16", "P", "RGBA", "rotated"])
def test_images_of_every_mode_are_taken_as_they_are_seen(given: Make, tmp_path: Path, mode: str) -> None:
    rows = singles()
    config = given(rows)
    plain = picture(2, mode="L")
    target = tmp_path / "given" / "2-image.png"
    if mode == "CMYK":
        plain.convert("CMYK").save(target, "JPEG", quality=95)
    elif mode == "I;16":
        Image.fromarray(np.asarray(plain).astype(np.uint16) * 257).save(target)
    elif mode == "rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        plain.transpose(Image.Transpose.ROTATE_90).save(target, "JPEG", quality=95, exif=exif)
    else:
        plain.convert(mode).save(target)
    _, _, media = samples_of(prepare(config))[2]
    expected = np.asarray(plain.convert("RGB").crop((0, 2, 40, 22)).resize((32, 16), 1)).astype(int)
    assert np.abs(expected - media.astype(int)).mean() < 12


def test_stages_of_the_other_way_to_train_are_not_there(given: Make, make_config: Make) -> None:
    context = prepare(given(singles()))
    assert not context.chain.has(Node(1, "rollout"))
    with pytest.raises(ConfigError, match="belongs to rollouts, but the config trains on the samples"):
        make_stage(context, "rollout", 1)
    with pytest.raises(ConfigError, match="no section 'data'"):
        make_stage(begin_run(make_config("run.name=plain")), "ingest", 0)


TEXT_ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b), "wrong": str(a + b + 1)} for a in (1, 2) for b in (3, 4)]


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "apo_zero"])
def test_texts_are_trained_on(tmp_path: Path, algorithm: str) -> None:
    columns = {
        "sft": {"sample": "completion"},
        "dpo": {"chosen": "completion", "rejected": "wrong"},
        "kto": {"sample": "completion", "rating": "good"},
        "apo_zero": {"sample": "completion", "rating": "good"},
    }[algorithm]
    rows = [{**row, "good": number % 2} for number, row in enumerate(TEXT_ROWS)]
    data = texts_data(tmp_path)
    data["data"] = {"train": str(write_jsonl(tmp_path / "given", rows)), **columns}
    data["prompts"] = {"heldout": data["prompts"]["heldout"]}
    data["optimize"] = {"learning_rate": 1e-3, "algorithm": algorithm, "updates_per_epoch": 1}
    config = parse_config(data, where="here")
    check_config(config)
    context = prepare(config)
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
    updates = [updates_of(context, epoch)[0] for epoch in (1, 2, 3)]
    assert updates[-1]["loss"] < updates[0]["loss"]
    # The policy is its base at first.
    assert ("reference_point" in updates[0]) == (algorithm == "kto")
    assert updates[0].get("reference_point", 0.0) == pytest.approx(0.0, abs=1e-6)
    shard = stored_shards(context, 0, "ingest")[0]
    tokenizer = cast(Any, session_of(context).host.trainable(context.policy_ref(0))).policy.tokenizer
    tokens, mask = shard.array("tokens", 0), shard.array("token_mask", 0).astype(bool)
    assert tokenizer.decode(tokens[mask][:-1]) == "4"
    assert tokens[-1] == tokenizer.eos_token_id


def test_texts_after_the_prompts_of_others(tmp_path: Path) -> None:
    rows = [{**row, "good": number % 2} for number, row in enumerate(TEXT_ROWS)]
    data = texts_data(tmp_path)
    columns = {"sample": "completion", "rating": "good"}
    data["data"] = {"train": str(write_jsonl(tmp_path / "given", rows)), **columns}
    data["prompts"] = {"heldout": data["prompts"]["heldout"]}
    data["optimize"] = {"algorithm": "kto", "updates_per_epoch": 1}
    context = prepare(parse_config(data, where="here"))
    run_stage(context, "advantage", 1)
    host, made = session_of(context).host, given_data(context, 1)
    samples = made.samples(host)
    (units,) = made.plan(samples)
    samples.begin_update(units)
    samples.pair_prompts(units)
    tokenizer = cast(Any, host.trainable(context.policy_ref(0))).policy.tokenizer

    def read(batch: Any) -> list[tuple[str, str]]:
        found = zip(batch.ids, batch.mask, strict=True)
        return [(tokenizer.decode(ids[: int(mask.int().argmax())]), tokenizer.decode(ids[mask])) for ids, mask in found]

    own, other = (read(samples.batch(units, 4)), read(samples.mismatched(units, 4)))
    ends = (tokenizer.bos_token, tokenizer.eos_token)
    assert sorted(own) == sorted((ends[0] + row["prompt"], row["completion"] + ends[1]) for row in TEXT_ROWS)
    assert other == [(own[(number + 1) % 4][0], text) for number, (_, text) in enumerate(own)]


def test_a_text_that_is_too_long_is_named(tmp_path: Path) -> None:
    rows = [*TEXT_ROWS, {"prompt": "9+9=", "completion": "18" * 20, "wrong": "1"}]
    data = texts_data(tmp_path)
    data["data"] = {"train": str(write_jsonl(tmp_path / "given", rows)), "sample": "completion"}
    data["prompts"] = {"heldout": data["prompts"]["heldout"]}
    data["optimize"] = {"algorithm": "sft"}
    with pytest.raises(DataError, match=r"line 5, completion: it has 41 tokens, but rollout.tokens.max_new is 4"):
        prepare(parse_config(data, where="here"))


def test_everything_that_reads_a_run_shows_given_samples(given: Make, tmp_path: Path) -> None:
    context = prepare(given(pairs(), "dpo", "run.epochs=1", chosen="chosen", rejected="rejected", groups_per_epoch=4))
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    run_stage(context, "export", 1)
    run = flowmill.open(context.store.root.uri).run("small")
    table = run.samples(1)
    assert (table.num_rows, run.rollouts) == (8, [1])
    assert sorted(table["advantage"].to_pylist()) == [-1.0] * 4 + [1.0] * 4
    sample = table["sample_id"][0].as_py()
    assert run.images(1, [sample])[sample].size == (32, 16)
    assert len(run.decoded(1, sample)) == 1
    assert run.trajectories(1).num_rows == 2 * len(pairs())
    traced = run.trace(1, sample)["runs"]["small"]
    assert {update["epoch"] for update in traced["updates"]} == {1}
    assert traced["given"]["rating"] == table["reward"][0].as_py()
    assert "rows.jsonl, line" in traced["given"]["row"]
    assert export_run(context, tmp_path / "table", "parquet", epochs=[1], progress=lambda done, total: None) == 8
    assert len(list(run.stream(1))) == len(list(run.dataset(1))) == 2 * len(pairs())
    assert "optimize/loss" in set(run.curves()["key"].to_pylist())
    page = run_report(context)
    assert "dpo" in page
    assert describe_run(context)["finished_epochs"] == 1
    assert "trains" in description(context, done=True)
