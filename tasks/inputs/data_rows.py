"""The rows of ``data.train`` and ``data.heldout``: prompts with given samples, checked and named by content.

The identity of the data depends on no path, and nothing is decoded to compute it.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.data import DataSection
from configs.errors import DataError, PromptError
from configs.fingerprint import canonical_json, hash_text
from storage.backends.checksums import hash_data
from storage.backends.file_hash_cache import file_hashes
from tasks.inputs.chats import read_chat
from tasks.inputs.data_sources import Row, TableCells, bytes_of, source_rows
from tasks.inputs.data_spool import Spool
from tasks.inputs.given_file import MEDIA, Cells, GivenFile, is_unicode, too_many_bytes
from tasks.inputs.prompt_rows import ImageSource, RowLocation, check_metadata, file_below, images_of, text_of
from tasks.inputs.prompts import IMAGE, Prompt, Seen, seen

#: Rows that are kept together, and more of them up to so many files, which are hashed together: each time the cache of
#: hashes of a folder is read and written.
_ROWS, _FILES = 1 << 10, 1 << 14
#: Values of a column 'tie' for a pair of which neither sample is better.
_TRUE = ("true", "1", "1.0", "yes")


#: Files of the images of a prompt, and their joined content keys.
PromptImage = tuple[tuple[ImageSource, ...], str]


def _prompt(text: str, metadata: Mapping[str, Any], image: PromptImage | None) -> Prompt:
    if image is None:
        return Prompt(text=text, metadata=metadata)
    images, keys = image
    return Prompt(text=text, metadata={**metadata, IMAGE: keys}, images=images)


def _stored_image(image: PromptImage | None) -> list[Any] | None:
    """Return plain values, from which ``_restored_image`` makes the same."""
    if image is None:
        return None
    plain = ([str(each), ""] if isinstance(each, Path) else ["", b64encode(each).decode()] for each in image[0])
    return [list(plain), image[1]]


def _restored_image(values: list[Any] | None) -> PromptImage | None:
    if values is None:
        return None
    return tuple(Path(path) if path else b64decode(data) for path, data in values[0]), values[1]


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
    image: PromptImage | None
    """Files of the prompt's input images and their joined content keys, if it has some."""
    ratings: tuple[float | None, ...]
    """Rating of each sample on the section's scale; 1 and 0 for a pair, 0.5 for a tie; None if rows have no ratings."""

    @property
    def prompt(self) -> Prompt:
        """The prompt, with the other columns."""
        return _prompt(self.text, self.metadata, self.image)

    @staticmethod
    def restored(values: list[Any], cells: Cells) -> DataRow:
        """Return a row from the plain values of ``_checked``."""
        text, metadata, place, samples, ratings, image = values
        files = tuple(GivenFile.restored(sample, cells) for sample in samples)
        found = _restored_image(image)
        return DataRow(place=place, text=text, metadata=metadata, samples=files, image=found, ratings=tuple(ratings))


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


def contents_of(row: DataRow) -> tuple[str | Seen, ...]:
    """Return the content of prompt and samples."""
    return (seen(row.prompt), *(sample.key for sample in row.samples))


def read_given(
    section: DataSection, heldout: frozenset[Seen] = frozenset(), apart: frozenset[str | Seen] = frozenset()
) -> GivenData:
    """Return the rows of a section; see ``tasks.inputs.given_data``.

    Args:
        section: names the rows.
        heldout: held-out prompts, as ``seen`` returns them, which no row may have.
        apart: prompts and samples of held-out rows, which no row may have either.
    """
    reading, cells = _Reading(section, apart), TableCells(section).read
    rows, files = list[DataRow](), 0
    for place, folder, row in source_rows(section):
        try:
            made = _row(row, section, place, folder, cells)
            _check_held_out(made, heldout)
        except (PromptError, DataError) as error:
            reading.refuse(str(place), error)
            continue
        rows.append(made)
        files += sum(not sample.key for sample in made.samples)
        if files >= _FILES or (len(rows) >= _ROWS and not files):
            reading.keep(rows)
            rows, files = [], 0
    reading.keep(rows)
    return reading.read(cells)


