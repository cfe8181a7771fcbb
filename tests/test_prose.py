"""Prose is plain technical English: words of a private dialect stay as rare as in the best public code of the field.

prime-rl has such a word on 0.34 of 1,000 source lines; three times that is the limit here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

HABITS = re.compile(r"\b(what|whatever|beside|told|anew|nobody|whoever)\b", re.IGNORECASE)
_LIMIT = 1.0
#: Of tests, of which older ones have more such words; this number may only fall.
_LIMIT_OF_TESTS = 9.2
PACKAGES = ("configs", "storage", "models", "tasks", "flows", "flowmill", "pages")
_PAGES = (
    "README.md",
    "CHANGELOG.md",
    *sorted(str(each.relative_to(ROOT)) for folder in ("docs", "pages") for each in (ROOT / folder).rglob("*.md")),
)


def lines_of(name: str) -> Iterator[str]:
    """Yield the lines of a package's code, or of a page."""
    path = ROOT / name
    for file in [path] if path.is_file() else sorted(Path(path).rglob("*.py")):
        yield from file.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("names", "limit"),
    [(PACKAGES, _LIMIT), (_PAGES, _LIMIT), (("tests", "tools"), _LIMIT_OF_TESTS)],
    ids=["source", "docs", "tests"],
)
def test_words_of_a_dialect_are_rare(names: tuple[str, ...], limit: float) -> None:
    lines = [line for name in names for line in lines_of(name)]
    found = [line.strip() for line in lines if HABITS.search(line)]
    assert len(lines) > 1000
    assert 1000 * len(found) / len(lines) <= limit, found


def test_the_check_finds_such_words() -> None:
    assert [bool(HABITS.search(line)) for line in ("What is told", "besides, somewhat retold")] == [True, False]
