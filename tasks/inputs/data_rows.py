"""Reads the rows of ``data.train``: prompts with given samples, from files, tars, folders of images or datasets.

Nothing is decoded here. A row names its samples by content, so that the identity of the data does not depend on paths.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from configs.data import DataSection
from configs.errors import DataError, PromptError
from configs.fingerprint import canonical_json, fingerprint, hash_text
from configs.schema import RunConfig
from storage.backends.checksums import hash_data
from storage.backends.file_hash_cache import file_hashes
from storage.names import below
from tasks.inputs.policy_kind import kind_name
from tasks.inputs.prompt_files import READERS, Rows, hub_rows, saved_rows
from tasks.inputs.prompt_rows import RowLocation, check_metadata, text_of
from tasks.inputs.saved_datasets import is_saved_dataset

#: Suffixes of images and clips in folders and tars.
MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tiff", ".mp4", ".mov", ".webm", ".mkv")
#: Limit on the bytes of one sample in memory.
MOST_BYTES = 1 << 30
_SETTING = "data.train"
#: A range of numbers in the name of tars, as WebDataset writes it.
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COLUMN = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFile:
    """The bytes of one given sample: a text, a file, bytes of a table, or a range of a tar."""

    key: str
    """Identity of the content."""
    name: str
    """Name for messages."""
    text: str | None = None
    """The sample itself, if it is a text."""
    data: bytes | None = None
    """Its bytes, if a table holds them."""
    path: Path | None = None
    """Its file, or the tar that holds it."""
    offset: int = 0
    """First byte in the tar."""
    size: int | None = None
    """Bytes in the tar; None: the whole file."""

    def read(self) -> bytes:
        """Return the bytes of an image or clip.

        Raises:
            DataError: the file cannot be read, or has changed since the rows were read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                found = file.read(MOST_BYTES if self.size is None else self.size)
        except OSError as error:
            raise DataError(f"'{self.name}' cannot be read: {error}. Put it back.") from None
        if self.size is None and hash_data(found) != self.key:
            raise DataError(f"'{self.name}' was changed since the rows were read. Give the same command again.")
        return found


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
        ConfigError: there is none.
    """
    if config.data is None:
        raise DataError("The config has no section 'data', so there are no given samples. Add it.")
    return config.data


def given_data(config: RunConfig) -> GivenData:
    """Return the rows that a config names.

    Raises:
        DataError: the source cannot be read, a row cannot be used and ``bad_rows`` is 'stop', or none is left.
    """
    section = data_of(config)
    return _cached(section.model_dump_json(), kind_name(config) == "tokens", _stamp(section))


def _stamp(section: DataSection) -> tuple[tuple[str, int, int], ...]:
    """Return paths, times and sizes of the files that list the rows; one command reads them several times."""
    found = []
    for path in _files(section.train):
        stat = path.stat()
        found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def given_per_epoch(config: RunConfig) -> int:
    """Return the number of given samples that an epoch trains on, at most.

    Raises:
        DataError: the rows cannot be used.
    """
    section, rows = data_of(config), len(given_data(config).rows)
    return min(rows, section.groups_per_epoch or rows) * (2 if section.paired else 1)


def data_is_there(source: str) -> bool:
    """Return whether the files of a source exist; a dataset id has none."""
    return bool(_files(source)) or not (_is_tar(source) or Path(source).suffix in READERS or source.startswith("/"))


def _files(source: str) -> list[Path]:
    path = Path(source)
    if is_saved_dataset(path):
        return [path / "state.json"] if (path / "state.json").is_file() else [path / "dataset_dict.json"]
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [each for each in _tars(source) if each.is_file()] if _is_tar(source) else [path] if path.is_file() else []


@lru_cache(maxsize=4)
def _cached(section: str, texts: bool, stamp: tuple[tuple[str, int, int], ...]) -> GivenData:
    return read_given(DataSection.model_validate_json(section), texts=texts)


def read_given(section: DataSection, *, texts: bool) -> GivenData:
    """Return the rows of a section; see ``given_data``.

    Args:
        section: the section.
        texts: samples are texts, not files.
    """
    rows, refused = list[DataRow](), list[tuple[str, str]]()
    keys, first = _Keys(), dict[str, str]()
    for place, folder, row in _source_rows(section):
        try:
            made = _row(row, section, place, folder, keys, texts=texts)
            _check_new(made, first)
            rows.append(made)
        except (PromptError, DataError) as error:
            if section.bad_rows == "stop":
                raise DataError(f"{error} Or set data.bad_rows to 'leave_out'.") from None
            refused.append((str(place), str(error)))
    if not rows:
        reason = f" The first: {refused[0][1]}" if refused else ""
        raise DataError(f"{_SETTING}: '{section.train}' holds no usable row; {len(refused)} were refused.{reason}")
    return GivenData(tuple(rows), tuple(refused))


def _check_new(row: DataRow, first: dict[str, str]) -> None:
    """Refuse a row with the prompt and samples of an earlier one; note its place."""
    place = first.setdefault(fingerprint(row.identity[:3]), row.place)
    if place != row.place:
        raise DataError(f"{row.place} repeats {place}: the same prompt with the same sample. Remove one of the two.")


class _Keys:
    """Content keys of files, by folder, from the cache of hashes."""

    def __init__(self) -> None:
        self._known: dict[Path, dict[str, str]] = {}

    def of(self, folder: Path, name: str) -> str:
        known = self._known.setdefault(folder, {})
        if name not in known:
            # One pass over a folder: each call reads and writes the cache of the whole folder.
            names = sorted(
                str(each.relative_to(folder))
                for each in (folder / name).parent.iterdir()
                if each.is_file() and each.suffix.lower() in (*MEDIA, ".tar")
            )
            known |= file_hashes(folder, names if name in names else [name])
        return known[name]


def _row(
    row: Mapping[str, Any], section: DataSection, place: RowLocation, folder: Path, keys: _Keys, *, texts: bool
) -> DataRow:
    if section.prompt not in row:
        raise DataError(f"{place} has no '{section.prompt}'; it has {', '.join(row) or 'nothing'}. Set data.prompt.")
    text = text_of(row[section.prompt], place)
    columns = _columns(section)
    samples = tuple(_sample(row, name, place, folder, keys, texts=texts) for name in columns)
    if len(samples) == 2 and samples[0].key == samples[1].key:
        raise DataError(f"{place}: chosen and rejected sample are equal, so the pair says nothing. Remove the row.")
    used = {section.prompt, *columns, section.rating} - {*section.keep}
    metadata = {str(name): value for name, value in row.items() if name not in used}
    check_metadata(metadata, place)
    try:
        canonical_json(metadata)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: columns must be plain JSON values: {error}.") from None
    ratings = (1.0, 0.0) if section.paired else (_rating(row, section, place),)
    return DataRow(place=str(place), text=text, metadata=metadata, samples=samples, ratings=ratings)


def _columns(section: DataSection) -> tuple[str, ...]:
    return (str(section.chosen), str(section.rejected)) if section.paired else (section.sample,)


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
            f"{place}: the rating '{section.rating}' is {given!r}, but data.scale is {low} to {high}. Mend the row, or "
            "set data.scale."
        )
    return value


def _sample(
    row: Mapping[str, Any], column: str, place: RowLocation, folder: Path, keys: _Keys, *, texts: bool
) -> GivenFile:
    value = row.get(column)
    if isinstance(value, GivenFile):
        return value
    if texts:
        return _text(value, column, place)
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        return GivenFile(key=hash_data(value["bytes"]), name=str(place), data=value["bytes"])
    if isinstance(value, bytes):
        return GivenFile(key=hash_data(value), name=str(place), data=value)
    if not isinstance(value, str) or not value:
        raise DataError(f"{place} has no '{column}', the path of an image or clip. Add it, or set data.sample.")
    try:
        path = below(folder, value)
    except ValueError as error:
        raise DataError(f"{place}: {error}. Samples are below the folder of the rows; put it there.") from None
    if not path.is_file():
        found = "is no regular file" if path.exists() else "does not exist. Paths are relative to the file of the rows"
        raise DataError(f"{place}: '{value}' {found}.")
    return GivenFile(key=keys.of(folder, value), name=f"{place}: {value}", path=path)


def _text(value: Any, column: str, place: RowLocation) -> GivenFile:
    if isinstance(value, list):
        value = _reply(value, place)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: '{column}' is no text, or empty. Write the completion, or set data.sample.")
    return GivenFile(key=hash_text(value), name=str(place), text=value)


def _reply(messages: Sequence[Any], place: RowLocation) -> str:
    """Return the assistant's text of a chat of one message, as the chosen and rejected columns of chats hold it."""
    if len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role") == "assistant":
        return str(messages[0].get("content", ""))
    raise DataError(
        f"{place} holds a chat of {len(messages)} messages; one message of the assistant can be trained on."
    )