class _Reading:
    """Rows on their way to the disk, and their identity."""

    def __init__(self, section: DataSection, apart: frozenset[str | Seen]) -> None:
        self._section, self._apart, self._spool = section, apart, Spool()
        self._digest = hashlib.blake2b(b"[", digest_size=16)

    def refuse(self, place: str, error: Exception) -> None:
        if self._section.bad_rows == "stop":
            raise DataError(f"{error} Or set data.bad_rows to 'leave_out'.") from None
        self._spool.add("refused", json.dumps([place, str(error)]))

    def keep(self, rows: list[DataRow]) -> None:
        for row in _keyed(rows):
            try:
                if self._apart and not self._apart.isdisjoint(contents_of(row)):
                    raise DataError(
                        f"{row.place} has a prompt or sample of data.heldout, whose loss would not be that of held-out "
                        "rows. Remove it from one of the two."
                    )
                self._digest.update(_checked(row, self._spool))
            except DataError as error:
                self.refuse(row.place, error)

    def read(self, cells: Cells) -> GivenData:
        rows = self._spool.items("rows", lambda row: DataRow.restored(row, cells))
        refused = self._spool.items("refused", lambda each: (each[0], each[1]))
        if not rows:
            found = "holds no row. Write some into it, or name another."
            if refused:
                found = f"holds no usable row; {len(refused)} were refused. The first: {refused[0][1]}"
            raise DataError(f"{self._section.setting}: '{self._section.train}' {found}")
        prompts = self._spool.items("prompts", lambda each: _prompt(each[0], each[1], _restored_image(each[2])))
        self._digest.update(b"]")
        return GivenData(rows, prompts, refused, self._digest.hexdigest())


def _check_held_out(row: DataRow, heldout: frozenset[Seen]) -> None:
    if heldout and seen(row.prompt) in heldout:
        raise DataError(
            f"{row.place}: the prompt {row.text[:60]!r} is in prompts.heldout too, whose evaluation would not be of "
            "held-out prompts. Remove it from one of the two."
        )


def _row(row: Row, section: DataSection, place: RowLocation, folder: Path, cells: Cells) -> DataRow:
    if isinstance(row, DataError):
        raise row
    if section.messages is not None:
        columns: tuple[str, ...] = (section.messages,)
        asked, sample = read_chat(row.get(section.messages), f"{place}, {section.messages}")
        samples: tuple[GivenFile, ...] = (sample,)
    elif section.prompt not in row:
        has = ", ".join(row) or "nothing"
        raise DataError(f"{place} has no '{section.prompt}'; it has {has}. {_remedy(section, 'prompt')}")
    else:
        asked = row[section.prompt]
        options = ("chosen", "rejected") if section.paired else ("sample",)
        columns = tuple(str(getattr(section, option)) for option in options)
        samples = tuple(_sample(row, option, section, place, folder, cells) for option in options)
    setting = "data.prompt" if section.trained else None
    text = asked if asked == "" and not section.trained else text_of(asked, place, setting)
    used = {section.prompt, *columns, section.rating, section.prompt_image} - {*section.keep}
    named = section.prompt_image
    image = None if named is None else images_of(row, named, place, folder, "data.prompt_image")
    # Other members of a tar, such as arrays, are no columns.
    others = (name for name, value in row.items() if name not in used and not isinstance(value, GivenFile))
    metadata = {str(name): row[name] for name in others}
    tie = section.paired and str(row.get("tie", "")).strip().lower() in _TRUE
    if not section.trained:
        # Several raters, or one who has no name, may judge the same samples.
        metadata = {"rater": str(row.get("rater") or ""), "row": place.number}
    elif tie:
        raise DataError(f"{place} is a tie: neither sample is better, so there is nothing to learn. Remove the row.")
    try:
        check_metadata(metadata, place)
    except RecursionError:
        raise DataError(f"{place}: its columns are nested too deeply. Flatten them.") from None
    ratings = ((0.5, 0.5) if tie else (1.0, 0.0)) if section.paired else (_rating(row, section, place),)
    return DataRow(place=str(place), text=text, metadata=metadata, samples=samples, image=image, ratings=ratings)


