"""Shapes of rows: recognized by their columns, or named; one table of forms, and that of the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError
from flowmill.configs.load import load_config
from flowmill.tasks.inputs.data_rows import DataRows, read_data_rows
from flowmill.tasks.inputs.shapes import recognized, shape_of, with_columns
from tests.conftest import ROOT
from tests.support.given import picture, png, write_jsonl

URL = f"data:image/png;base64,{__import__('base64').b64encode(png(picture(7, (4, 4)))).decode()}"


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED, RIGHT, WRONG = said("user", "q"), said("assistant", "a"), said("assistant", "b")
TURNS = "\n\nHuman: q\n\nAssistant:"
CHAT = '[["user","q"],["assistant","a"]]'
Expected = tuple[str, str, list[list[str]], list[tuple[float | None, ...]]]
#: Whether samples are texts and are compared -> form: a row; name of the shape, prompt, samples and ratings of rows.
SHAPES: dict[tuple[bool, bool], dict[str, tuple[dict[str, Any], Expected]]] = {
    (True, False): {
        "language modeling": ({"text": "t"}, ("language modeling", "", [["t"]], [(None,)])),
        "language modeling, chats": ({"messages": [ASKED, RIGHT]}, ("chats", "q", [[CHAT]], [(None,)])),
        "prompt-completion": ({"prompt": "q", "completion": "a"}, ("prompt-completion", "q", [["a"]], [(None,)])),
        "prompt-completion, chats": (
            {"prompt": [ASKED], "completion": [RIGHT]},
            ("prompt-completion, conversational", "q", [["a"]], [(None,)]),
        ),
        "Alpaca": ({"instruction": "q", "input": "x", "output": "a"}, ("Alpaca", "q\n\nx", [["a"]], [(None,)])),
        "Alpaca without input": ({"instruction": "q", "input": "", "output": "a"}, ("Alpaca", "q", [["a"]], [(None,)])),
        "ShareGPT": (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            ("chats", "q", [[CHAT]], [(None,)]),
        ),
        "OpenAI, parts": (
            {"messages": [said("user", [{"type": "text", "text": "q"}]), RIGHT]},
            ("chats", "q", [[CHAT]], [(None,)]),
        ),
        "images of the prompt": (
            {"prompt": "q", "images": ["0.png", "1.png"], "completion": "a"},
            ("prompt-completion", "q", [["a"]], [(None,)]),
        ),
    },
    (True, True): {
        "preference": (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            ("preference", "q", [["a", "b"]], [(1.0, 0.0)]),
        ),
        "preference, implicit": (
            {"chosen": "q is a", "rejected": "q is b"},
            ("preference, implicit prompt", "q is", [[" a", " b"]], [(1.0, 0.0)]),
        ),
        "preference, chats": (
            {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
            ("preference, conversational", "q", [["a", "b"]], [(1.0, 0.0)]),
        ),
        "preference, implicit, chats": (
            {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
            ("preference, implicit prompt, conversational", "q", [["a", "b"]], [(1.0, 0.0)]),
        ),
        "unpaired": ({"prompt": "q", "completion": "a", "label": False}, ("rated texts", "q", [["a"]], [(0.0,)])),
        "unpaired, chats": (
            {"prompt": [ASKED], "completion": [RIGHT], "label": True},
            ("rated texts, conversational", "q", [["a"]], [(1.0,)]),
        ),
        "UltraFeedback": (
            {
                "instruction": "q",
                "completions": [{"response": x, "overall_score": y} for x, y in (("a", 1), ("b", 0.2))],
            },
            ("ranked replies", "q", [["a"], ["b"]], [(1.0,), (0.2,)]),
        ),
        "UltraFeedback, binarized": (
            {"prompt": "q", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG], "messages": [ASKED, RIGHT]},
            ("preference, conversational", "q", [["a", "b"]], [(1.0, 0.0)]),
        ),
        "HH-RLHF": (
            {"chosen": f"{TURNS} a", "rejected": f"{TURNS} b"},
            ("preference, implicit prompt", TURNS, [[" a", " b"]], [(1.0, 0.0)]),
        ),
        "OpenAI preference": (
            {"input": {"messages": [ASKED]}, "preferred_output": [RIGHT], "non_preferred_output": [WRONG]},
            ("OpenAI preference", "q", [["a", "b"]], [(1.0, 0.0)]),
        ),
        "responses with a preference": (
            {"prompt": "q", "response_A": "b", "response_B": "a", "preference": "B"},
            ("pairs with a label", "q", [["a", "b"]], [(1.0, 0.0)]),
        ),
    },
    (False, True): {
        "Pick-a-Pic": (
            {"caption": "q", "jpg_0": "0.png", "jpg_1": "1.png", "label_0": 0},
            ("pairs with a label", "q", [["1.png", "0.png"]], [(1.0, 0.0)]),
        ),
        "ranked lists": (
            {"prompt": "q", "image_path": ["0.png", "1.png", "2.png"], "rank": [2, 1, 3]},
            ("ranked lists", "q", [["0.png"], ["1.png"], ["2.png"]], [(0.5,), (1.0,), (0.0,)]),
        ),
        "ImageReward": (
            {"prompt": "q", "generations": ["0.png", "1.png"], "ranking": [1, 2]},
            ("ranked lists", "q", [["0.png"], ["1.png"]], [(1.0,), (0.0,)]),
        ),
        "HPD": (
            {"prompt": "q", "image_path": ["0.png", "1.png"], "human_preference": [0, 1]},
            ("rated lists", "q", [["0.png"], ["1.png"]], [(0.0,), (1.0,)]),
        ),
        "stars": ({"prompt": "q", "image": "0.png", "stars": 1}, ("rated samples", "q", [["0.png"]], [(1.0,)])),
        "stars as texts": (
            {"prompt": "q", "image": "0.png", "stars": "1"},
            ("rated samples", "q", [["0.png"]], [(1.0,)]),
        ),
        "image pairs": (
            {"prompt": "q", "chosen": "0.png", "rejected": "1.png"},
            ("preference", "q", [["0.png", "1.png"]], [(1.0, 0.0)]),
        ),
    },
    (False, False): {
        "data URL": ({"prompt": "q", "image": URL}, ("prompts with samples", "q", [["rows.jsonl"]], [(None,)])),
        "base64": (
            {"prompt": "q", "image": URL.partition(",")[2]},
            ("prompts with samples", "q", [["rows.jsonl"]], [(None,)]),
        ),
        "several images": (
            {"prompt": "q", "images": ["0.png", "1.png"]},
            ("prompts with samples", "q", [["0.png"], ["1.png"]], [(None,), (None,)]),
        ),
        "edit": (
            {"source_image": "0.png", "edit_prompt": "q", "edited_image": "1.png"},
            ("prompts with samples", "q", [["1.png"]], [(None,)]),
        ),
        "video": ({"caption": "q", "video": "a.mp4"}, ("prompts with samples", "q", [["a.mp4"]], [(None,)])),
    },
}


def read(folder: Path, rows: list[dict[str, Any]], columns: dict[str, str], *, texts: bool, **how: Any) -> DataRows:
    """Return rows, read in the shape of some columns; images that they may name lie next to them."""
    source = write_jsonl(folder, rows)
    for number in range(3):
        for name in (f"{number}.png", f"{'abc'[number]}.png"):
            picture(number).save(folder / name)
    (folder / "a.mp4").write_bytes(b"clip")
    return read_data_rows(DataSection(train=str(source), columns=columns, **how), texts=texts)


@pytest.mark.parametrize(
    ("texts", "rated", "form"), [(*kind, form) for kind, forms in SHAPES.items() for form in forms]
)
def test_each_shape_is_recognized_and_read(texts: bool, rated: bool, form: str, tmp_path: Path) -> None:
    row, (name, prompt, samples, ratings) = SHAPES[texts, rated][form]
    found = recognized(row, {}, texts=texts, rated=rated, pictured=form in ("images of the prompt", "edit"))
    assert found is not None
    assert name in found[0]
    given = read(tmp_path, [row], found[1], texts=texts)
    assert {each.text for each in given.rows} == {prompt}
    assert [[sample.text or sample.path for sample in each.samples] for each in given.rows] == samples
    assert [each.ratings for each in given.rows] == ratings
    assert (given.rows[0].image is None) == (form not in ("images of the prompt", "edit"))
    if form in ("data URL", "base64"):
        assert given.rows[0].samples[0].read() == png(picture(7, (4, 4)))
    # The columns that were found are found again, as a stored config has them.
    section = DataSection(train="x", columns=found[1])
    again = recognized(row, section.columns, texts=texts, rated=rated, pictured=False)
    assert again is not None
    assert DataSection(train="x", columns=again[1]) == section


OTHER = f"data:image/png;base64,{__import__('base64').b64encode(png(picture(8, (4, 4)))).decode()}"
PAIR = {"prompt": "prompt", "first": "a", "second": "b", "preferred": "label"}


@pytest.mark.parametrize(
    ("row", "columns", "swapped"),
    [
        ({"a": URL, "b": OTHER, "label": 1}, PAIR, False),
        ({"a": URL, "b": OTHER, "label": 0}, PAIR, True),
        ({"a": {"x": URL}, "b": {"x": OTHER}}, {"chosen": "b.x", "rejected": "a.x"}, True),
        ({"a": {"image": URL}}, {"sample": "a.image"}, False),
        ({"a": [{"image": URL, "r": 1}, {"image": OTHER, "r": 0}]}, {"sample": "a.image", "rating": "a.r"}, False),
        ({"a": [URL, OTHER], "r": [1, 0]}, {"sample": "a", "rating": "r"}, False),
    ],
)
def test_base64_is_read_wherever_columns_name_it(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], swapped: bool
) -> None:
    rows = read(tmp_path, [{"prompt": "q", **row}], columns, texts=False)
    contents = [sample.read() for each in rows.rows for sample in each.samples]
    expected = [png(picture(number, (4, 4))) for number in ((8, 7) if swapped else (7, 8))]
    assert contents == expected[: len(contents)]


def test_base64_is_an_image_only_where_a_sample_is_one(tmp_path: Path) -> None:
    both = {"a": "q", "b": URL, "label": 0}
    (pair,) = read(tmp_path, [{"prompt": "q", **both}], PAIR, texts=True).rows
    assert [sample.text for sample in pair.samples] == [URL, "q"]
    inside = [{"prompt": "q", "out": {"file": "0.png", "thumb": URL}}]
    (row,) = read(tmp_path, inside, {"sample": "out.file"}, texts=False, keep=["out"]).rows
    assert row.samples[0].path == "0.png"
    assert row.metadata["out"] == inside[0]["out"]


def _documented() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs" / "own-data.md").read_text()
    return re.findall(r"^\| `(\{.*?\})`(?:[,;][^|]*)? \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)


def test_the_docs_have_a_row_for_each_shape(tmp_path: Path) -> None:
    rows = _documented()
    assert len(rows) == 18
    for number, (text, name, algorithms) in enumerate(rows):
        row = json.loads(text)
        texts, rated = ".png" not in text, not algorithms.startswith("`sft`")
        found = recognized(row, {}, texts=texts, rated=rated, pictured="source_image" in row)
        assert found is not None, text
        assert found[0].startswith(name), text
        assert not read(tmp_path / str(number), [row], found[1], texts=texts).refused, text


BAD: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"a": "q", "c": "t"}, {"prompt": "{a} {b}", "sample": "c"}, "there is no column 'b' for the template '{a} {b}'"),
    ({"a": {"x": 1}, "c": "t"}, {"prompt": "{a}", "sample": "c"}, "the column 'a' of the template '{a}' is {'x': 1}"),
    (
        {"prompt": "q", "c": ["s", "t"], "r": [1]},
        {"sample": "c", "rank": "r"},
        "2 samples in 'c', but 1 ratings in 'r'",
    ),
    (
        {"prompt": "q", "c": ["s", "t"], "r": 1},
        {"sample": "c", "rating": "r"},
        "2 samples in 'c', but no ratings in 'r'",
    ),
    (
        {"prompt": "q", "a": "s", "b": "t", "p": "x"},
        {"first": "a", "second": "b", "preferred": "p"},
        "'p' is 'x', which",
    ),
    ({"prompt": "q", "a": "s", "b": "t", "p": 0.5}, {"first": "a", "second": "b", "preferred": "p"}, "is a tie"),
    (
        {"chosen": "s", "rejected": "t"},
        {"prompt": "", "chosen": "chosen", "rejected": "rejected"},
        "no common beginning",
    ),
    (
        {"prompt": "q", "a": "s", "b": "t"},
        {"first": "a", "second": "b", "preferred": "p"},
        "there is no 'p', which says which sample is preferred",
    ),
    ({"prompt": "q", "c": ["s", "t"], "r": [1, None]}, {"sample": "c", "rank": "r"}, "'r' holds None, no rank"),
    ({"prompt": "q", "c": "s", "r": 1}, {"sample": "c", "rank": "r"}, "'r' is a rank among the samples of a list"),
    (
        {"prompt": "q", "c": [{"role": "assistant", "content": "s"}], "r": 1},
        {"sample": "c", "rank": "r"},
        "'r' is a rank among the samples of a list",
    ),
    (
        {"m": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "s"}], "r": 1},
        {"messages": "m", "rank": "r"},
        "'r' is a rank among the samples of a list",
    ),
    ({"prompt": "q", "c": ["s", "t"], "r": [1, 2]}, {"sample": "c", "rank": "r", "rating": "s"}, "both say how"),
    ({"prompt": "q", "c": ["s", "t"], "p": 1}, {"sample": "c", "preferred": "p"}, "no chosen and rejected ones"),
    ({"prompt": "q", "c": "s", "p": 1}, {"sample": "c", "preferred": "p"}, "no chosen and rejected ones"),
    ({"text": "t"}, {"sample": "other"}, "has no 'prompt'; it has text"),
]


@pytest.mark.parametrize(("row", "columns", "message"), BAD)
def test_a_row_that_has_not_the_named_shape_is_one_message(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl, line 1.*{re.escape(message)}"):
        read(tmp_path, [row], columns, texts=True)


def test_a_row_of_another_shape_than_the_first_costs_no_other(tmp_path: Path) -> None:
    rows = [
        {"question": "q", "answer": "a"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"question": "r", "answer": "c"},
    ]
    found = recognized(rows[0], {}, texts=True, rated=False, pictured=False)
    assert found is not None
    given = read(tmp_path, rows, found[1], texts=True, bad_rows="leave_out")
    assert [row.text for row in given.rows] == ["q", "r"]
    assert "line 2 has no 'question'; it has prompt, chosen, rejected" in given.refused[0][1]


@pytest.mark.parametrize(
    ("row", "named", "columns"),
    [
        ({"prompt": "q", "text": "a"}, {"sample": "text"}, {"prompt": "prompt", "sample": "text"}),
        ({"prompt": "q", "text": "a"}, {}, None),
        ({"prompt": "", "chosen": "ab c", "rejected": "ab d"}, {}, {"prompt": "prompt"}),
        ({"chosen": "ab c", "rejected": "ab d"}, {}, {"prompt": ""}),
        # A position, or whether the first is preferred.
        ({"prompt": "q", "response_A": "a", "response_B": "b", "winner": 1}, {}, None),
        ({"prompt": "q", "response_A": "a", "response_B": "b", "winner": "model_b"}, {}, {"preferred": "winner"}),
        (
            {"prompt": "q", "response_A": "a", "response_B": "b", "winner": 1},
            {"preferred": "winner"},
            {"chosen": "response_A"},
        ),
        # Steps of one answer are no answers.
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}, {}, None),
    ],
)
def test_columns_that_two_readings_fit_are_named_or_left(
    row: dict[str, Any], named: dict[str, str], columns: dict[str, str] | None
) -> None:
    rated = "chosen" in row or "response_A" in row or "labels" in row
    shape = recognized(row, named, texts=True, rated=rated, pictured=False)
    assert (shape is None) == (columns is None)
    if shape is not None and columns is not None:
        assert columns.items() <= shape[1].items()


def test_columns_are_the_settings_of_the_same_names() -> None:
    columns = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert DataSection(train="x", columns=columns) == DataSection.model_validate({"train": "x", **columns})
    assert DataSection(train="x", columns={**columns, "prompt": "prompt"}).columns == {"chosen": "a", "rejected": "b"}
    for wrong, message in (
        ({"columns": {"answer": "a"}}, "names a column for 'answer', but the parts of a row are prompt"),
        ({"columns": {"sample": "a"}, "sample": "b"}, "name different columns for 'sample'"),
    ):
        with pytest.raises(ValueError, match=message):
            DataSection.model_validate({"train": "x", **wrong})


def test_a_short_setting_overrides_a_column_of_what_a_config_extends(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("extends: addition_sft\ndata: {sample: reply, train: rows.jsonl}\n")
    assert ready(tmp_path / "own.yaml").columns == {"sample": "reply"}
    assert ready(tmp_path / "own.yaml", "data.columns.sample=text").columns == {"sample": "text"}
    assert ready("addition_sft", "data.sample=text").columns == {"sample": "text"}
    pairs = ready("digits_sft", "data.chosen=null", "data.rejected=null", "data.rating=taste")
    assert pairs.columns == {"rating": "taste"}


def ready(config: str | Path, *overrides: str) -> DataSection:
    data = load_config(config, list(overrides)).data
    assert data is not None
    return data


def test_a_config_gets_the_columns_of_its_rows(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path, [{"question": "1+1=", "answer": "2", "license": "CC0"}])
    preset = load_config("addition_sft", [f"data.train={source}", "data.keep=[]", "data.sample=image"])
    config = with_columns(preset)
    assert config.data is not None
    assert (config.data.prompt, config.data.sample) == ("question", "answer")
    assert with_columns(config) == config
    shape = shape_of(config)
    assert shape is not None
    assert shape[0] == "prompt-completion (prompt: question; sample: answer; metadata: license)"
    # Columns that are named are those that are meant.
    rated = write_jsonl(tmp_path / "rated", [{"question": "1+1=", "reply": "2", "prompt": "q"}])
    named = load_config("addition_sft", [f"data.train={rated}", "data.sample=reply"])
    assert with_columns(named) == named
    # A run goes on without its rows.
    source.unlink()
    assert with_columns(preset).data == preset.data
    assert with_columns(preset, lambda: config.data) == config
