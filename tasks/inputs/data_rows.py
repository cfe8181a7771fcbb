"""The rows of ``data.train``: prompts with given samples, checked and named by content.

The identity of the data depends on no path, and nothing is decoded to compute it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from configs.data import DataSection
from configs.errors import DataError, PromptError
from configs.fingerprint import canonical_json, fingerprint, hash_text
from configs.schema import RunConfig
from storage.backends.checksums import hash_data
from storage.backends.file_hash_cache import file_hashes
from tasks.inputs.data_sources import Row, TableCells, bytes_of, source_files, source_rows
from tasks.inputs.data_spool import Spool
from tasks.inputs.given_file import MEDIA, Cells, GivenFile, is_unicode, too_many_bytes
from tasks.inputs.prompt_rows import RowLocation, as_read, check_metadata, file_below, text_of
from tasks.inputs.prompts import Prompt, listed_prompts

_SETTING = "data.train"
#: Rows whose files are hashed together: each time the cache of hashes of a folder is read and written.
_BATCH = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One row: a prompt and its given samples."""

    place: str
    """File and line, for messages."""
    text: str
    """The prompt."""
    metadata: Mapping[str, Any]
    """The other columns."""
    samples: tuple[GivenFile, ...]
    """One sample, or the chosen and the rejected one."""
    ratings: tuple[float | None, ...]
    """Rating of each sample on the section's scale; 1 and 0 for a pair; None if the rows have no ratings."""

    @property
    def identity(self) -> list[Any]:
        """Everything that training depends on, without paths."""
        return [self.text, dict(self.metadata), [sample.key for sample in self.samples], list(self.ratings)]

    @property
    def prompt(self) -> Prompt:
        """The prompt, with the other columns."""
        return Prompt(text=self.text, metadata=self.metadata)

    def stored(self) -> list[Any]:
        """Return plain values, from which ``restored`` makes the same row."""
        samples = [sample.stored() for sample in self.samples]
        return [self.place, self.text, dict(self.metadata), samples, self.ratings]

    @staticmethod
    def restored(values: list[Any], cells: Cells) -> DataRow:
        """Return a row from its plain values."""
        place, text, metadata, samples, ratings = values
        files = tuple(GivenFile.restored(sample, cells) for sample in samples)
        return DataRow(place=place, text=text, metadata=metadata, samples=files, ratings=tuple(ratings))


@dataclass(frozen=True, slots=True)
class GivenData:
    """All usable rows, and the others with reasons; both are read from disk on demand."""

    rows: Sequence[DataRow]
    """Usable rows, in order."""
    prompts: Sequence[Prompt]
    """Their distinct prompts, in order of first appearance."""
    refused: Sequence[tuple[str, str]]
    """Place and reason of each row that is left out."""
    identity: str
    """Identity of the data by content and order: the fingerprint of the list of identities of rows."""


def data_of(config: RunConfig) -> DataSection:
    """Return the section of given data.

    Raises:
        DataError: there is none.
    """
    if config.data is None:
        raise DataError("The config has no section 'data', so there are no given samples. Add it.")
    return config.data


def given_data(config: RunConfig) -> GivenData:
    """Return the rows that a config names; one command reads them several times, so the last ones stay on disk.

    Raises:
        DataError: the source cannot be read, a row cannot be used and ``bad_rows`` is 'stop', or none is left.
    """
    section = data_of(config)
    stats = ((path, path.stat()) for path in source_files(section.train))
    stamps = tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats)
    heldout = frozenset(as_read(prompt.text) for prompt in listed_prompts(config.prompts, "heldout"))
    # A forked process must not share the open database.
    return _unchanged(section.model_dump_json(), stamps, heldout, os.getpid())


@lru_cache(maxsize=4)
def _unchanged(
    section: str, stamps: tuple[tuple[str, int, int], ...], heldout: frozenset[str], process: int
) -> GivenData:
    return read_given(DataSection.model_validate_json(section), heldout)


def given_per_epoch(config: RunConfig) -> int:
    """Return the number of given samples that an epoch trains on, at most.

    Raises:
        DataError: the rows cannot be used.
    """
    section, rows = data_of(config), len(given_data(config).rows)
    return min(rows, section.groups_per_epoch or rows) * (2 if section.paired else 1)


def read_given(section: DataSection, heldout: frozenset[str] = frozenset()) -> GivenData:
    """Return the rows of a section; see ``given_data``.

    Args:
        section: names the rows.
        heldout: held-out prompts, as ``as_read`` returns them, which no row may have.
    """
    spool, cells, digest = Spool(), TableCells(section), hashlib.blake2b(b"[", digest_size=16)

    def refuse(place: str, error: Exception) -> None:
        if section.bad_rows == "stop":
            raise DataError(f"{error} Or set data.bad_rows to 'leave_out'.") from None
        spool.add("refused", [place, str(error)])

    comma, found = b"", source_rows(section)
    while batch := list(islice(found, _BATCH)):
        rows = list[DataRow]()
        for place, folder, row in batch:
            try:
                made = _row(row, section, place, folder, cells.read)
                _check_held_out(made, heldout)
                rows.append(made)
            except (PromptError, DataError) as error:
                refuse(str(place), error)
        for made in _keyed(rows):
            try:
                kept = _checked(made, spool)
            except DataError as error:
                refuse(made.place, error)
            else:
                digest.update(comma + kept)
                comma = b","
    digest.update(b"]")
    usable = spool.items("rows", lambda row: DataRow.restored(row, cells.read))
    refused = spool.items("refused", lambda each: (each[0], each[1]))
    if not usable:
        reason = f" The first: {refused[0][1]}" if refused else ""
        raise DataError(f"{_SETTING}: '{section.train}' holds no usable row; {len(refused)} were refused.{reason}")
    prompts = spool.items("prompts", lambda each: Prompt(text=each[0], metadata=each[1]))
    return GivenData(usable, prompts, refused, digest.hexdigest())


