"""Tables of texts hold lists of messages as JSON: the same rows as in JSON Lines; other texts stay as they are."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from flowmill.configs.data import DataSection
from flowmill.configs.reward_fit import JudgmentRows
from flowmill.configs.schema import PromptsSection
from flowmill.tasks.inputs.data_rows import DataRows, read_data_rows
from flowmill.tasks.inputs.prompts import read_prompts
from flowmill.tasks.inputs.shapes import recognized
from tests.support.given import write_jsonl
from tests.tasks.inputs.test_shapes import SHAPES

#: Rows whose samples are texts, and whether they are compared.
ROWS = [
    (row, rated)
    for (texts, rated), forms in SHAPES.items()
    for row, _ in forms.values()
    if texts and "images" not in row and any(isinstance(each, list | dict) for each in row.values())
]


def as_cells(row: dict[str, Any]) -> dict[str, Any]:
    return {name: json.dumps(each, indent=1) if isinstance(each, list | dict) else each for name, each in row.items()}


def write_csv(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder / "rows.csv"


def read(source: Path, columns: dict[str, str]) -> DataRows:
    return read_data_rows(DataSection(train=str(source), columns=columns), texts=True)


@pytest.mark.parametrize(("row", "rated"), ROWS)
def test_lists_and_objects_in_a_table_of_texts_are_those_of_json_lines(
    row: dict[str, Any], rated: bool, tmp_path: Path
) -> None:
    lists, cells = (recognized(each, {}, texts=True, rated=rated, pictured=False) for each in (row, as_cells(row)))
    assert lists == cells
    assert lists is not None
    # Columns that are no part of a sample stay as the table has them.
    used = {name: each for name, each in row.items() if name != "messages" or "chosen" not in row}
    expected, found = (
        read(source, lists[1])
        for source in (write_jsonl(tmp_path, [used]), write_csv(tmp_path / "cells", [as_cells(used)]))
    )
    assert [sample.text for each in found.rows for sample in each.samples] == [
        sample.text for each in expected.rows for sample in each.samples
    ]
    assert found.identity == expected.identity


@pytest.mark.parametrize(
    "text",
    [
        '[{"from": "Rome", "to": "Bari"}]',
        '[{"role": "nurse", "name": "Ann"}]',
        '{"role": "user", "content": "q"}',
        '[{"role": "user", "content": "q"}',
        '[{"role": "user", "content": "q"}, 1]',
        "[]",
        "[INST] q",
    ],
)
def test_an_answer_that_is_no_list_of_messages_stays_a_text(text: str, tmp_path: Path) -> None:
    columns = {"sample": "answer"}
    (row,) = read(write_csv(tmp_path, [{"prompt": f" {text}", "answer": text}]), columns).rows
    assert (row.text, row.samples[0].text) == (f" {text}", text)


def test_answers_of_a_model_are_never_read_as_messages(tmp_path: Path) -> None:
    text = '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'
    source = write_csv(tmp_path, [{"artifact": "rollouts/1", "prompt": "q", "text": text, "rating": "1"}])
    section = JudgmentRows.model_validate({"train": str(source), "columns": {"sample": "text", "rating": "rating"}})
    assert read_data_rows(section, texts=True).rows[0].samples[0].text == text


def test_a_list_of_prompts_holds_messages_as_json(tmp_path: Path) -> None:
    source = write_csv(tmp_path, [as_cells({"prompt": [{"role": "user", "content": "q"}], "answer": "3"})])
    (prompt,) = read_prompts(str(source), PromptsSection(), where="prompts.train")
    assert (prompt.text, prompt.metadata) == ("q", {"answer": "3"})
