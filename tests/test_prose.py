"""Prose is plain technical English: words of a private dialect stay as rare as in the best public code of the field.

prime-rl has such a word on 0.34 of 1,000 source lines; three times that is the limit here.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

HABITS = re.compile(r"\b(what|whatever|beside|told|anew|nobody|whoever)\b", re.IGNORECASE)
_LIMIT = 1.0
#: Participles that stand for nouns in names; the best public code of the field has one on 1.5 of 1,000 source lines.
PARTICIPLES = re.compile(r"(?<![A-Za-z])(found|made|given|asked|wanted|held(?![- ]out)|kept|known|about)(?![A-Za-z])")
_MOST_PARTICIPLES = 3.0
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


def lines_with_participles(text: str) -> int:
    """Return the number of lines with such a word in a name, a comment or a docstring, and not in a message."""
    nodes = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docstrings = {node.lineno for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.STRING or token.start[0] in docstrings:
            rows = enumerate(token.string.splitlines(), token.start[0])
            lines |= {number for number, line in rows if PARTICIPLES.search(line)}
    return len(lines)


def test_participles_are_no_nouns() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    texts = [file.read_text(encoding="utf-8") for file in files if file.resolve() == file.absolute()]
    lines = sum(len(text.splitlines()) for text in texts)
    assert 1000 * sum(map(lines_with_participles, texts)) / lines <= _MOST_PARTICIPLES


def test_lines_with_participles_are_found_in_names_and_comments_alone() -> None:
    text = '"""It is kept."""\nmade = 1  # as wanted\n_found = "was found"\nheld_out = "given"\n'
    assert lines_with_participles(text) == 4


def test_the_check_finds_such_words() -> None:
    assert [bool(HABITS.search(line)) for line in ("What is told", "besides, somewhat retold")] == [True, False]
