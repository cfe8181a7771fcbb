"""Values of rows that are no texts, numbers or files as they are written: used, or refused with their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError
from flowmill.tasks.inputs import data_rows
from flowmill.tasks.inputs.chats import messages_of
from flowmill.tasks.inputs.data_rows import read_data_rows
from tests.support.given import write_jsonl

PAIRED = {"chosen": "chosen", "rejected": "rejected"}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED, RIGHT, WRONG = said("user", "1+1="), said("assistant", "2"), said("assistant", "3")
PARTS = said("assistant", [{"type": "text", "text": "2", "image": None}])
LAYOUTS: dict[str, dict[str, Any]] = {
    "replies": {"prompt": "1+1=", "chosen": [RIGHT], "rejected": [WRONG]},
    "a reply in parts": {"prompt": "1+1=", "chosen": [PARTS], "rejected": [WRONG]},
    "keys without a value": {"prompt": "1+1=", "chosen": [{**RIGHT, "tool_calls": None}], "rejected": [WRONG]},
    "a reply as a text": {"prompt": [ASKED], "chosen": "2", "rejected": [WRONG]},
    "a prompt of messages": {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
    "whole chats": {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
    "whole chats and their prompt": {"prompt": "1+1=", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_chosen_and_rejected_replies_of_chats(tmp_path: Path, layout: str) -> None:
    section = DataSection(train=str(write_jsonl(tmp_path, [LAYOUTS[layout]])), **PAIRED)
    (row,) = read_data_rows(section, texts=True).rows
    assert (row.text, [sample.text for sample in row.samples], row.ratings) == ("1+1=", ["2", "3"], (1.0, 0.0))
    plain = write_jsonl(tmp_path / "plain", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    as_texts = read_data_rows(DataSection(train=str(plain), **PAIRED), texts=True)
    assert read_data_rows(section, texts=True).identity == as_texts.identity


def test_of_pairs_of_longer_chats_the_last_answers_are_learned(tmp_path: Path) -> None:
    before = [said("system", "Be brief"), said("user", "hi"), said("assistant", "Yes?"), ASKED]
    layouts = [
        {"prompt": before, "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [*before, RIGHT], "rejected": [*before, WRONG]},
    ]
    found = [
        read_data_rows(DataSection(train=str(write_jsonl(tmp_path / str(number), [row])), **PAIRED), texts=True)
        for number, row in enumerate(layouts)
    ]
    assert found[0].identity == found[1].identity
    (row,) = found[0].rows
    assert row.text == "hi"
    weights = [[message.weight for message in messages_of(sample)] for sample in row.samples]
    # Those of other messages are not read.
    assert [each[2::2] for each in weights] == [[0, 1], [0, 1]]


BAD_REPLIES: list[tuple[dict[str, Any], str]] = [
    ({"chosen": [said("assistant", None)]}, "line 1, chosen: message 1 has no content"),
    ({"chosen": [said("assistant", [{"type": "image"}])]}, "line 1, chosen: message 1 has {'type': 'image'}"),
    ({"chosen": [said("assistant", "2", name="x")]}, "line 1, chosen: message 1 has 'name', which is not trained on"),
    ({"chosen": [said("assistant", "2", weight=0)]}, "line 1, chosen: every answer has weight 0"),
    ({"chosen": [said("user", "2")]}, "line 1, chosen is a chat without the row's prompt"),
    ({"chosen": [RIGHT, RIGHT]}, "line 1: chosen and rejected differ before their last messages"),
    ({"chosen": [said("user", "9+9="), RIGHT]}, "line 1, chosen is a chat without the row's prompt"),
    ({"chosen": ["2"]}, "line 1 has a list as 'chosen', not a text"),
    ({"tools": [{"type": "function"}]}, "line 1 has a column 'tools', but the chat template is not given it"),
    ({"prompt": None}, "line 1, chosen is a chat of assistant; user and assistant take turns"),
]


@pytest.mark.parametrize(("change", "message"), BAD_REPLIES)
def test_a_reply_that_is_no_text_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {**LAYOUTS["replies"], **change}
    if change.get("chosen") == ["2"]:
        row["rejected"] = "3"
    with pytest.raises(DataError, match=message):
        read_data_rows(DataSection(train=str(write_jsonl(tmp_path, [row])), **PAIRED), texts=True)


def test_replies_and_chats_that_datasets_saves_as_json_are_those_of_the_lines(tmp_path: Path) -> None:
    """Contents and keys that differ between rows become texts of JSON in its tables."""
    rows = []
    for number in range(5, 9):
        right = [{"type": "text", "text": f"t{number}"}] if number % 2 else f"t{number}"
        rows.append({"prompt": f"p{number}", "chosen": [said("assistant", right)], "rejected": [WRONG]})
    lines = write_jsonl(tmp_path, rows)
    saved = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "rows.parquet")
    expected = read_data_rows(DataSection(train=str(lines), **PAIRED), texts=True).identity
    for name in ("saved", "rows.parquet"):
        assert read_data_rows(DataSection(train=str(tmp_path / name), **PAIRED), texts=True).identity == expected, name


@pytest.mark.parametrize("text", ["cat.png", "see a.mp4", "x/../y.jpg"])
def test_a_text_that_ends_like_a_file_is_a_text(tmp_path: Path, text: str) -> None:
    source = str(write_jsonl(tmp_path, [{"prompt": "p", "text": text}]))
    (row,) = read_data_rows(DataSection(train=source, sample="text"), texts=True).rows
    assert row.samples[0].text == text
    with pytest.raises(DataError, match=r"does not exist|below the folder"):
        read_data_rows(DataSection(train=source, sample="text"))


def test_ratings_of_true_and_false_are_1_and_0(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "text": "t", "good": number % 2 == 0} for number in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("prompt,text,good\n" + "".join(f"{r['prompt']},t,{r['good']}\n" for r in rows))
    for source in (write_jsonl(tmp_path, rows), tmp_path / "rows.parquet", tmp_path / "rows.csv"):
        found = read_data_rows(DataSection(train=str(source), sample="text", rating="good"), texts=True)
        assert [row.ratings for row in found.rows] == [(1.0,), (0.0,)] * 2


@pytest.mark.parametrize("bad", [1, 10, 11, 25])
def test_all_rows_that_cannot_be_used_are_named_at_once(tmp_path: Path, bad: int) -> None:
    """Whether reading them or comparing them shows it, in the order of the lines."""
    good = [{"prompt": f"p{number}", "text": "t"} for number in range(3)]
    ugly = [{"prompt": f"q{number}", "text": None} if number % 2 else dict(good[0]) for number in range(bad)]
    source = str(write_jsonl(tmp_path, [*good, *ugly]))
    with pytest.raises(DataError) as caught:
        read_data_rows(DataSection(train=source, sample="text"), texts=True)
    first, *others = str(caught.value).split("\n")
    if bad == 1:
        assert "line 4 repeats" in first
        assert first.endswith("Remove one of the two. Or set data.bad_rows to 'leave_out'.")
        return
    assert first == f"{bad} rows cannot be used:"
    named = others[: min(bad, 10)]
    assert [f"line {4 + number} " in each for number, each in enumerate(named)] == [True] * len(named)
    more = [f"  and {bad - 10} more."] if bad > 10 else []
    assert others[len(named) :] == [*more, "Or set data.bad_rows to 'leave_out'."]


def test_leaving_out_is_no_remedy_where_no_row_is_left(tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path, [{"prompt": f"p{number}"} for number in range(12)]))
    for bad_rows in ("stop", "leave_out"):
        section = DataSection.model_validate({"train": source, "sample": "text", "bad_rows": bad_rows})
        with pytest.raises(
            DataError, match=r"holds no usable row\. 12 rows cannot be used:\n.*line 1 has no"
        ) as caught:
            read_data_rows(section, texts=True)
        assert "leave_out" not in str(caught.value)


def test_reading_stops_where_a_setting_is_wrong_for_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_rows, "_MOST_REFUSED", 20)
    source = str(write_jsonl(tmp_path, [{"prompt": f"p{number}"} for number in range(50)]))
    with pytest.raises(DataError, match=r"20 rows cannot be used(.|\n)*and 10 more\.\nReading stopped there"):
        read_data_rows(DataSection(train=source, sample="text"), texts=True)
