"""Claims of README and docs hold: counts and lists are those of the tables, and missing parts are missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from flowmill.configs.load import load_config
from flowmill.configs.model_families import FAMILIES, families
from flowmill.configs.presets import presets
from flowmill.flows.cli import app
from flowmill.models.maths import KERNELS, PLANS
from flowmill.models.policies import POLICIES
from flowmill.models.rewards import REWARDS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from pages import build
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *build.pages().values()]
PAPERS = (ROOT / "docs" / "papers.md").read_text()
#: What every place that introduces flowmill says of it.
WHAT = (
    "diffusion, flow-matching, language, vision-language and unified models with reinforcement learning, as a durable "
    "data pipeline"
)
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
_DENIAL = re.compile(
    r"\b(?:is|are) (?:still )?missing\b|\bnot (?:yet )?(?:supported|implemented)\b|\bnot yet\b|\bno support\b"
    r"|\bunsupported\b|\bflowmill (?:has not|does not have|lacks)\b"
)
#: Names of plans are words of every text.
NAMES = {*ALGORITHMS, *TOKEN_ALGORITHMS, *POLICIES, *REWARDS, *KERNELS, *presets()}


def text_of(page: Path) -> str:
    """Return the text of a page, rendered parts included."""
    return build.filled(page.read_text())


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences, rows and headings of a page, without blocks of code."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for part in re.split(r"\n\n+|\n(?=[|#*-])", text):
        yield from re.split(r"(?<=[.;:!?])\s+", " ".join(part.split()))


def denied(sentence: str) -> list[str]:
    """Return what of the tables a sentence names, if it says that something is missing."""
    if not _DENIAL.search(sentence):
        return []
    words = {word.casefold().replace("-", "_") for word in re.findall(r"[\w-]+", sentence)}
    return sorted(words & NAMES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_counts_are_those_of_the_tables(page: Path) -> None:
    for number, noun in _COUNT.findall(" ".join(text_of(page).split())):
        count = int(number) if number.isdigit() else NUMBERS.index(number.casefold()) + 1
        assert count in COUNTS[noun.casefold()], f"{page.name}: '{number} {noun}', of {sorted(COUNTS[noun.casefold()])}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_that_is_there_is_said_to_be_missing(page: Path) -> None:
    assert [sentence for sentence in sentences(page) if denied(sentence)] == []


def test_a_denial_is_found_and_a_count_too() -> None:
    assert denied("Language models learn by GRPO; PPO is missing.") == ["grpo", "ppo"]
    assert denied("Flow-DPPO is not yet here, nor `flow_dppo`") == ["flow_dppo"]
    assert denied("PPO is there") == denied("A key is missing.") == []
    assert _COUNT.findall("by nine algorithms and twenty more presets") == [
        ("nine", "algorithms"),
        ("twenty", "presets"),
    ]


def test_what_is_missing_is_a_row_of_a_table_and_no_name_of_another() -> None:
    section = PAPERS.partition("### Not in flowmill\n")[2].partition("\n### ")[0]
    rows = [row for row in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE) if row != "not here"]
    assert len(rows) > 3
    assert not [row for row in rows if {word.casefold() for word in re.findall(r"\w+", row)} & NAMES]
    said = [
        (page.name, sentence)
        for page in PAGES
        for sentence in sentences(page)
        if re.search(r"\bflowmill (?:has not|lacks)\b|\b(?:not yet|no) support(?:ed)?\b", sentence)
    ]
    assert [each for each in said if not any(row in each[1] for row in rows)] == []


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


def test_every_introduction_names_every_kind_of_model() -> None:
    introductions = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    said = [" ".join(path.read_text().split()) for path in introductions]
    help_text = get_command(app).help
    assert help_text is not None
    for text in (*said, help_text):
        assert WHAT in text
    kinds = {spec.kind for spec in FAMILIES.values()}
    assert kinds == {"diffusion", "tokens", "image_tokens"}, "a new kind of model belongs into what is said above"