def _rating(row: Mapping[str, Any], section: DataSection, place: RowLocation) -> float | None:
    if section.rating is None:
        return None
    if section.rating not in row:
        raise DataError(f"{place} has no '{section.rating}', the rating. {_remedy(section, 'rating')}")
    given, (low, high) = row[section.rating], section.scale
    try:
        # CSV files hold texts.
        value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else None
    except (ValueError, OverflowError):
        value = None
    if value is None or not low <= value <= high:
        raise DataError(
            f"{place}: the rating '{section.rating}' is {given!r}, but the scale is {low} to {high}. Mend the row, or "
            f"set {'data.scale' if section.trained else 'scale'}."
        )
    return value


def _remedy(section: DataSection, option: str) -> str:
    """Return what to do about a column that rows lack; the columns of judgments have names that no setting changes."""
    return f"Add it, or set data.{option} to another column." if section.trained else "Add it, or rename its column."


def _sample(
    row: Mapping[str, Any], option: str, section: DataSection, place: RowLocation, folder: Path, cells: Cells
) -> GivenFile:
    column = str(getattr(section, option))
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
    value = _reply(value, name) if isinstance(value, list) else value
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{place} has no '{column}', the path of an image or clip, or a text. {_remedy(section, option)}"
        )
    if not is_unicode(value):
        raise DataError(f"{name} has half a character, which is no Unicode text. Write it again.")
    if not (value[-5:].lower().endswith(MEDIA) and Path(value).suffix):
        return GivenFile(name=name, key=hash_text(value), text=value)
    try:
        if large := too_many_bytes(file_below(folder, value).stat().st_size):
            raise ValueError(f"'{value}' {large}. Scale it down")
    except (ValueError, OSError) as error:
        raise DataError(f"{place}: {error}.") from None
    name = str(place) if place.source.endswith(f"/{value}") else f"{place}: {value}"
    return GivenFile(name=name, folder=str(folder), path=value)


def _reply(messages: Sequence[Any], name: str) -> str:
    """Return the assistant's text of a chat of one message, as the chosen and rejected columns of chats hold it."""
    if len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role") == "assistant":
        return str(messages[0].get("content", ""))
    raise DataError(
        f"{name} holds a chat of {len(messages)} messages; it can be one message of the assistant. Mend the row."
    )


def _keyed(rows: list[DataRow]) -> Iterator[DataRow]:
    """Yield rows with the content keys of their files, which are hashed once, and from a cache if unchanged; files that
    cannot be read have none."""
    names: dict[str, dict[str, None]] = {}
    for sample in (sample for row in rows for sample in row.samples if not sample.key):
        names.setdefault(sample.folder, {})[sample.path] = None
    keys = {folder: _hashes(Path(folder), list(paths)) for folder, paths in names.items()}
    for row in rows:
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
    """Keep a row, and return its part of the identity; refuse a pair of equal samples, and a row with the prompt and
    samples of an earlier one."""
    for sample in row.samples:
        if not sample.key:
            raise DataError(f"{sample.name} cannot be read. Make it readable, or remove the row.")
    if len(row.samples) == 2 and row.samples[0].key == row.samples[1].key:
        raise DataError(f"{row.place}: chosen and rejected sample are equal, so the pair says nothing. Remove the row.")
    try:
        prompt = canonical_json([row.text, dict(row.metadata)])
        prompt.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{row.place}: columns must be plain JSON values: {error}.") from None
    content = f"{prompt[:-1]},{canonical_json([sample.key for sample in row.samples])}"
    # Rows without images keep the identity that they had before prompts had some.
    image = "" if row.image is None else f",{canonical_json(row.image[1])}"
    if first := spool.seen(hash_text(f"{content}{image}]")):
        raise DataError(f"{row.place} repeats {first[2]}: the same prompt with the same sample. Remove one of the two.")
    files = _stored_image(row.image)
    if spool.seen(hash_text(f"{prompt[:-1]}{image}]")) is None:
        spool.add("prompts", f"{prompt[:-1]},{json.dumps(files)}]")
    stored = json.dumps([row.place, [sample.stored() for sample in row.samples], row.ratings, files])
    count = spool.add("rows", f"{prompt[:-1]},{stored[1:]}")
    return f"{',' if count > 1 else ''}{content},{canonical_json(row.ratings)}{image}]".encode()
