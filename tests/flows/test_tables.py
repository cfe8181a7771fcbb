"""Tables have one line for each entry, and are as wide as the terminal at most; in a pipe nothing is cut or padded."""

from __future__ import annotations

import ast
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from flowmill.configs.human_units import duration
from flowmill.configs.presets import presets
from flowmill.configs.schema import RunConfig
from flowmill.flows import console as consoles
from flowmill.flows.cli import app, deploy, rate, summary, sweep
from flowmill.flows.cli.filters import EntryFilter, ranges, short_names, span
from flowmill.flows.deployment_list import Listed
from flowmill.tasks.metrics.sweep import Outcome, SeedSummary, Variant
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run
from tests.conftest import ROOT
from tests.support.inside import evaluate, prepare, run_epoch

Make = Callable[..., RunConfig]
NAMES = ("a-run-with-a-name-as-long-as-people-give-them-0001", "a-run-with-a-name-as-long-as-people-give-them-0002")
WIDTH = 80


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The output to a terminal of 80 columns."""
    file = io.StringIO()
    terminal = consoles._Console(file=file, width=WIDTH, force_terminal=True, color_system=None)
    # Modules that were imported before hold the console itself.
    monkeypatch.setattr(consoles.console, "__dict__", terminal.__dict__)
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
    """Rich cuts what is wider than the terminal, regardless of its settings."""
    for path in (ROOT / "flows").rglob("*.py"):
        tree = ast.parse(path.read_text())
        made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "Table"]
        if made and path.name != "console.py":
            printed = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "print_table"]
            assert len(printed) == len(made), path


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def test_in_a_pipe_cells_are_whole_and_have_tabs_between(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(consoles, "console", consoles._Console(file=file, width=20))
    table = Table("artifact", "why", "runs", title="Rows")
    table.add_row("x" * 100, "because\tof\nlines", "")
    table.add_row("y", Text("stale", "red"), "a, b")
    consoles.print_table(table, cut=("why",), optional=("runs",))
    assert file.getvalue().splitlines() == [
        "Rows",
        "artifact\twhy\truns",
        f"{'x' * 100}\tbecause\\tof\\nlines\t",
        "y\tstale\ta, b",
    ]


def test_what_may_be_cut_or_left_out_makes_room_for_one_line_each(shown: io.StringIO) -> None:
    table = Table("run", "state", "a long header of figures", "note")
    for number in range(3):
        table.add_row(f"{'n' * 45}{number}", "why " * 20, f"{number}.5", "left out")
    consoles.print_table(table, cut=("state",), optional=("note",))
    head, *_, first, second, third = lines(shown)
    assert head.split() == ["run", "state", "a", "long"]
    assert second == f"{'n' * 45}1  {'why ' * 4}w…  1.5"
    assert max(map(len, (first, second, third))) <= WIDTH
    assert "left out" not in shown.getvalue()


def test_what_is_complete_is_never_cut(shown: io.StringIO) -> None:
    table = Table("run", "state")
    table.add_row("n" * 40, "why " * 20)
    consoles.print_table(table, cut=("state",), optional=("state",), complete=True)
    assert lines(shown)[0] == f"run {'n' * 40}"
    assert "".join(lines(shown)).count("why") == 20


#: Modules that print tables, and the commands that print each; of slow commands what prints what they found.
COMMANDS: Mapping[str, Sequence[str]] = {
    "artifacts": ("store ls", f"store ls --run {NAMES[0]} --stage rollout", "store ls --epoch 1"),
    "check": ("check CONFIG", "check CONFIG --set execution.processes=3"),
    "diff": (" ".join(["diff", *NAMES]),),
    "dry_run": (f"run CONFIG --dry --name {NAMES[0]} --set run.epochs=40",),
    "presets": ("presets", "presets --kind tokens", "presets --model FLUX --memory 80"),
    "status_tables": (
        "status",
        *(f"status {NAMES[0]} {chosen}".strip() for chosen in ("", "--epoch 1", "--stage judge")),
    ),
}


def deployments() -> None:
    row = Listed(
        name="run/nightly-digits",
        run="digits-with-another-reward",
        config="/home/somebody/experiments/2026/flux1_dev_with_another_reward.yaml",
        schedule="cron 0 2 * * 1-5 (America/Argentina/Buenos_Aires)",
        next_start="2026-11-30 02:00 UTC",
        pool="local",
        again="",
    )
    deploy._print([row, replace(row, name="run/weekly")])


def variants_of_a_sweep() -> None:
    figures = {f"{slot} {figure}": 0.5 for slot in ("ocr", "pickscore", "geneval") for figure in ("mean", "exact")}
    names = [f"digits-sweep-optimize.learning_rate-0.0003-run.seed-{seed}" for seed in range(3)]
    found = [Variant(name=name, settings={}) for name in names]
    outcomes = [Outcome(variant=each, epoch=30, reward=0.5, figures=figures) for each in found]
    sweep._print("digits-sweep", outcomes, order="best first")
    means = {figure: (0.5, 0.44, 0.56) for figure in figures}
    sweep._print_over_seeds([SeedSummary(settings={"optimize.learning_rate": 3e-4}, count=3, figures=means)])


def rewards_of_a_run() -> None:
    scores = {split: {"exact_answer_of_the_text": {"mean": 0.51, "exact": 0.2}} for split in ("train", "heldout")}
    summary._print_rewards({"run": NAMES[0], "evaluations": {"0": scores, "30": scores}})


def figures_of_raters() -> None:
    row = {"rater": "somebody-with-a-long-name", "pairs": 40, "won": 0.75, "low": 0.6, "high": 0.86, "ties": 3}
    rate._print("answers", [row, {**row, "rater": "another"}])


PRINTED: Mapping[str, Callable[[], None]] = {
    "deploy": deployments,
    "rate": figures_of_raters,
    "summary": rewards_of_a_run,
    "sweep": variants_of_a_sweep,
}


def test_the_table_of_a_sweep_names_the_prompts_of_its_scores(shown: io.StringIO) -> None:
    variants_of_a_sweep()
    assert " ".join(lines(shown)).startswith("digits-sweep, best first, scores on held-out prompts")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have each module's tables written to a terminal of 100 columns; how many entries each printed, one line each."""
    file, found = io.StringIO(), Counter[str]()
    terminal = consoles._Console(file=file, width=100, force_terminal=True, color_system=None)
    monkeypatch.setattr(consoles.console, "__dict__", terminal.__dict__)

    def printing(module: str) -> Callable[..., None]:
        def print_table(table: Table, **how: Any) -> None:
            file.seek(0), file.truncate()
            consoles.print_table(table, **how)
            entries = [line.strip("│ ") for line in lines(file) if not line.startswith("└")][-table.row_count :]
            firsts = [str(cell) for cell in table.columns[0].cells]
            for entry, first in zip(entries, firsts, strict=True):
                assert entry.startswith(first.rstrip()[:20]), (module, entry)
            assert max(map(len, lines(file))) <= 100, module
            found[module] += table.row_count

        return print_table

    for module in (*COMMANDS, *PRINTED):
        monkeypatch.setattr(f"flowmill.flows.cli.{module}.print_table", printing(module))
    return found


