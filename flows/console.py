"""The console: tables of one line for each entry, and JSON alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from configs.escaping import visible


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
#: Columns of a terminal between two columns of a table without a frame.
_GAP = 2
#: Fewest that a header is folded to, and that a cell is cut to.
_FEWEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of a table, whose cells are one line each."""

    header: str
    """Its header."""
    cells: Sequence[Text]
    """Its cells."""
    width: int
    """Columns of the terminal that it takes."""
    cut: bool = False
    """Whether its cells may be cut."""


def print_table(
    table: Table, *, cut: Collection[str] = (), optional: Sequence[str] = (), complete: bool = False
) -> None:
    """Print a table: on a terminal one line for each entry, elsewhere plain lines with tabs between the cells.

    Where a terminal is too narrow, the frame goes first; then headers are folded, cells of ``cut`` end with an
    ellipsis, and columns of ``optional`` are left out. Nothing else is: an entry that still has no room takes several
    lines. In a file or a pipe all cells are complete, and none is padded.

    Args:
        table: the table; line breaks and control characters in its cells are made visible.
        cut: headers of columns whose cells may be cut.
        optional: headers of columns that may be left out, the first of them first.
        complete: cut nothing, and leave out no column.
    """
    columns = [_column(column, cut=not complete and column.header in cut) for column in table.columns]
    if not console.is_terminal:
        _print_plain(table, columns)
        return
    framed = _framed(table, columns)
    wide = console.options.update(max_width=_UNLIMITED)
    if Measurement.get(console, wide, framed).maximum <= console.width:
        console.print(framed)
    elif narrow := _narrowed(columns, console.width, () if complete else optional):
        _print_narrow(table, narrow)
    else:
        _print_entries(table, columns)


def _column(column: Column, *, cut: bool) -> _Column:
    cells = [each if isinstance(each, Text) else Text(visible(str(each))) for each in column.cells]
    header = visible(str(column.header))
    width = max((cell_len(header), *(cell.cell_len for cell in cells)))
    return _Column(header=header, cells=cells, width=width, cut=cut)


def _rows(columns: Sequence[_Column]) -> Iterator[tuple[Text, ...]]:
    return zip(*(column.cells for column in columns), strict=True)


def _framed(table: Table, columns: Sequence[_Column]) -> Table:
    framed = Table(title=table.title, title_justify="left", box=table.box, pad_edge=table.pad_edge)
    for column in columns:
        framed.add_column(Text(column.header), no_wrap=True)
    for row in _rows(columns):
        framed.add_row(*row)
    return framed


def _print_plain(table: Table, columns: Sequence[_Column]) -> None:
    """Print the title, the headers and each entry as one line, with tabs between cells."""
    title = [] if table.title is None else [visible(str(table.title))]
    entries = ("\t".join(cell.plain for cell in row) for row in _rows(columns))
    for line in (*title, "\t".join(column.header for column in columns), *entries):
        console.file.write(f"{line}\n")


def _narrowed(columns: Sequence[_Column], width: int, optional: Sequence[str]) -> list[_Column]:
    """Return columns that fit a width without a frame; none where names and figures alone are wider."""
    folded = [replace(column, width=_folded_width(column)) for column in columns]
    for left_out in range(len(optional) + 1):
        kept = [column for column in folded if column.header not in optional[:left_out]]
        room = width - _GAP * (len(kept) - 1) - sum(column.width for column in kept if not column.cut)
        if room >= sum(min(column.width, _FEWEST) for column in kept if column.cut):
            return _shared(kept, room)
    return []


def _shared(columns: Sequence[_Column], room: int) -> list[_Column]:
    """Return columns of which those that may be cut share some room; the shortest take what they need."""
    cut = sorted((number for number, each in enumerate(columns) if each.cut), key=lambda each: columns[each].width)
    shared = list(columns)
    for place, number in enumerate(cut):
        shared[number] = replace(columns[number], width=min(columns[number].width, room // (len(cut) - place)))
        room -= shared[number].width
    return shared


def _folded_width(column: _Column) -> int:
    """Return the width of a column whose header may take several lines."""
    cells = max((cell.cell_len for cell in column.cells), default=0)
    return max(cells, min(cell_len(column.header), _FEWEST))


def _print_narrow(table: Table, columns: Sequence[_Column]) -> None:
    """Print a table without a frame, each column as wide as it says."""
    if table.title is not None:
        console.print(table.title)
    headers = [wrap(column.header, column.width) for column in columns]
    for line in zip_longest(*headers, fillvalue=""):
        console.print(_line([Text(part, "bold") for part in line], columns))
    for row in _rows(columns):
        console.print(_line(row, columns))


def _line(cells: Sequence[Text], columns: Sequence[_Column]) -> Text:
    line = Text()
    for cell, column in zip(cells, columns, strict=True):
        fitted = cell.copy()
        fitted.truncate(column.width, overflow="ellipsis", pad=True)
        line = line.append_text(fitted).append(" " * _GAP)
    line.rstrip()
    return line


def _print_entries(table: Table, columns: Sequence[_Column]) -> None:
    """Print the rows of a table one below the other; names and values are never cut."""
    if table.title is not None:
        console.print(table.title)
    for first, *others in _rows(columns):
        console.print(Text.assemble((f"{columns[0].header} ", "dim"), first))
        facts = [
            Text.assemble((f"{column.header}: ", "dim"), each)
            for column, each in zip(columns[1:], others, strict=True)
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
