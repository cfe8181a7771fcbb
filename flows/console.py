"""The console: tables that are never cut, and JSON alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from configs.visible import visible


class _Console(Console):
    """A console that prints texts of others as they are: no markup, no emoji's name, no control character of them."""

    def __init__(self, **how: Any) -> None:
        """Create it, see ``rich.console.Console``."""
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a text, or a table's cell, as it is drawn, see ``rich.console.Console``."""
        return super().render_str(visible(text, keep="\n\t"), **how)


console = _Console()
_UNLIMITED = 100_000


def print_table(table: Table, *, folding: Collection[str] = ()) -> None:
    """Print a table with no cell cut, and none folded but those of prose.

    One that is wider than a terminal would be torn there: each row is then what it is about, and the rest below it. In
    a file or a pipe its lines are as long as they must be.

    Args:
        table: the table.
        folding: headers of columns whose cells may take several lines.
    """
    for column in table.columns:
        column.no_wrap = column.header not in folding
        column.overflow = "fold"
    wide = console.options.update(max_width=_UNLIMITED)
    needed = Measurement.get(console, wide, table)
    width = max(console.width, needed.minimum if folding else needed.maximum)
    if console.is_terminal and width > console.width:
        _print_entries(table)
        return
    # A console of its own: rich cuts what is wider than the terminal, whatever it is told.
    _Console(width=width, file=console.file).print(table, width=None, crop=False)


def _print_entries(table: Table) -> None:
    """Print the rows of a table one below the other; names and values are never cut."""
    if table.title is not None:
        console.print(table.title)
    headers = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        first, *others = (Text.from_markup(cell) if isinstance(cell, str) else Text(str(cell)) for cell in row)
        console.print(Text.assemble((f"{headers[0]} ", "dim"), first))
        facts = [
            Text.assemble((f"{header}: ", "dim"), each)
            for header, each in zip(headers[1:], others, strict=True)
            if each
        ]
        for line in _packed(facts, console.width):
            console.print(line)


def _packed(facts: Iterable[Text], width: int) -> Iterator[Text]:
    """Yield lines of whole facts, as many to a line as there is room for; one that is longer is cut between words."""
    short = (part for fact in facts for part in _joined(fact.split(" "), " ", width - 2))
    return (Text("  ").append_text(line) for line in _joined(short, "; ", width - 2))


def _joined(parts: Iterable[Text], by: str, width: int) -> Iterator[Text]:
    """Yield lines of parts, as many to a line as there is room for."""
    line: Text | None = None
    for part in parts:
        if line is not None and line.cell_len + len(by) + part.cell_len > width:
            yield line
            line = None
        line = part if line is None else line.append(by).append_text(part)
    if line is not None:
        yield line


def print_json(data: Any) -> None:
    """Print data as JSON and nothing else."""
    console.file.write(json.dumps(data, indent=2, sort_keys=False) + "\n")