def _check_held_out(row: DataRow, heldout: frozenset[str]) -> None:
    if heldout and as_read(row.text) in heldout:
        raise DataError(
            f"{row.place}: the prompt {row.text[:60]!r} is in prompts.heldout too, whose evaluation would not be of "
            "held-out prompts. Remove it from one of the two."
        )


def _row(row: Row, section: DataSection, place: RowLocation, folder: Path, cells: Cells) -> DataRow:
    if isinstance(row, DataError):
        raise row
    if section.prompt not in row:
        raise DataError(f"{place} has no '{section.prompt}'; it has {', '.join(row) or 'nothing'}. Set data.prompt.")
    text = text_of(row[section.prompt], place)
    columns = (str(section.chosen), str(section.rejected)) if section.paired else (section.sample,)
    samples = tuple(_sample(row, name, place, folder, cells) for name in columns)
    used = {section.prompt, *columns, section.rating} - {*section.keep}
    metadata = {str(name): value for name, value in row.items() if name not in used}
    try:
        check_metadata(metadata, place)
        metadata = json.loads(canonical_json(metadata).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place}: columns must be plain JSON values: {error}.") from None
    ratings = (1.0, 0.0) if section.paired else (_rating(row, section, place),)
    return DataRow(place=str(place), text=text, metadata=metadata, samples=samples, ratings=ratings)


def _rating(row: Mapping[str, Any], section: DataSection, place: RowLocation) -> float | None:
    if section.rating is None:
        return None
    given, (low, high) = row.get(section.rating), section.scale
    try:
        # CSV files hold texts.
        value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else None
    except (ValueError, OverflowError):
        value = None
    if value is None or not low <= value <= high:
        raise DataError(
            f"{place}: the rating '{section.rating}' is {given!r}, but data.scale is {low} to {high}. Mend the row, or "
            "set data.scale."
        )
    return value


def _sample(row: Mapping[str, Any], column: str, place: RowLocation, folder: Path, cells: Cells) -> GivenFile:
    value = row.get(column)
    if isinstance(value, GivenFile):
        return value
    name = f"{place}, {column}"
    if (data := bytes_of(value)) is not None:
        if large := too_many_bytes(len(data)):
            raise DataError(f"{name} {large}. Scale it down.")
        return GivenFile(name=name, key=hash_data(data), path=column, offset=place.number, cells=cells)
    # An image or clip of datasets has a path.
    value = value.get("path") if isinstance(value, Mapping) else value
    value = _reply(value, place) if isinstance(value, list) else value
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{place} has no '{column}', the path of an image or clip, or a text. Add it, or set data.sample."
        )
    if not is_unicode(value):
        raise DataError(f"{name} has half a character, which is no Unicode text. Write it again.")
    if Path(value).suffix.lower() not in MEDIA:
        return GivenFile(name=name, key=hash_text(value), text=value)
    try:
        if large := too_many_bytes(file_below(folder, value).stat().st_size):
            raise ValueError(f"'{value}' {large}. Scale it down")
    except (ValueError, OSError) as error:
        raise DataError(f"{place}: {error}.") from None
    return GivenFile(name=f"{place}: {value}", folder=str(folder), path=value)


def _reply(messages: Sequence[Any], place: RowLocation) -> str:
    """Return the assistant's text of a chat of one message, as the chosen and rejected columns of chats hold it."""
    if len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role") == "assistant":
        return str(messages[0].get("content", ""))
    raise DataError(f"{place} holds a chat of {len(messages)} messages; one of the assistant can be trained on.")


def _keyed(rows: Iterable[DataRow]) -> Iterator[DataRow]:
    """Yield rows with the content keys of their files, which are hashed once, and from a cache if unchanged; files that
    cannot be read have none."""
    listed = list(rows)
    names: dict[str, dict[str, None]] = {}
    for sample in (sample for row in listed for sample in row.samples if not sample.key):
        names.setdefault(sample.folder, {})[sample.path] = None
    keys = {folder: _hashes(Path(folder), list(paths)) for folder, paths in names.items()}
    for row in listed:
        samples = (each if each.key else replace(each, key=keys[each.folder][each.path]) for each in row.samples)
        yield replace(row, samples=tuple(samples))


def _hashes(folder: Path, names: list[str]) -> dict[str, str]:
    try:
        return file_hashes(folder, names)
    except OSError:
        if len(names) == 1:
            return {names[0]: ""}
    return {name: key for each in names for name, key in _hashes(folder, [each]).items()}


def _checked(row: DataRow, spool: Spool) -> bytes:
    """Keep a row and return its identity as JSON; refuse a pair of equal samples, and a row with the prompt and samples
    of an earlier one."""
    for sample in row.samples:
        if not sample.key:
            raise DataError(f"{sample.name} cannot be read. Make it readable, or remove the row.")
    if len(row.samples) == 2 and row.samples[0].key == row.samples[1].key:
        raise DataError(f"{row.place}: chosen and rejected sample are equal, so the pair says nothing. Remove the row.")
    if before := spool.seen(fingerprint(row.identity[:3])):
        raise DataError(
            f"{row.place} repeats {before[0]}: the same prompt with the same sample. Remove one of the two."
        )
    if spool.seen(fingerprint(row.identity[:2])) is None:
        spool.add("prompts", row.identity[:2])
    spool.add("rows", row.stored())
    return canonical_json(row.identity).encode()
