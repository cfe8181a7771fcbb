"""The commands of the targets in docs/papers.md are commands: preset, settings, benchmark and options exist."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command

from flowmill.configs.load import load_config
from flowmill.configs.presets import config_file, presets
from flowmill.flows.cli import app
from flowmill.models.rewards import REWARDS
from flowmill.tasks.inputs.components import make_algorithm
from pages.preset_page import ABSENT, resolved
from tests.conftest import ROOT

_SECTION = (ROOT / "docs" / "papers.md").read_text().partition("\n## Targets\n")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split(" | ")] for line in _SECTION.splitlines() if line.startswith("| `")]
_COMMAND = re.compile(r"`(flowmill [^`]+)`")


def options_of(words: list[str], command: str) -> dict[str, object]:
    """Return what a command line sets, parsed as the program does, without carrying it out."""
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    return dict(found.make_context(command, words).params)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "_".join(re.findall(r"run.name=(\w+)", row[3])))
def test_a_target_is_trained_and_scored_by_commands_that_exist(row: list[str]) -> None:
    preset, published, source, train, score, ours = row
    assert published
    assert source
    assert ours.rstrip(" |").startswith("not run") or re.search(r"\d", ours)
    (line,) = _COMMAND.findall(train)
    program, command, *words = shlex.split(line)
    given = options_of(words, command)
    assert (program, command) == ("flowmill", "run")
    name = re.findall(r"`(\w+)`", preset)[0]
    assert name in presets()
    assert str(given["config"]) == name
    settings = [str(each) for each in given["overrides"]]  # type: ignore[attr-defined]
    config = load_config(config_file(name), settings)
    make_algorithm(config)
    assert {reward.name for reward in config.scored} <= set(REWARDS)
    plain = [each.partition("=")[0] for each in settings if "{" not in each and not re.search(r"\.\d+\.", each)]
    assert all(resolved(config, key) is not ABSENT for key in plain)
    scored = [shlex.split(each) for each in _COMMAND.findall(score)]
    assert scored
    for _, command, *rest in scored:
        asked = options_of([*rest], command)
        assert (command, rest[0], asked["run"]) == ("stage", "evaluate", config.run.name)
        pinned = load_config(config_file(name), [*settings, *map(str, asked["overrides"])])  # type: ignore[call-overload]
        assert {judge.name for judge in pinned.evaluate.judges} <= set(REWARDS)


def test_there_are_targets() -> None:
    assert len(ROWS) == 10
