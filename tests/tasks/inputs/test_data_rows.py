"""Rows of given data: all forms hold the same, and each row that cannot be used is named with its reason."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from configs.data import DataSection
from configs.errors import DataError
from models.image_files import open_picture
from tasks.inputs.data_rows import read_given
from tests.support.given import TEXTS, pairs, picture, rated, singles, write_form, write_jsonl

FORMS = ("jsonl", "csv", "parquet", "datasets", "folder", "tars")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_rows(form: str, tmp_path: Path) -> None:
    found = read_given(DataSection(train=write_form(form, tmp_path / form)))
    assert sorted(row.text for row in found.rows) == TEXTS
    assert not found.refused
    metadata = {} if form == "folder" else {"license": "CC0"}
    assert all(row.metadata == metadata for row in found.rows)
    pixels = {row.text: row.samples[0].read() for row in found.rows}
    assert pixels == {
        row.text: row.samples[0].read()
        for row in read_given(DataSection(train=write_form("jsonl", tmp_path / "again"))).rows
    }


def test_the_identity_is_of_contents_and_not_of_places(tmp_path: Path) -> None:
    first, moved = (
        read_given(DataSection(train=str(write_jsonl(tmp_path / name, singles())))) for name in ("a", "b/c")
    )
    assert first.identity == moved.identity
    changed = singles()
    changed[3]["image"] = picture(77)
    assert read_given(DataSection(train=str(write_jsonl(tmp_path / "d", changed)))).identity != first.identity


def test_a_folder_as_datasets_has_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path, singles())
    (tmp_path / "metadata.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace('"image"', '"file_name"'))
    found = read_given(DataSection(train=str(tmp_path)))
    assert [row.text for row in found.rows] == TEXTS


def test_chosen_and_rejected_replies_of_chats(tmp_path: Path) -> None:
    def reply(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    rows = [{"prompt": "1+1=", "chosen": reply("2"), "rejected": reply("3")}]
    (row,) = read_given(DataSection(train=str(write_jsonl(tmp_path, rows)), chosen="chosen", rejected="rejected")).rows
    assert [sample.text for sample in row.samples] == ["2", "3"]
    assert row.ratings == (1.0, 0.0)


Change = Callable[[list[dict[str, Any]]], None]


def _set(key: str, value: Any) -> Change:
    return lambda rows: rows[2].__setitem__(key, value)


def _repeat(rows: list[dict[str, Any]]) -> None:
    rows[2] = dict(rows[0])


PAIRED = {"chosen": "chosen", "rejected": "rejected"}
RATED = {"rating": "stars", "scale": (1, 5)}
BAD: list[tuple[Callable[[], list[dict[str, Any]]], dict[str, Any], Change, str]] = [
    (singles, {}, _set("prompt", " "), "line 3: the prompt is empty"),
    (singles, {}, _set("prompt", 7), "line 3: the prompt is a number"),
    (singles, {}, lambda rows: rows[2].pop("image"), "line 3 has no 'image'"),
    (singles, {}, _set("image", "nowhere.png"), "line 3: .*nowhere.png' does not exist"),
    (singles, {}, _set("image", "../secret.png"), "line 3: .*below the folder"),
    (singles, {}, _set("image", "/etc/secret.png"), "line 3: .*below the folder"),
    (singles, {}, _repeat, "line 3 repeats .*line 1"),
    (pairs, PAIRED, lambda rows: rows[2].__setitem__("rejected", rows[2]["chosen"]), "line 3: chosen and rejected"),
    (pairs, PAIRED, _set("tie", "yes"), "line 3 is a tie"),
    (pairs, PAIRED, lambda rows: rows[2].pop("rejected"), "line 3 has no 'rejected'"),
    (rated, RATED, _set("stars", 6), "line 3: the rating 'stars' is 6, but the scale is 1.0 to 5.0"),
    (rated, RATED, _set("stars", "good"), "line 3: the rating 'stars' is 'good'"),
    (rated, RATED, _set("stars", None), "line 3: the rating 'stars' is None"),
    (rated, RATED, _set("stars", True), "line 3: the rating 'stars' is True"),
]


@pytest.mark.parametrize(("rows", "options", "change", "message"), BAD)
def test_a_row_that_cannot_be_used_is_named_or_left_out(
    tmp_path: Path,
    rows: Callable[[], list[dict[str, Any]]],
    options: dict[str, Any],
    change: Change,
    message: str,
) -> None:
    made = rows()
    change(made)
    source = str(write_jsonl(tmp_path, made))
    with pytest.raises(DataError, match=message):
        read_given(DataSection(train=source, **options))
    found = read_given(DataSection(train=source, bad_rows="leave_out", **options))
    assert len(found.rows) == len(made) - 1
    ((place, reason),) = found.refused
    assert "line 3" in place
    assert re.search(message, reason)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chosen": "a"}, "belong together"),
        ({"chosen": "a", "rejected": "b", "rating": "c"}, "belongs to single samples"),
        ({"scale": (1, 1)}, "must be the lower one"),
        ({"scale": (0, 5), "neutral": 7}, "outside data.scale"),
    ],
)
def test_settings_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSection(train="rows.jsonl", **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"{", "line 1 is not JSON"),
        ("rows.parquet", b"none", "is not a Parquet file"),
        ("rows.tar", b"none", "cannot be read as a WebDataset tar"),
    ],
)
def test_a_damaged_source_is_one_message(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_given(DataSection(train=str(tmp_path / name)))


def test_a_dataset_of_the_hub_holds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, which datasets decodes, keep their pixels; their files are new."""
    saved = datasets.load_from_disk(write_form("datasets", tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: saved if name == "owner/name" else None)
    found = read_given(DataSection(train="owner/name"))
    assert [row.text for row in found.rows] == TEXTS
    for number, row in enumerate(found.rows):
        assert np.array_equal(open_picture(io.BytesIO(row.samples[0].read())), np.asarray(picture(number)))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere.tar"])
def test_a_source_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"does not exist|cannot be read"):
        read_given(DataSection(train=str(tmp_path / name)))
