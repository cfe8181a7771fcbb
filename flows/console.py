"""Console output: tables with one line per entry, and plain JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from flowmill.configs.escaping import visible
from flowmill.flows.output import discard_output, write


class _Console(Console):
    """A console that prints untrusted text literally: it interprets no markup, emoji names or control characters."""

    def __init__(self, **how: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return the rendered form of a text or a table's cell, see ``rich.console.Console``."""
        return super().render_str(visible(text, keep="\n\t"), **how)

    def on_broken_pipe(self) -> None:
        """Drop further output; Rich would raise an exit, which ends a training run."""
        self.quiet = True
        discard_output(self.file)


console, stderr = _Console(), _Console(stderr=True)
_UNLIMITED = 100_000
#: Spaces between two columns of a table without a frame.
_GAP = 2
#: Minimum width of a folded header and of a truncated cell.
_FEWEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of a table; each cell is one line."""

    header: str
    cells: Sequence[Text]
    width: int
    cut: bool = False
    """Whether cells may be truncated."""


def print_table(
    table: Table, *, cut: Collection[str] = (), optional: Sequence[str] = (), complete: bool = False
) -> None:
    """Print a table: on a terminal one line per entry, elsewhere tab-separated lines.

    On a narrow terminal the frame is dropped first; then headers are folded, cells of ``cut`` columns are truncated
    with an ellipsis, and ``optional`` columns are omitted. An entry that still does not fit takes several lines. In a
    file or a pipe all cells are complete and unpadded.

    Args:
        table: the table; line breaks and control characters in its cells are escaped.
        cut: headers of columns whose cells may be truncated.
        optional: headers of columns that may be omitted, in order of omission.
        complete: truncate no cell and omit no column.
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
    title = [] if table.title is None else [visible(str(table.title))]
    header = "\t".join(column.header for column in columns)
    entries = ("\t".join(cell.plain for cell in row) for row in _rows(columns))
    write("".join(f"{line}\n" for line in (*title, header, *entries)), console.file)


def _narrowed(columns: Sequence[_Column], width: int, optional: Sequence[str]) -> list[_Column]:
    """Return columns that fit a width without a frame; empty if the columns that cannot be truncated are wider."""
    folded = [replace(column, width=_folded_width(column)) for column in columns]
    for left_out in range(len(optional) + 1):
        remaining = [column for column in folded if column.header not in optional[:left_out]]
        room = width - _GAP * (len(remaining) - 1) - sum(column.width for column in remaining if not column.cut)
        if room >= sum(min(column.width, _FEWEST) for column in remaining if column.cut):
            return _shared(remaining, room)
    return []


def _shared(columns: Sequence[_Column], room: int) -> list[_Column]:
    """Return the columns after distributing the room among those that may be truncated; the shortest fit in full."""
    cut = sorted((number for number, each in enumerate(columns) if each.cut), key=lambda each: columns[each].width)
    shared = list(columns)
    for place, number in enumerate(cut):
        shared[number] = replace(columns[number], width=min(columns[number].width, room // (len(cut) - place)))
        room -= shared[number].width
    return shared


def _folded_width(column: _Column) -> int:
    cells = max((cell.cell_len for cell in column.cells), default=0)
    return max(cells, min(cell_len(column.header), _FEWEST))


def _print_narrow(table: Table, columns: Sequence[_Column]) -> None:
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
    """Print each row on several lines; names and values are never truncated."""
    if table.title is not None:
        console.print(table.title)
    for first, *others in _rows(columns):
        console.print(Text.assemble((f"{columns[0].header} ", "dim"), first))
        facts = [
            Text.assemble((f"{column.header}: ", "dim"), each)
            for column, each in zip(columns[1:], others, strict=True)
            if each
        ]
        for line in _wrapped(Text("; ").join(facts), console.width - 2) if facts else ():
            console.print(Text("  ").append_text(line))


def _wrapped(text: Text, width: int) -> Iterator[Text]:
    """Yield lines of whole words, also of those that are wider; Rich would cut them."""
    line, *words = text.split(" ")
    for word in words:
        if line.cell_len + 1 + word.cell_len > width:
            yield line
            line = word
        else:
            line = line.append(" ").append_text(word)
    yield line


def print_json(data: Any) -> None:
    """Print data as JSON."""
    write(json.dumps(data, indent=2, sort_keys=False) + "\n", console.file)
