from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from flowmill.configs.errors import CorruptError, PromptError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.load import load_config
from flowmill.configs.schema import PromptsSection
from flowmill.storage.backends.checksums import hash_data, hash_file
from flowmill.storage.trajectories.media import MediaFormat
from flowmill.tasks.inputs.model_settings import check_reference_images
from flowmill.tasks.inputs.prompt_rows import frames_of, picture_of, read_clip, read_picture
from flowmill.tasks.inputs.prompts import Prompt, image_files, image_keys, prompt_set, read_prompts
from flowmill.tasks.inputs.source_prompts import prompts_fingerprint
from flowmill.tasks.specs.plan import RunPlan
from tests.conftest import ROOT

PROMPT_FILES = (".txt", ".jsonl", ".parquet", ".csv", ".tsv")
SHARED = Path(__file__).parents[4] / "shared" / "data" / "prompts"


def read(path: Path | str, column: str = "prompt") -> list[Prompt]:
    return read_prompts(str(path), PromptsSection(train=str(path), column=column), where="prompts.train")


def test_files_of_every_kind_give_the_same_prompts(tmp_path: Path) -> None:
    texts = ["a cat", 'a sign that says "hi"', "ein Hündchen"]
    (tmp_path / "p.txt").write_text("\n".join(texts) + "\n\n", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "p.parquet")
    quoted = ["a cat", '"a sign that says ""hi"""', "ein Hündchen"]
    (tmp_path / "p.csv").write_text("prompt\n" + "\n".join(quoted) + "\n\n", encoding="utf-8-sig")
    (tmp_path / "p.tsv").write_text("prompt\r\n" + "\r\n".join(texts), encoding="utf-8")
    lists = [read(tmp_path / f"p{ending}") for ending in PROMPT_FILES]
    assert [prompt.text for prompt in lists[0]] == texts
    assert all(each == lists[0] for each in lists)


ROWS = [{"prompt": "a, b", "answer": "1", "note": ""}, {"prompt": "c\nd", "answer": "2", "note": 'says "x"'}]


