"""The rows of ``data.train``: prompts with given samples, checked and named by content.

The identity of the data depends on no path, and nothing is decoded to compute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from configs.data import DataSection
from configs.errors import DataError, PromptError
from configs.fingerprint import canonical_json, fingerprint, hash_text
from configs.schema import RunConfig
from storage.backends.checksums import hash_data
from storage.backends.file_hash_cache import file_hashes
from tasks.inputs.data_sources import MEDIA, GivenFile, source_files, source_rows
from tasks.inputs.prompt_rows import ImageSource, RowLocation, check_metadata, file_below, images_of, text_of

_SETTING = "data.train"
#: What a column 'tie' holds for a pair of which neither sample is better.
_TRUE = ("true", "1", "1.0", "yes")


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
    image: tuple[tuple[ImageSource, ...], str] | None
    """Files of the prompt's input images and their joined content keys, if it has some."""
    ratings: tuple[float | None, ...]
    """Rating of each sample on the section's scale; 1 and 0 for a pair, 0.5 for a tie; None if rows have no ratings."""

    @property
    def identity(self) -> list[Any]:
        """Everything that training depends on, without paths."""
        image = [] if self.image is None else [self.image[1]]
        return [self.text, dict(self.metadata), [sample.key for sample in self.samples], list(self.ratings), *image]


@dataclass(frozen=True, slots=True)
class GivenData:
    """All usable rows, and the others with reasons."""

    rows: tuple[DataRow, ...]
    """Usable rows, in order."""
    refused: tuple[tuple[str, str], ...]
    """Place and reason of each row that is left out."""

    @property
    def identity(self) -> str:
        """Identity of the data by content and order."""
        return fingerprint([row.identity for row in self.rows])


def data_of(config: RunConfig) -> DataSection:
    """Return the section of given data.

    Raises:
        DataError: there is none.
    """
    if config.data is None:
        raise DataError("The config has no section 'data', so there are no given samples. Add it.")
    return config.data


def given_data(config: RunConfig) -> GivenData:
    """Return the rows that a config names; one command reads them several times, so the last ones stay in memory.

    Raises:
        DataError: the source cannot be read, a row cannot be used and ``bad_rows`` is 'stop', or none is left.
    """
    section = data_of(config)
    stats = ((path, path.stat()) for path in source_files(section.train))
    stamps = tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in stats)
    return _unchanged(section.model_dump_json(), stamps)


@lru_cache(maxsize=4)
def _unchanged(section: str, stamps: tuple[tuple[str, int, int], ...]) -> GivenData:
    return read_given(DataSection.model_validate_json(section))


def given_per_epoch(config: RunConfig) -> int:
    """Return the number of given samples that an epoch trains on, at most.

    Raises:
        DataError: the rows cannot be used.
    """
    section, rows = data_of(config), len(given_data(config).rows)
    return min(rows, section.groups_per_epoch or rows) * (2 if section.paired else 1)


def read_given(section: DataSection) -> GivenData:
    """Return the rows of a section; see ``given_data``."""
    refused = list[tuple[str, str]]()

    def refuse(place: str, error: Exception) -> None:
        if section.bad_rows == "stop":
            raise DataError(f"{error} Or set data.bad_rows to 'leave_out'.") from None
        refused.append((place, str(error)))

    rows = list[DataRow]()
    for place, folder, row in source_rows(section):
        try:
            rows.append(_row(row, section, place, folder))
        except (PromptError, DataError) as error:
            refuse(str(place), error)
    first, kept = dict[str, str](), list[DataRow]()
    for made in _keyed(rows):
        try:
            _check_content(made, first)
            kept.append(made)
        except DataError as error:
            refuse(made.place, error)
    if not kept:
        reason = f" The first: {refused[0][1]}" if refused else ""
        raise DataError(f"{_SETTING}: '{section.train}' holds no usable row; {len(refused)} were refused.{reason}")
    return GivenData(tuple(kept), tuple(refused))


