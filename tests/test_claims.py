"""Claims of README and docs hold: counts and lists are those of the tables."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from flowmill.configs.load import load_config
from flowmill.configs.model_families import families
from flowmill.configs.presets import presets
from flowmill.models.maths import KERNELS, PLANS
from flowmill.models.policies import POLICIES
from flowmill.models.rewards import REWARDS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from pages import build
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *build.pages().values()]
PAPERS = (ROOT / "docs" / "papers.md").read_text()
DIGITS = [name for name in presets() if name.startswith("digits")]
#: How many there are of each, in all or of one sort.
COUNTS = {
    "algorithms": {
        len(ALGORITHMS),
        len(TOKEN_ALGORITHMS),
        len(ALGORITHMS) + len(TOKEN_ALGORITHMS),
        len({load_config(name).optimize.algorithm.name for name in DIGITS}),
    },
    "for diffusion and flow-matching models": {len(ALGORITHMS)},
    "for language models": {len(TOKEN_ALGORITHMS)},
    "model families": {len(POLICIES), len(POLICIES) - len(families(lambda spec: spec.kind != "diffusion"))},
    "built-in rewards": {len(REWARDS)},
    "presets": {len(presets()), len(DIGITS), sum(name.startswith("tiny_") for name in presets())},
    "samplers": {len(KERNELS)},
    "plans": {len(PLANS)},
}
NUMBERS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_COUNT = re.compile(rf"(?<![\w.])(\d+|{'|'.join(NUMBERS)})(?: more)? ({'|'.join(COUNTS)})\b", re.IGNORECASE)


@cache
def text_of(page: Path) -> str:
    """Return the text of a page, rendered parts included."""
    return build.filled(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_counts_are_those_of_the_tables(page: Path) -> None:
    assert "<!-- built:" not in text_of(page)
    for number, noun in _COUNT.findall(" ".join(text_of(page).split())):
        count = int(number) if number.isdigit() else NUMBERS.index(number.casefold()) + 1
        assert count in COUNTS[noun.casefold()], f"{page.name}: '{number} {noun}', of {sorted(COUNTS[noun.casefold()])}"


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("families", {*POLICIES} - {*families(lambda spec: spec.kind != "diffusion")}),
        ("algorithms", {*ALGORITHMS}),
        ("token algorithms", {*TOKEN_ALGORITHMS}),
    ],
)
def test_the_comparison_lists_what_the_tables_have(part: str, names: set[str]) -> None:
    listed = re.findall(r"`(\w+)`", PAPERS.partition(f"<!-- {part} -->")[2].partition("<!-- end -->")[0])
    assert sorted(listed) == sorted(names)
    assert len(listed) == len(names)


def test_every_preset_but_miniatures_follows_a_paper_or_says_what() -> None:
    assert [name for name in presets() if f"`{name}`" not in PAPERS and not name.startswith("tiny_")] == []
