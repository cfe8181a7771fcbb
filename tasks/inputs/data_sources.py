"""Reads the rows of given data from files, tars, folders of images or datasets. Nothing is decoded here."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.data import DataSection
from configs.errors import DataError, PromptError
from configs.folders import files_below
from tasks.inputs.data_tars import is_tar, tar_paths, tar_rows
from tasks.inputs.given_file import MEDIA, MOST_TEXT, too_many_bytes
from tasks.inputs.prompt_files import READERS, ReadRows, hub_rows, read_rows
from tasks.inputs.prompt_rows import RowLocation
from tasks.inputs.remote_files import is_remote
from tasks.inputs.saved_datasets import is_saved_dataset

#: Rows of a table that are passed by instead of opening it again at a later one.
_NEAR = 1000
#: File of a folder of images that lists its rows, as in datasets.
_LISTED = "metadata.jsonl"
#: Columns of a row, or the reason why it cannot be read.
Row = Mapping[str, Any] | DataError


def source_files(source: str) -> list[Path]:
    """Return the existing files that list the rows of a source; none for a dataset id."""
    path = Path(source)
    if is_saved_dataset(path):
        return [each for each in (path / "state.json", path / "dataset_dict.json") if each.is_file()]
    if path.is_dir():
        return [path / name for name in files_below(path)]
    if is_tar(source):
        try:
            return [Path(tar) for tar in tar_paths(source) if not is_remote(tar) and Path(tar).is_file()]
        except DataError:
            return []
    return [path] if path.is_file() else []


def is_there(source: str) -> bool:
    """Return whether a source can be read here; a dataset id, or a file on S3, always counts as there."""
    if is_remote(source):
        return True
    is_local = is_tar(source) or Path(source).suffix.lower() in READERS or source.startswith("/")
    return bool(source_files(source)) or not is_local


def source_rows(section: DataSection) -> Iterator[tuple[RowLocation, Path, Row]]:
    """Yield location, folder and columns of each row, or the reason why a row cannot be read.

    Raises:
        DataError: the source cannot be read.
    """
    source, path, setting = section.train, Path(section.train), section.setting
    try:
        for tar in tar_paths(source) if is_tar(source) else ():
            for number, row in enumerate(tar_rows(tar, section), 1):
                place = RowLocation(setting, tar, number)
                yield place, Path(tar).parent, DataError(f"{place}: {row}") if isinstance(row, DataError) else row
        folder = path if path.is_dir() else path.parent
        names: list[str] = []
        if path.is_dir() and not is_saved_dataset(path):
            # Its images have no order that people see, so their names are their places.
            names = [] if (path / _LISTED).is_file() else _images(path)
            source = source if names else str(path / _LISTED)
        for number, found in () if is_tar(source) else _table_rows(section):
            row = _data_error(found, setting) if isinstance(found, PromptError) else found
            place = RowLocation(setting, f"{source}/{names[number - 1]}" if names else source, number)
            yield place, folder, row
    except (DataError, PromptError) as error:
        raise _data_error(error, setting) from None


def _data_error(error: Exception, setting: str) -> DataError:
    return DataError(f"{setting}: {str(error).removeprefix(f'{setting}: ')}")


def _table_rows(section: DataSection, start: int = 0) -> ReadRows:
    """Yield the rows of a source that is no tar; of tables from the one after the first ``start``."""
    source, path = section.train, Path(section.train)
    if is_saved_dataset(path):
        from tasks.inputs.arrow_rows import saved_rows

        return saved_rows(source, section, section.setting, start)
    if path.is_dir():
        return _folder_rows(path, section)
    if path.suffix.lower() not in READERS:
        return _hub_rows(section, start)
    if not path.is_file():
        raise DataError(f"'{source}' does not exist. Paths are relative to the config file.")
    if path.suffix.lower() == ".parquet":
        from tasks.inputs.arrow_rows import parquet_rows

        return parquet_rows(source, start)
    return read_rows(source, section.prompt)


class TableCells:
    """Reads cells of a table again, most quickly in the order of its rows."""

    def __init__(self, section: DataSection) -> None:
        """Bind to the table, which is opened on the first read."""
        self._section = section
        self._rows: Iterator[tuple[int, Any]] = iter(())
        self._number, self._row = 0, dict[str, Any]()

    def read(self, number: int, column: str) -> bytes:
        """Return the bytes in a column of a row.

        Raises:
            DataError: the table has changed since the rows were read.
        """
        try:
            if number < self._number or number > self._number + _NEAR or not self._number:
                self._rows, self._number = iter(_table_rows(self._section, number - 1)), number - 1
            while self._number < number:
                self._number, self._row = next(self._rows)
            return bytes(bytes_of(self._row[column]) or b"")
        except (PromptError, StopIteration, KeyError, TypeError):
            self._number = 0
            raise DataError(
                f"'{self._section.train}' was changed since the rows were read. Give the same command again."
            ) from None


def bytes_of(value: Any) -> bytes | None:
    """Return the bytes that a table has for an image or clip: as they are, or as datasets writes them."""
    found = value.get("bytes") if isinstance(value, Mapping) else value
    return found if isinstance(found, bytes) else None


def _hub_rows(section: DataSection, start: int) -> ReadRows:
    """Yield the rows of a hub dataset; images, which datasets decodes, as PNG files."""
    from PIL import Image

    for number, row in hub_rows(section.train, section, section.setting, start):
        yield number, {name: _png(each) if isinstance(each, Image.Image) else each for name, each in row.items()}


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _folder_rows(folder: Path, section: DataSection) -> ReadRows:
    """Yield the images of a folder: those that a file lists, or all, with their text files."""
    listed = folder / _LISTED
    if listed.is_file():
        for number, row in read_rows(str(listed), section.prompt):
            if isinstance(row, PromptError):
                yield number, row
            else:
                others = {key: each for key, each in row.items() if key != "file_name"}
                yield number, {**others, section.sample: row.get("file_name")}
        return
    for number, name in enumerate(_images(folder), 1):
        file = (folder / name).with_suffix(".txt")
        try:
            yield number, {section.prompt: _caption(file, empty=not section.trained), section.sample: name}
        except (OSError, ValueError) as error:
            remedy = f"Write '{file.name}' next to it in UTF-8, or remove the image."
            yield number, PromptError(f"the text of '{folder / name}' cannot be used: {error}. {remedy}")


def _images(folder: Path) -> list[str]:
    images = [name for name in files_below(folder) if Path(name).suffix.lower() in MEDIA]
    if not images:
        raise DataError(f"the folder '{folder}' has neither {_LISTED} nor images. Name another.")
    return images


def _caption(file: Path, *, empty: bool) -> str:
    """Return the text of an image, which may be empty or not; raise OSError or ValueError if it cannot be used."""
    if not file.is_file():
        raise ValueError("it is missing")
    if large := too_many_bytes(file.stat().st_size, MOST_TEXT):
        raise ValueError(f"it {large}")
    text = file.read_text("utf-8-sig").strip()
    if not text and not empty:
        raise ValueError("it is empty")
    return text