def _row(row: Mapping[str, Any], section: DataSection, place: RowLocation, folder: Path) -> DataRow:
    if section.prompt not in row:
        raise DataError(f"{place} has no '{section.prompt}'; it has {', '.join(row) or 'nothing'}. Name another.")
    asked = row[section.prompt]
    text = asked if asked == "" and not section.trained else text_of(asked, place)
    columns = (str(section.chosen), str(section.rejected)) if section.paired else (section.sample,)
    samples = tuple(_sample(row, name, place, folder) for name in columns)
    used = {section.prompt, *columns, section.rating, section.prompt_image} - {*section.keep}
    image = None if section.prompt_image is None else images_of(row, section.prompt_image, place, folder)
    metadata = {str(name): value for name, value in row.items() if name not in used}
    tie = section.paired and str(row.get("tie", "")).strip().lower() in _TRUE
    if not section.trained:
        # Several raters, or one who has no name, may judge the same samples.
        metadata = {"rater": str(row.get("rater") or ""), "row": place.number}
    elif tie:
        raise DataError(f"{place} is a tie: neither sample is better, so there is nothing to learn. Remove the row.")
    check_metadata(metadata, place)
    try:
        canonical_json(metadata)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: columns must be plain JSON values: {error}.") from None
    ratings = ((0.5, 0.5) if tie else (1.0, 0.0)) if section.paired else (_rating(row, section, place),)
    return DataRow(place=str(place), text=text, metadata=metadata, samples=samples, image=image, ratings=ratings)


def _rating(row: Mapping[str, Any], section: DataSection, place: RowLocation) -> float | None:
    if section.rating is None:
        return None
    given, (low, high) = row.get(section.rating), section.scale
    try:
        # CSV files hold texts.
        value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else None
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise DataError(
            f"{place}: the rating '{section.rating}' is {given!r}, but the scale is {low} to {high}. Mend the row, or "
            "set the scale."
        )
    return value


def _sample(row: Mapping[str, Any], column: str, place: RowLocation, folder: Path) -> GivenFile:
    value = row.get(column)
    if isinstance(value, GivenFile):
        return value
    if isinstance(value, Mapping):
        # An image or clip of datasets.
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return GivenFile(name=f"{place}, {column}", key=hash_data(value), data=value)
    if isinstance(value, list):
        value = _reply(value, place)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{place} has no '{column}', the path of an image or clip, or a text. Add it, or name another column."
        )
    if Path(value).suffix.lower() not in MEDIA:
        return GivenFile(name=f"{place}, {column}", key=hash_text(value), text=value)
    try:
        file_below(folder, value)
    except ValueError as error:
        raise DataError(f"{place}: {error}.") from None
    return GivenFile(name=f"{place}: {value}", folder=folder, path=value)


def _reply(messages: Sequence[Any], place: RowLocation) -> str:
    """Return the assistant's text of a chat of one message, as the chosen and rejected columns of chats hold it."""
    if len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role") == "assistant":
        return str(messages[0].get("content", ""))
    raise DataError(f"{place} holds a chat of {len(messages)} messages; one of the assistant can be trained on.")


def _keyed(rows: Iterable[DataRow]) -> Iterable[DataRow]:
    """Yield rows with the content keys of their files, which are hashed once, and from a cache if unchanged."""
    listed = list(rows)
    names: dict[Path, dict[str, None]] = {}
    for sample in (sample for row in listed for sample in row.samples if not sample.key):
        names.setdefault(sample.folder, {})[sample.path] = None
    keys = {folder: file_hashes(folder, list(paths)) for folder, paths in names.items()}
    for row in listed:
        samples = (each if each.key else replace(each, key=keys[each.folder][each.path]) for each in row.samples)
        yield replace(row, samples=tuple(samples))


def _check_content(row: DataRow, first: dict[str, str]) -> None:
    """Refuse a pair of equal samples, and a row with the prompt and samples of an earlier one."""
    if len(row.samples) == 2 and row.samples[0].key == row.samples[1].key:
        raise DataError(f"{row.place}: chosen and rejected sample are equal, so the pair says nothing. Remove the row.")
    place = first.setdefault(fingerprint([*row.identity[:3], *row.identity[4:]]), row.place)
    if place != row.place:
        raise DataError(f"{row.place} repeats {place}: the same prompt with the same sample. Remove one of the two.")
