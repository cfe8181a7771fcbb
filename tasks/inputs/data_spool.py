"""The rows of data in a temporary database, so that memory does not grow with their number.

The file has no name, lies where ``TMPDIR`` says, and is gone with the process.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, overload

_Item = TypeVar("_Item")
#: Usable rows, their distinct prompts, and rows that were refused.
Table = Literal["rows", "prompts", "refused"]
#: Characters of items that are written together: one by one takes longer.
_TOGETHER = 1 << 16
_TABLES = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -16384;
CREATE TABLE rows (number INTEGER PRIMARY KEY, item TEXT);
CREATE TABLE prompts (number INTEGER PRIMARY KEY, item TEXT);
CREATE TABLE refused (number INTEGER PRIMARY KEY, item TEXT);
CREATE TABLE seen (digest BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID;
BEGIN;
"""


class Spool:
    """Lists of JSON texts, and digests that must not repeat."""

    def __init__(self) -> None:
        # Threads of one process share it; SQLite has them wait for each other.
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._file.executescript(_TABLES)
        self._counts: Counter[Table] = Counter()
        self._unwritten: dict[Table, list[tuple[int, str]]] = {"rows": [], "prompts": [], "refused": []}
        self._characters = 0

    def seen(self, digest: str) -> Any:
        """Note that the next row has a digest, in hex; return the row that had it before, or None."""
        key = bytes.fromhex(digest)
        note = "INSERT OR IGNORE INTO seen VALUES (?, ?)"
        if self._file.execute(note, (key, self._counts["rows"] + 1)).rowcount:
            return None
        self._write("rows")
        query = "SELECT item FROM rows JOIN seen USING (number) WHERE digest = ?"
        return json.loads(self._file.execute(query, (key,)).fetchone()[0])

    def add(self, table: Table, item: str) -> int:
        """Append JSON to a list; return the number of its items."""
        self._counts[table] += 1
        self._unwritten[table].append((self._counts[table], item))
        self._characters += len(item)
        if self._characters > _TOGETHER:
            self._characters = 0
            for each in self._unwritten:
                self._write(each)
        return self._counts[table]

    def _write(self, table: Table) -> None:
        self._file.executemany(f"INSERT INTO {table} VALUES (?, ?)", self._unwritten[table])
        self._unwritten[table].clear()

    def items(self, table: Table, create: Callable[[Any], _Item]) -> Spooled[_Item]:
        """Return a list, of which ``create`` makes each item on access."""
        self._write(table)
        return Spooled(self._file, table, self._counts[table], create)


class Spooled(Sequence[_Item]):
    """A list in a database."""

    def __init__(self, file: sqlite3.Connection, table: Table, count: int, create: Callable[[Any], _Item]) -> None:
        self._file, self._table, self._count, self._create = file, table, count, create

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_Item]:
        return self._between(0, len(self))

    @overload
    def __getitem__(self, index: int) -> _Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_Item]: ...

    def __getitem__(self, index: int | slice) -> _Item | Sequence[_Item]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return next(self._between(places, places + 1))
        if places.step != 1:
            return [self[place] for place in places]
        return list(self._between(places.start, places.stop))

    def _between(self, start: int, stop: int) -> Iterator[_Item]:
        # Numbers begin at 1.
        query = f"SELECT item FROM {self._table} WHERE number > ? AND number <= ? ORDER BY number"
        for (item,) in self._file.execute(query, (start, stop)):
            yield self._create(json.loads(item))
