"""Texts of an evaluation for human review: each with its prompt, the reward's reading of it, and its score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

#: Name of an evaluation's texts among the files of its scores, one JSON object a line.
TEXTS = "texts.jsonl"


class Text(NamedTuple):
    """A generated text."""

    prompt: str
    """The prompt that it completes."""
    text: str
    verdict: str
    """The reward's reading and score."""


def write_texts(folder: Path, texts: Sequence[Text]) -> None:
    """Write texts into a folder; without texts no file is written."""
    if texts:
        lines = [json.dumps(text._asdict()) for text in texts]
        (folder / TEXTS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_texts(path: Path) -> list[Text]:
    """Return the texts of a file that ``write_texts`` wrote."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Text(str(row["prompt"]), str(row["text"]), str(row["verdict"])) for row in rows]
