"""Tables keep names whole, and are as wide as the terminal at most."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from configs.amounts import duration
from configs.presets import presets
from configs.schema import RunConfig
from flows import console as consoles
from flows.cli import app
from tasks.runs.opening import begin_run
from tests.conftest import ROOT
from tests.support.inside import evaluate, prepare, run_epoch

Make = Callable[..., RunConfig]
NAMES = ("a-run-with-a-name-as-long-as-people-give-them-0001", "a-run-with-a-name-as-long-as-people-give-them-0002")
WIDTH = 80


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 80 columns is sent."""
    file = io.StringIO()
    terminal = consoles._Console(file=file, width=WIDTH, force_terminal=True, color_system=None)
    monkeypatch.setattr(consoles, "console", terminal)
    return file


def lines(shown: io.StringIO) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()


@pytest.mark.parametrize("columns", [2, 5, 9])
def test_what_is_too_wide_is_written_row_by_row(shown: io.StringIO, columns: int) -> None:
    names = [[f"{row}-{column}-{'n' * 20}" for column in range(columns)] for row in range(3)]
    table = Table(*(f"header {column}" for column in range(columns)), title="Rows")
    for row in names:
        table.add_row(*row)
    consoles.print_table(table)
    found = lines(shown)
    assert max(map(len, found)) <= WIDTH
    assert all(any(name in line for line in found) for row in names for name in row)
    assert found[0].strip() == "Rows"


def test_a_name_wider_than_the_terminal_is_whole(shown: io.StringIO) -> None:
    table = Table("artifact", "state")
    table.add_row("x" * 100, "complete")
    consoles.print_table(table)
    assert lines(shown) == [f"artifact {'x' * 100}", "  state: complete"]


def test_empty_cells_are_left_out(shown: io.StringIO) -> None:
    table = Table("epoch", *(f"stage {number} of many" for number in range(9)))
    table.add_row("1-3", Text("stale", "red"), *[""] * 8)
    consoles.print_table(table)
    assert lines(shown) == ["epoch 1-3", "  stage 0 of many: stale"]


def test_every_table_is_printed_so() -> None:
    """Rich cuts what is wider than the terminal, whatever it is told."""
    for path in (ROOT / "flows").rglob("*.py"):
        tree = ast.parse(path.read_text())
        made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "Table"]
        if made and path.name != "console.py":
            printed = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "print_table"]
            assert len(printed) == len(made), path


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def test_commands_on_a_store(make_config: Make, shown: io.StringIO, tmp_path: Path) -> None:
    config = make_config(f"run.name={NAMES[0]}", "run.epochs=1")
    context = prepare(config)
    evaluate(context, 0)
    run_epoch(context, 1)
    begin_run(make_config(f"run.name={NAMES[1]}", "optimize.learning_rate=1e-5"))
    artifacts = [entry.artifact for entry in context.chain.entries()]
    root = ["--root", context.store.root.uri]
    for arguments, whole in (
        (["status"], NAMES),
        (["status", NAMES[0]], artifacts),
        (["diff", *NAMES], ("optimize.learning_rate", *NAMES)),
        (["store", "ls"], artifacts),
        (["store", "verify"], ()),
        (["presets"], presets()),
    ):
        shown.seek(0), shown.truncate()
        done = CliRunner().invoke(app, [*arguments, *(root if arguments != ["presets"] else [])])
        assert done.exit_code == 0, done.output
        found = lines(shown)
        assert all(any(name in line for line in found) for name in whole), arguments
        tables = [line for line in found if line.startswith(("  ", "┃", "│"))]
        assert not [line for line in tables if len(line) > WIDTH], arguments
        assert "…" not in "".join(found)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (86399, "24 h 0 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_durations_are_read_as_they_are_said(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_prose_is_cut_between_words(shown: io.StringIO) -> None:
    table = Table("run", "why")
    table.add_row("r" * 70, "because " * 20)
    consoles.print_table(table)
    assert lines(shown)[1] == f"  why: {'because ' * 8}because"
    assert max(map(len, lines(shown))) <= WIDTH