@pytest.mark.slow
def test_every_command_has_one_line_for_each_entry(
    make_config: Make, counted: Counter[str], finished_run: tuple[RunContext, Path]
) -> None:
    _, file = finished_run
    context = prepare(make_config(f"run.name={NAMES[0]}", "run.epochs=1"))
    evaluate(context, 0)
    run_epoch(context, 1)
    begin_run(make_config(f"run.name={NAMES[1]}", "optimize.learning_rate=1e-5"))
    for module, commands in COMMANDS.items():
        for command in commands:
            words = command.replace("CONFIG", str(file)).split()
            root = [] if words[0] in ("presets", "check") else ["--root", context.store.root.uri]
            before = counted[module]
            done = CliRunner().invoke(app, [*words, *root])
            assert done.exit_code == 0, (command, done.output, done.exception)
            assert counted[module] > before, command
    for module, printed in PRINTED.items():
        printed()
        assert counted[module], module


def test_every_module_that_prints_tables_is_tried_above() -> None:
    printing = {path.stem for path in (ROOT / "flows").rglob("*.py") if "print_table(" in path.read_text()}
    assert printing - {"console"} == {*COMMANDS, *PRINTED}


def test_names_are_whole_in_long_lists(make_config: Make, shown: io.StringIO) -> None:
    context = prepare(make_config(f"run.name={NAMES[0]}", "run.epochs=1"))
    artifacts = [entry.artifact for entry in context.chain.entries()]
    root = ["--root", context.store.root.uri]
    for arguments, whole in (
        (["status", *root], NAMES[:1]),
        (["status", NAMES[0], "--long", *root], artifacts),
        (["store", "ls", "--long", *root], [*artifacts, NAMES[0]]),
        (["presets"], presets()),
        (["presets", "--long"], [*presets(), "black-forest-labs/FLUX.1-Kontext-dev"]),
    ):
        shown.seek(0), shown.truncate()
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert all(any(name in line for line in lines(shown)) for name in whole), arguments
        # The line above the table names the root, whatever its length.
        assert max(len(line) for line in lines(shown) if context.store.root.uri not in line) <= WIDTH, arguments


def test_epochs_before_the_newest_are_summed_up() -> None:
    every = EntryFilter()
    assert every.recent(range(14)) == {11, 12, 13}
    assert every.recent(range(4)) == {0, 1, 2, 3}, "one epoch is no sum"
    assert replace(every, long=True).recent(range(14)) == set(range(14))
    assert replace(every, epochs=[3]).recent([3]) == {3}
    assert ranges([0, 1, 2, 5]) == "0-2, 5"
    assert ranges([0, 2, 4, 6, 8]) == "5 of 0-8"
    assert (span([4]), span([2, 9, 4]), span([])) == ("4", "2-9", "")


def test_shortened_ids_lead_to_one_artifact() -> None:
    one, other, attempt = "rewards/" + "a" * 32, "rewards/" + "b" * 32, "rewards/" + "a" * 32 + "-a2"
    assert short_names([one, other]) == {one: one[:20], other: other[:20]}
    assert short_names([one, other, attempt]) == {one: one, other: other[:20], attempt: attempt}


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