def _source_rows(section: DataSection) -> Iterator[tuple[RowLocation, Path, Mapping[str, Any]]]:
    """Yield place, folder and columns of each row.

    Raises:
        DataError: the source cannot be read.
    """
    source, path = section.train, Path(section.train)
    if _is_tar(source):
        for tar in _tars(source):
            for number, row in enumerate(_tar_rows(tar, section), 1):
                yield RowLocation(_SETTING, str(tar), number), tar.parent, row
        return
    folder = path if path.is_dir() else path.parent
    try:
        for number, row in _table_rows(section):
            yield RowLocation(_SETTING, source, number), folder, row
    except PromptError as error:
        raise DataError(f"{_SETTING}: {error}") from None


def _table_rows(section: DataSection) -> Rows:
    source, path = section.train, Path(section.train)
    if is_saved_dataset(path):
        return saved_rows(source, section, _SETTING)
    if path.is_dir():
        return _folder_rows(path, section)
    if path.suffix.lower() not in READERS:
        return hub_rows(source, section, _SETTING)
    if not path.is_file():
        raise DataError(f"{_SETTING}: '{source}' does not exist. Paths are relative to the config file.")
    return READERS[path.suffix.lower()](source, section.prompt)


def _folder_rows(folder: Path, section: DataSection) -> Rows:
    """Yield the images of a folder: those of ``metadata.jsonl``, as in datasets, or all, with their text files."""
    listed = folder / "metadata.jsonl"
    if listed.is_file():
        for number, row in READERS[".jsonl"](str(listed), section.prompt):
            name = row.get("file_name")
            yield number, {**{key: each for key, each in row.items() if key != "file_name"}, section.sample: name}
        return
    images = sorted(each for each in folder.rglob("*") if each.suffix.lower() in MEDIA)
    if not images:
        raise DataError(f"{_SETTING}: the folder '{folder}' has neither metadata.jsonl nor images. Name another.")
    for number, image in enumerate(images, 1):
        caption = image.with_suffix(".txt")
        name = str(image.relative_to(folder))
        if not caption.is_file():
            yield number, {section.prompt: None, section.sample: name}
            continue
        yield number, {section.prompt: caption.read_text("utf-8", errors="strict").strip(), section.sample: name}


