"""Given images in several ways: crops, mirrored images, captions, repeats, and images of ``data.prior``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError
from flowmill.configs.load import load_config
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.choices.given import drawn_variants, epoch_groups
from flowmill.tasks.inputs.data_file import DataFile
from flowmill.tasks.inputs.data_rows import DataRows, read_data_rows
from flowmill.tasks.inputs.prompts import Prompt
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.modalities.data_images import read_media
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.media import trial_media
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from flowmill.tasks.runs.seeds import drawn
from flowmill.tasks.specs.graph import HELD_OUT, Node
from tests.conftest import ROOT
from tests.support.given import given_data, pairs, picture, singles, write_jsonl
from tests.support.inside import (
    prepare,
    run_epoch,
    run_stage,
    session_of,
    stage_run,
    updates_of,
)
from tests.tasks.stages.test_given import SFT, Make, given, samples_of

__all__ = ["given"]
PAIRED = {"chosen": "chosen", "rejected": "rejected"}
CAPTIONS = {"captions": "several", "empty_captions": 0.25}


def variants_of(context: RunContext) -> list[dict[str, Any]]:
    return list(read_rows(context.store, context.chain.ref(Node(0, "ingest")), "variants").to_pylist())


def trained(context: RunContext, epoch: int) -> dict[str, list[Any]]:
    """Return the columns of the samples that an epoch trains."""
    run_stage(context, "advantage", epoch)
    columns: dict[str, list[Any]] = read_rows(context.store, context.chain.ref(Node(epoch, "advantage"))).to_pydict()
    return columns


def test_crops_and_mirrored_images_are_encoded_once_and_an_epoch_trains_one_of_each(given: Make) -> None:
    context = prepare(given(singles(), crop="random", windows=3, flip=True))
    media = [each for _, _, each in samples_of(context)]
    assert len(media) == 6 * 3 * 2
    for number, row in enumerate(singles()):
        plain, mirrored = media[6 * number : 6 * number + 6 : 2], media[6 * number + 1 : 6 * number + 6 : 2]
        for place, (first, second) in enumerate(zip(plain, mirrored, strict=True)):
            window = tuple(drawn("window", number, place).random(2).tolist())
            expected = ImageOps.fit(row["image"], (32, 16), Image.Resampling.LANCZOS, centering=window)
            assert np.array_equal(first, np.asarray(expected))
            assert np.array_equal(second, first[:, ::-1])
        assert len({each.tobytes() for each in plain}) == 3
    latents = [each for _, each, _ in samples_of(context)]
    assert not np.array_equal(latents[0], latents[1])
    views = {each["sample_id"]: (each["row"], each["view"]) for each in variants_of(context)}
    seen = [[views[name] for name in trained(context, epoch)["sample_id"]] for epoch in (1, 2)]
    assert all([row for row, _ in each] == list(range(6)) for each in seen)
    assert seen[0] != seen[1]
    shown = RunView(context).samples(1)
    assert shown["sample_id"].to_pylist() == trained(context, 1)["sample_id"]
    assert RunView(context).ingested() is not None
    assert cast(Any, RunView(context).ingested()).rows == 6


@pytest.mark.parametrize("count", [1, 5])
def test_all_frames_of_a_clip_are_cropped_and_mirrored_alike(tmp_path: Path, count: int) -> None:
    config = load_config(ROOT / "configs" / "tiny_wan22.yaml", [f"model.frames={count}"])
    making = cast(Any, SimpleNamespace(config=config.model_copy(update={"data": DataSection(train="x.jsonl")})))
    frames = [picture(number, (100, 40)) for number in range(5)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=100)
    data, file = (tmp_path / "clip.gif").read_bytes(), DataFile(name="clip")

    def seen(window: tuple[float, float], *, mirrored: bool) -> np.ndarray:
        place: dict[str, Any] = {"name": "d", "group": "d", "first": file, "replica": 0, "prompt": Prompt(text="q")}
        return read_media(making, DataSample(file=file, **place, window=window, mirrored=mirrored), data)

    left, right = seen((0.0, 0.5), mirrored=False), seen((1.0, 0.5), mirrored=False)
    assert left.shape == (count, config.model.height, config.model.width, 3) == trial_media(config)[0].shape
    assert all(not np.array_equal(first, second) for first, second in zip(left, right, strict=True))
    assert np.array_equal(seen((0.0, 0.5), mirrored=True), left[:, :, ::-1])


def test_crops_of_an_image_of_the_models_shape_are_encoded_once(given: Make) -> None:
    rows = [{"prompt": f"q{number}", "image": picture(number, (64, 32))} for number in range(3)]
    context = prepare(given(rows, crop="random", flip=True))
    assert [each["view"] for each in variants_of(context)] == [0, 1] * 3


def test_views_and_draws_depend_on_no_shard_and_no_restart(given: Make, tmp_path: Path) -> None:
    section = {"crop": "random", "flip": True, **CAPTIONS}
    rows = [{**row, "prompt": [row["prompt"], f"other {row['prompt']}"]} for row in singles()]
    whole = prepare(given(rows, SFT, f"store.root={tmp_path / 'whole'}", **section))
    run_epoch(whole, 1)
    context = begin_run(given(rows, SFT, **section))
    for name in ("base", "encode", "preprocess"):
        run_stage(context, name, 0)
    stage = stage_run(context, "ingest", 0)
    stage.run_shard(stage.pending()[1])
    again = prepare(given(rows, SFT, **section, rows_per_shard=5))
    run_epoch(again, 1)
    assert again.chain.digest() == whole.chain.digest()
    other = prepare(given(rows, SFT, "run.seed=5", "run.name=other", **section))
    assert other.chain.ref(Node(0, "ingest")) == again.chain.ref(Node(0, "ingest"))
    assert trained(other, 1) != trained(again, 1)


def test_a_pair_is_cropped_and_mirrored_alike_and_has_one_caption(given: Make) -> None:
    rows = [{**row, "prompt": f"{row['prompt']}\nother"} for row in pairs()]
    context = prepare(given(rows, "dpo", **PAIRED, **CAPTIONS, crop="random", windows=2, flip=True))
    media = dict(zip((each["sample_id"] for each in variants_of(context)), samples_of(context), strict=True))
    names = trained(context, 1)
    assert names["advantage"] == [1.0, -1.0] * 6
    assert names["prompt_id"][::2] == names["prompt_id"][1::2]
    views = {each["sample_id"]: each["view"] for each in variants_of(context)}
    drawn_views = [views[name] for name in names["sample_id"]]
    assert drawn_views[::2] == drawn_views[1::2]
    window = tuple(drawn("window", 0, drawn_views[0] // 2).random(2).tolist())
    for name, key in zip(names["sample_id"], PAIRED, strict=False):
        expected = np.asarray(ImageOps.fit(pairs()[0][key], (32, 16), Image.Resampling.LANCZOS, centering=window))
        assert np.array_equal(media[name][2], expected[:, ::-1] if drawn_views[0] % 2 else expected)
    run_epoch(context, 1)
    assert updates_of(context, 1)[0]["grad_norm"] > 0


def test_draws_have_the_shares_that_settings_name() -> None:
    rows = [
        {"row": row, "view": view, "captions": ["a", "b", "c"], "empty": "-"} for row in range(500) for view in range(2)
    ]
    views, prompts = Counter[int](), Counter[str]()
    for epoch in range(1, 9):
        numbers, found = drawn_variants(rows, empty=0.1, seed=3, epoch=epoch)
        assert [rows[number]["row"] for number in numbers] == list(range(500))
        views.update(number % 2 for number in numbers)
        prompts.update(found)
    # Four standard deviations of 4,000 draws.
    assert views[1] / 4000 == pytest.approx(0.5, abs=0.032)
    assert prompts["-"] / 4000 == pytest.approx(0.1, abs=0.019)
    assert [prompts[name] / 4000 for name in "abc"] == pytest.approx([0.3] * 3, abs=0.029)
    assert drawn_variants(rows, empty=0.0, seed=3, epoch=1)[1].count("-") == 0
    assert drawn_variants(rows, empty=0.1, seed=3, epoch=1) != drawn_variants(rows, empty=0.1, seed=4, epoch=1)


def test_an_epoch_has_as_many_rows_of_prior_as_of_its_own() -> None:
    own, prior = [f"d{number}" for number in range(4)], [f"p{number}" for number in range(6)]
    seen = [epoch_groups(own, prior, 2, seed=0, epoch=epoch) for epoch in (1, 2, 3)]
    assert all([name[0] for name in each] == ["d", "d", "p", "p"] for each in seen)
    assert {name for each in seen for name in each if name in prior} == {*prior}
    assert epoch_groups(own, [], None, seed=0, epoch=1) == epoch_groups(own, prior, None, seed=0, epoch=1)[:4]
    assert len(epoch_groups(own, prior[:1], None, seed=0, epoch=1)) == 5


@pytest.mark.parametrize("form", ["list", "lines"])
def test_rows_train_with_the_caption_that_was_drawn_or_without_one(given: Make, form: str) -> None:
    texts = [[row["prompt"], f"a {row['prompt']}", f"the {row['prompt']}"] for row in singles()]
    rows: list[dict[str, Any]] = [
        {"prompt": each if form == "list" else "\n".join([*each, ""]), "image": row["image"]}
        for each, row in zip(texts, singles(), strict=True)
    ]
    context = prepare(given(rows, SFT, "model.guidance_scale=3", **CAPTIONS))
    assert [each["captions"] for each in variants_of(context)] == [[Prompt(text=t).id for t in each] for each in texts]
    names = {Prompt(text=text).id: text for each in texts for text in each} | {Prompt(text="").id: ""}
    found = [[names[each] for each in trained(context, epoch)["prompt_id"]] for epoch in (1, 2, 3, 4)]
    assert len({text for each in found for text in each} - {""}) > 6
    assert "" in {text for each in found for text in each}
    assert "" not in {prompt.text for prompt in context.prompts["train"]}, "evaluations have captions"
    shown = RunView(context).samples(2)
    assert shown["prompt"].to_pylist() == found[1]
    host, data = session_of(context).host, given_data(context, 2)
    samples = data.samples(host)
    (units,) = data.plan(samples)[:1]
    batch = cast(Any, samples.batch(units, len(units.rows)))
    numbers = units.rows[:, 0].tolist()
    encoded = context.embeddings.load([found[1][number] for number in numbers]).arrays
    assert encoded
    for name, array in encoded.items():
        torch.testing.assert_close(batch.conditioning.positive[name], torch.from_numpy(array))


def test_the_loss_of_prior_rows_is_multiplied(given: Make, tmp_path: Path) -> None:
    prior = [{"prompt": f"thing {n}", "image": picture(70 + n)} for n in range(4)]
    source = str(write_jsonl(tmp_path / "prior", prior))
    norms = {}
    for weight in (1.0, 0.25):
        name = f"run.name=prior-{int(100 * weight)}"
        more: dict[str, Any] = {"groups_per_epoch": 3, "prior": {"train": source, "weight": weight}}
        context = prepare(given(singles(), SFT, name, "optimize.updates_per_epoch=1", **more))
        assert check_config(context.config).samples_per_epoch == 6
        columns = trained(context, 1)
        assert sorted(columns["advantage"]) == [weight] * 3 + [1.0] * 3
        host, data = session_of(context).host, given_data(context, 1)
        samples = data.samples(host)
        (units,) = data.plan(samples)
        rows = cast(Any, samples.batch(units, len(units.rows)))
        trainable = cast(Any, host.fresh())
        velocity = trainable.policy.velocity(rows.latents, rows.grid.sigma, rows.conditioning)
        errors = (velocity - (rows.noise - rows.clean)).square().flatten(1).mean(1)
        factors = torch.tensor([columns["advantage"][number] for number in units.rows[:, 0].tolist()])
        (errors * factors).mean().backward()
        norm = float(
            torch.nn.utils.get_total_norm([each.grad for each in trainable.parameters() if each.grad is not None])
        )
        for parameter in trainable.parameters():
            parameter.grad = None
        run_epoch(context, 1)
        update = updates_of(context, 1)[0]
        assert update["grad_norm"] == pytest.approx(norm, rel=1e-4)
        norms[weight] = norm
    assert norms[0.25] < norms[1.0]


def folders(root: Path, names: dict[str, int]) -> str:
    """Write images into folders, without texts, and return the path."""
    for start, (name, count) in enumerate(names.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            picture(10 * start + number).save(root / name / f"{number}.png")
    return str(root)


def read(source: str, **section: Any) -> DataRows:
    return read_data_rows(DataSection(train=source, **section))


def test_folders_say_how_often_their_images_count(tmp_path: Path) -> None:
    source = folders(tmp_path / "kohya", {"3_my dog": 1, "1_a dog": 2})
    (tmp_path / "kohya" / "1_a dog" / "0.txt").write_text("a dog in the sun")
    found = read(source, repeats="folders")
    assert [row.text for row in found.rows] == ["a dog in the sun", "a dog", *["my dog"] * 3]
    assert [prompt.text for prompt in found.prompts] == ["a dog in the sun", "a dog", "my dog"]
    assert found.identity != read(source, repeats="folders", bad_rows="leave_out", heldout=None).identity[::-1]
    table = write_jsonl(tmp_path / "rows", singles())
    assert [len(read(str(table), **each).rows) for each in ({}, {"repeats": 2})] == [6, 12]
    assert read(str(table), repeats=2).identity != read(str(table)).identity == read(str(table), repeats=1).identity
    with pytest.raises(DataError, match=r"its folder 'rows' does not begin with a number above 0 and '_'"):
        read(str(table), repeats="folders")


def test_each_setting_changes_what_is_trained_and_none_changes_held_out_rows(given: Make, tmp_path: Path) -> None:
    heldout = str(write_jsonl(tmp_path / "heldout", [{"prompt": '"77"', "image": picture(70)}]))
    prior = str(write_jsonl(tmp_path / "prior", [{"prompt": "thing", "image": picture(71)}]))
    settings: list[dict[str, Any]] = [
        {},
        {"flip": True},
        {"crop": "random"},
        {"crop": "random", "windows": 3},
        {"captions": "several"},
        {"empty_captions": 0.1},
        {"empty_captions": 0.2},
        {"repeats": 2},
        {"prior": {"train": prior}},
        {"prior": {"train": prior, "weight": 0.5}},
    ]
    ids, apart = [], set()
    for number, section in enumerate(settings):
        context = begin_run(given(singles(), SFT, f"run.name=run-{number}", heldout=heldout, **section))
        ids.append([str(context.chain.ref(Node(epoch, name))) for epoch, name in ((0, "ingest"), (1, "advantage"))])
        apart.add(str(context.chain.ref(Node(0, "ingest", HELD_OUT))))
    assert len(apart) == 1
    assert len({each for _, each in ids}) == len(settings)
    # The share of captions and the weight are no part of what is encoded.
    assert ids[5][0] == ids[6][0]
    assert ids[8][0] == ids[9][0]