def saved(folder: Path, rows: list[dict[str, Any]] = ROWS, **how: Any) -> Path:
    """Return a folder that ``save_to_disk`` wrote."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder, **how)
    return folder


def test_columns_of_every_kind_of_file_are_the_same_metadata(tmp_path: Path) -> None:
    for ending, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (tmp_path / f"p{ending}").open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(ROWS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    both = saved(tmp_path / "saved", num_shards=2)
    lists = [read(tmp_path / f"p{ending}") for ending in PROMPT_FILES if ending != ".txt"] + [read(both)]
    assert [(each.text, each.metadata["answer"]) for each in lists[0]] == [("a, b", "1"), ("c\nd", "2")]
    assert all(each == lists[0] for each in lists)


def test_a_saved_dataset_is_read_by_split_and_again_when_it_changes(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"first": rows.select([0]), "rest": rows.select([1])}).save_to_disk(tmp_path / "both")
    source = str(tmp_path / "both")
    (prompt,) = read_prompts(source, PromptsSection(train=source, split="rest"), where="prompts.train")
    assert prompt.text == "c\nd"
    assert [each.text for each in read(tmp_path / "both" / "first")] == ["a, b"]
    with pytest.raises(PromptError, match=r"has no split 'train'; it has first, rest. Set prompts.split, or name"):
        read(source)
    one = saved(tmp_path / "one")
    assert len(read(one)) == 2
    shutil.rmtree(one)
    assert len(read(saved(tmp_path / "one", ROWS[:1]))) == 1
    section = PromptsSection(train=str(one), heldout="owner/name")
    assert (prompt_set(section, "train"), prompt_set(section, "heldout")) == ("one", "owner/name")


def test_images_of_separated_values_and_saved_datasets_are_files_beside_them(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "image": "x.png"}]
    saved(tmp_path / "saved", rows)
    (tmp_path / "p.csv").write_text("prompt,image\na,x.png\n")
    for number, (folder, source) in enumerate([(tmp_path / "saved", "saved"), (tmp_path, "p.csv")]):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / "x.png")
        section = PromptsSection(train=str(tmp_path / source), image="image")
        (prompt,) = read_prompts(str(tmp_path / source), section, where="prompts.train")
        assert prompt.images == (folder / "x.png",)
        assert set(prompt.metadata) == {"image_xxh3"}


def spoil(folder: Path, how: str) -> None:
    state = folder / "state.json"
    data = json.loads(state.read_text())
    if how == "leads out":
        data["_data_files"] = [{"filename": "../secret.arrow"}]
    elif how == "indices":
        data["_indices_data_files"] = [{"filename": "indices.arrow"}]
    elif how == "nameless":
        data = {"_data_files": "x"}
    state.write_text({"deep": "[" * 100_000, "large": "1" + " " * (1 << 22)}.get(how, json.dumps(data)))
    (arrow,) = folder.glob("*.arrow")
    if how == "broken":
        arrow.write_bytes(arrow.read_bytes()[:100])
    elif how == "missing":
        arrow.unlink()
    elif how == "linked out":
        arrow.rename(folder.parent / "elsewhere.arrow")
        arrow.symlink_to(folder.parent / "elsewhere.arrow")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("leads out", "names no data files: '../secret.arrow' is no name, but a path"),
        ("linked out", "names no data files: .* is a link that leads out of"),
        ("indices", "was saved with indices by an early version"),
        ("nameless", "names no data files"),
        ("deep", "state.json' cannot be read"),
        ("large", "holds no JSON object of up to 4194304 bytes"),
        ("broken", "cannot be read as an Arrow stream"),
        ("missing", "does not exist, but 'state.json' next to it names it"),
    ],
)
def test_a_broken_saved_dataset_is_one_message(tmp_path: Path, how: str, said: str) -> None:
    spoil(saved(tmp_path / "saved"), how)
    with pytest.raises(PromptError, match=said) as error:
        read(tmp_path / "saved")
    assert "saved" in str(error.value)
    assert len(str(error.value)) < 1000


def test_other_columns_become_metadata_and_count(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a", "count": 2}\n{"text": "a", "count": 3}\n')
    prompts = read(tmp_path / "p.jsonl", column="text")
    assert [prompt.metadata for prompt in prompts] == [{"count": 2}, {"count": 3}]
    assert prompts[0].id != prompts[1].id


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("no.txt", None, r"no\.txt' does not exist"),
        ("p.txt", "", "holds no prompts"),
        ("p.txt", "\n\n", "holds no prompts"),
        ("p.txt", "a\n\nb\n", "line 2: the prompt is empty"),
        ("p.txt", "a\nb\na\n", "'a' appears twice: .*line 1 and .*line 3"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("p.jsonl", '["a"]\n', "line 1 holds list"),
        ("p.jsonl", '{"text": "a"}\n', "has no 'prompt'; it has text. Set prompts.column"),
        ("p.jsonl", '{"prompt": " "}\n', "line 1: the prompt is empty"),
        ("p.jsonl", '{"prompt": 3}\n', "line 1: the prompt is a number, not a text: 3"),
        ("p.jsonl", '{"prompt": ["a cat"]}\n', "line 1: the prompt is a list, not a text"),
        ("p.jsonl", '{"prompt": {"en": "a cat"}}\n', "line 1: the prompt is an object, not a text"),
        ("p.jsonl", '{"prompt": true}\n', "line 1: the prompt is a truth value, not a text"),
        ("p.jsonl", '{"prompt": null}\n', "line 1: the prompt is empty"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', "line 1: the prompt has half a character"),
        ("p.txt", "a\0 \0c\0", "line 1 holds NUL characters"),
        ("p.txt", "a\na\nb\na\nb\n", "3 rows cannot be used:\n.*line 2.*\n.*line 4.*\n.*'b' appears twice"),
        ("p.parquet", "not parquet", "not a Parquet file"),
        ("p.csv", "prompt\n", "holds no prompts"),
        ("p.csv", "", "holds no prompts"),
        ("p.csv", "text,n\na,1\n", r"p.csv, line 2 has no 'prompt'; it has text, n. Set prompts.column"),
        ("p.csv", 'prompt\n"a\nb"\n" "\n', "p.csv, line 4: the prompt is empty"),
        ("p.csv", "prompt,n\na,1\nb, c,2\n", "p.csv, line 3 has 3 values, but the header names 2 columns: prompt, n"),
        ("p.csv", "prompt,n\na\n", "line 2 has 1 values, but the header names 2 columns"),
        ("p.csv", "prompt,prompt\na,b\n", "line 1: the header names the column 'prompt' more than once"),
        ("p.csv", "prompt,\na,b\n", "line 1: the header has a column without a name"),
        ("p.csv", 'prompt\n"a" b\n', "p.csv, line 2 cannot be read: "),
        ("p.csv", 'prompt\na\n"b\n', "p.csv, line 3 cannot be read: unexpected end of data"),
        ("p.csv", "prompt\n" + "a" * 200_000, "line 2 cannot be read: field larger than field limit"),
        ("p.csv", "prompt\na\nb\na\n", "'a' appears twice: .*line 2 and .*line 4"),
        ("p.tsv", "prompt\na\0\n", "line 2 holds NUL characters"),
        ("no.tsv", None, r"no\.tsv' does not exist"),
    ],
)
def test_mistakes_say_where_and_what(tmp_path: Path, name: str, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=expected):
        read(tmp_path / name)


@pytest.mark.parametrize("source", ["./prompts", "a/b/c", "prompts.xlsx"])
def test_what_is_neither_file_nor_dataset_is_refused(source: str) -> None:
    with pytest.raises(PromptError, match="neither a"):
        read(source)


def test_identity_is_of_content_and_order() -> None:
    a, b = Prompt(text="a"), Prompt(text="b")
    assert prompts_fingerprint({"train": [a, b]}) == prompts_fingerprint({"train": [a, b]})
    assert prompts_fingerprint({"train": [a, b]}) != prompts_fingerprint({"train": [b, a]})
    for lists in ({}, {"train": []}, {"train": [a, b], "heldout": [b], "negative": []}):
        assert prompts_fingerprint(lists) == fingerprint({name: [each.id for each in lists[name]] for name in lists})


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published prompt sets are not beside this checkout")
def test_published_prompt_sets_are_read_or_refused_for_their_duplicates() -> None:
    assert len(read(SHARED / "yifan123+flow_grpo" / "dataset" / "ocr" / "test.txt")) > 1000
    with pytest.raises(PromptError, match="appears twice"):
        read(SHARED / "yifan123+flow_grpo" / "dataset" / "geneval" / "test_metadata.jsonl")


def with_images(tmp_path: Path, **rows: str) -> str:
    path = tmp_path / "edits.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "image": name}) + "\n" for text, name in rows.items()))
    return str(path)


def test_an_image_to_start_from_is_known_by_its_content(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "copy.png")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "b.png")
    section = PromptsSection(train="", image="image")
    first, same, other = (
        read_prompts(with_images(tmp_path, edit=name), section, where="prompts.train")[0]
        for name in ("a.png", "copy.png", "b.png")
    )
    assert first.images == (tmp_path / "a.png",)
    assert (first.id, first.condition) == (same.id, same.condition)
    assert first.id != other.id
    assert first.condition != other.condition
    assert "a.png" not in str(first.metadata)


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    section = PromptsSection(train="", image="image")
    for name, message in (("absent.png", "does not exist"), ("text.png", "is not an image"), ("", "has no 'image'")):
        with pytest.raises(PromptError, match=f"line 1.*{message}"):
            read_prompts(with_images(tmp_path, edit=name), section, where="prompts.train")


def test_a_film_is_for_models_that_start_from_clips(tmp_path: Path) -> None:
    film = np.repeat(np.uint8([10, 120, 240])[:, None, None, None], 3, axis=3)
    (tmp_path / "film.mp4").write_bytes(MediaFormat().encode(np.broadcast_to(film, (3, 32, 48, 3)).copy()))
    (tmp_path / "broken.mp4").write_bytes(bytes(4) + b"ftypisom" + bytes(100))
    section = PromptsSection(train="", image="image")
    with pytest.raises(PromptError, match=r"line 1.*is not an image: it holds no film"):
        read_prompts(with_images(tmp_path, edit="broken.mp4"), section, where="prompts.train")
    (prompt,) = read_prompts(with_images(tmp_path, edit="film.mp4"), section, where="prompts.train")
    assert read_clip(prompt.images[0], 2).shape == (2, 32, 48, 3)
    data, (key,) = prompt.images[0].read_bytes(), image_keys(prompt.metadata)
    assert frames_of(data, key, "store", 3).shape == (3, 32, 48, 3)
    np.testing.assert_array_equal(picture_of(data, key, "store"), read_picture(prompt.images[0]))
    check_reference_images(RunPlan(load_config(ROOT / "configs" / "tiny_wan21_v2v.yaml")), [prompt])
    config = load_config(ROOT / "configs" / "tiny_wan21_i2v.yaml")
    given = load_config(ROOT / "configs" / "tiny_edit_sft.yaml").data
    of_rows = config.model_copy(update={"prompts": PromptsSection(heldout="held.txt"), "data": given})
    for setting, each in (("prompts.image", config), ("data.columns.prompt_image", of_rows)):
        with pytest.raises(PromptError, match=rf"^{setting}: .* the film 'film\.mp4', but model\.policy 'wan21_i2v'"):
            check_reference_images(RunPlan(each), [prompt])


def in_every_mode(folder: Path) -> list[str]:
    """Write pictures of other modes and depths than plain RGB; return their names."""
    gray = Image.fromarray(np.array([[0, 32896, 65535]], np.uint16))
    turned = Image.new("RGB", (4, 2), "red")
    exif = turned.getexif()
    exif[0x0112] = 6
    Image.new("RGBA", (2, 2), (0, 0, 255, 128)).save(folder / "clear.png")
    gray.save(folder / "deep.png")
    Image.new("RGB", (3, 3), "green").convert("P").save(folder / "palette.png")
    Image.new("L", (2, 3), 77).save(folder / "gray.png")
    turned.save(folder / "turned.png", exif=exif)
    return ["clear.png", "deep.png", "palette.png", "gray.png", "turned.png"]


def of_images(folder: Path, images: Any) -> Prompt:
    section = PromptsSection(train="", image="images")
    path = folder / "edits.jsonl"
    path.write_text(json.dumps({"prompt": "edit", "images": images}) + "\n")
    return read_prompts(str(path), section, where="prompts.train")[0]


def test_a_row_may_name_several_images_in_order(tmp_path: Path) -> None:
    names = in_every_mode(tmp_path)
    one, listed, several = (of_images(tmp_path, named) for named in (names[0], names[:1], names))
    assert (one.id, one.condition) == (listed.id, listed.condition)
    assert several.images == tuple(tmp_path / name for name in names)
    keys = image_keys(several.metadata)
    assert [key.endswith("-as-seen") for key in keys] == [True, True, False, False, True]
    assert image_files([several]) == dict(zip(keys, several.images, strict=True))
    assert len({of_images(tmp_path, each).id for each in (names, names[::-1], names[:2], names[0])}) == 4
    # Of a row with one image the identity is what it was when rows had one.
    assert one.metadata == {"image_xxh3": f"{hash_file(tmp_path / names[0])}-as-seen"}


def test_what_a_store_gives_back_is_what_the_file_shows(tmp_path: Path) -> None:
    several = of_images(tmp_path, in_every_mode(tmp_path))
    shown = [(2, 2, 3), (1, 3, 3), (3, 3, 3), (3, 2, 3), (4, 2, 3)]
    for key, path, shape in zip(image_keys(several.metadata), several.images, shown, strict=True):
        seen = picture_of(path.read_bytes(), key, "here")
        assert seen.shape == shape
        np.testing.assert_array_equal(seen, read_picture(path))
        with pytest.raises(CorruptError, match=r"here: image \w+.* has other content"):
            picture_of(b"other", key, "here")
    with pytest.raises(CorruptError, match=r"cannot be read"):
        picture_of(b"other", hash_data(b"other"), "here")


@pytest.mark.parametrize("images", [[], [""], ["a.png", 3], None, {"a": "a.png"}])
def test_what_names_no_images_is_refused(tmp_path: Path, images: Any) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    with pytest.raises(PromptError, match="has no 'images', the path of an image or a list of such paths"):
        of_images(tmp_path, images)


def test_a_model_takes_as_many_images_as_it_says(tmp_path: Path) -> None:
    kontext = ROOT / "configs" / "tiny_flux1_kontext.yaml"
    for name in ("a.png", "b.png"):
        Image.new("RGB", (2, 2), "red").save(tmp_path / name)
    two = of_images(tmp_path, ["a.png", "b.png"])
    with pytest.raises(PromptError, match=r"'edit' comes with 2 images, but model\.policy 'flux1_kontext' takes 1"):
        check_reference_images(RunPlan(load_config(kontext)), [two])