def _is_tar(source: str) -> bool:
    return source.lower().endswith(".tar")


def _tars(source: str) -> list[Path]:
    found = _BRACES.search(source)
    if found is None:
        return [Path(source)]
    first, last = found.groups()
    names = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [Path(source[: found.start()] + name + source[found.end() :]) for name in names]


def _tar_rows(tar: Path, section: DataSection) -> Iterator[Mapping[str, Any]]:
    """Yield the samples of a WebDataset tar: members of one stem are the columns of a row, by extension.

    Texts and JSON are read; other members are named by their range of the file.
    """
    row: dict[str, Any] = {}
    stem = None
    try:
        digest = file_hashes(tar.parent, [tar.name])[tar.name]
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                name, _, extension = base.partition(".")
                if (folder, name) != stem and row:
                    yield row
                    row = {}
                stem, extension = (folder, name), extension.lower()
                if extension in ("txt", "json", "cls", section.prompt) or extension == section.rating:
                    data = archive.extractfile(member)
                    assert data is not None
                    text = data.read(1 << 24).decode("utf-8")
                    row |= json.loads(text) if extension == "json" else {extension: text.strip()}
                else:
                    given = GivenFile(
                        key=f"{digest}/{member.name}",
                        name=f"{tar.name}: {member.name}",
                        path=tar,
                        offset=member.offset_data,
                        size=member.size,
                    )
                    media = f".{extension}" in MEDIA and section.sample == _COLUMN and not section.paired
                    row[section.sample if media else extension] = given
        if row:
            yield row
    except (OSError, tarfile.TarError, ValueError, TypeError) as error:
        raise DataError(f"{_SETTING}: '{tar}' cannot be read as a WebDataset tar: {error}.") from None
