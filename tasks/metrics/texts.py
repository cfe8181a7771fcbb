"""Texts of an evaluation as people read them: each with its prompt, what the reward read of it, and its score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

#: Name of an evaluation's texts among the files of its scores, one JSON object a line.
TEXTS = "texts.jsonl"


class Text(NamedTuple):
    """A text that was made."""

    prompt: str
    """What it completes."""
    text: str
    """What the policy wrote."""
    verdict: str
    """What the reward read, and what it gave."""


def write_texts(folder: Path, texts: Sequence[Text]) -> None:
    """Write texts into a folder; nothing where there are none."""
    if texts:
        lines = [json.dumps(text._asdict()) for text in texts]
        (folder / TEXTS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_texts(path: Path) -> list[Text]:
    """Return the texts of a file that ``write_texts`` wrote."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Text(str(row["prompt"]), str(row["text"]), str(row["verdict"])) for row in rows]
