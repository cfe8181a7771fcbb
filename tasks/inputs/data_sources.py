"""Reads the rows of ``data.train`` from files, tars, folders of images or datasets. Nothing is decoded here."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.data import DataSection
from configs.errors import DataError, PromptError
from configs.folders import files_below
from storage.backends.checksums import hash_data
from storage.backends.file_hash_cache import file_hashes
from tasks.inputs.prompt_files import READERS, Rows, hub_rows, saved_rows
from tasks.inputs.prompt_rows import RowLocation
from tasks.inputs.saved_datasets import is_saved_dataset

#: Suffixes of images and clips.
MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".mp4", ".mov", ".webm", ".mkv")
#: Most bytes of one sample, and of one text in a tar.
_MOST_BYTES, _MOST_TEXT = 1 << 30, 1 << 24
_SETTING = "data.train"
#: A range of numbers in the name of tars, as WebDataset writes it.
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COLUMN = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFile:
    """The content of one given sample: a text, a file, bytes of a table, or a range of a tar."""

    name: str
    """Name for messages."""
    key: str = ""
    """Identity of the content; empty for a file that was not read yet."""
    text: str | None = None
    """The sample itself, if it is a text."""
    data: bytes | None = None
    """Its bytes, if a table holds them."""
    folder: Path = Path()
    """Folder of its file, or of the tar that holds it."""
    path: str = ""
    """Path of the file below the folder."""
    offset: int = 0
    """First byte in the tar."""
    size: int | None = None
    """Bytes in the tar; None: the whole file."""

    def read(self) -> bytes:
        """Return the bytes of an image or clip.

        Raises:
            DataError: it is a text, cannot be read, or has changed since the rows were read.
        """
        if self.text is not None:
            raise DataError(
                f"{self.name}: {self.text[:60]!r} is a text, not the path of an image or clip. Mend the row."
            )
        if self.data is not None:
            return self.data
        try:
            with (self.folder / self.path).open("rb") as file:
                file.seek(self.offset)
                found = file.read(_MOST_BYTES if self.size is None else self.size)
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}. Put it back.") from None
        if self.size is None and hash_data(found) != self.key:
            raise DataError(f"{self.name} was changed since the rows were read. Give the same command again.")
        return found


def source_files(source: str) -> list[Path]:
    """Return the existing files that list the rows of a source; none for a dataset id."""
    path = Path(source)
    if is_saved_dataset(path):
        return [each for each in (path / "state.json", path / "dataset_dict.json") if each.is_file()]
    if path.is_dir():
        return [path / name for name in files_below(path)]
    return [each for each in (_tars(source) if _is_tar(source) else [path]) if each.is_file()]


def is_there(source: str) -> bool:
    """Return whether a source can be read here; a dataset id always counts as there."""
    is_local = _is_tar(source) or Path(source).suffix.lower() in READERS or source.startswith("/")
    return bool(source_files(source)) or not is_local


def source_rows(section: DataSection) -> Iterator[tuple[RowLocation, Path, Mapping[str, Any]]]:
    """Yield location, folder and columns of each row.

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
        raise DataError(f"{_SETTING}: {str(error).removeprefix(f'{_SETTING}: ')}") from None


def _table_rows(section: DataSection) -> Rows:
    source, path = section.train, Path(section.train)
    if is_saved_dataset(path):
        return saved_rows(source, section, _SETTING)
    if path.is_dir():
        return _folder_rows(path, section)
    if path.suffix.lower() not in READERS:
        return _hub_rows(section)
    if not path.is_file():
        raise DataError(f"{_SETTING}: '{source}' does not exist. Paths are relative to the config file.")
    return READERS[path.suffix.lower()](source, section.prompt)


def _hub_rows(section: DataSection) -> Rows:
    """Yield the rows of a hub dataset; images, which datasets decodes, as PNG files."""
    from PIL import Image

    for number, row in hub_rows(section.train, section, _SETTING):
        yield number, {name: _png(each) if isinstance(each, Image.Image) else each for name, each in row.items()}


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _folder_rows(folder: Path, section: DataSection) -> Rows:
    """Yield the images of a folder: those of ``metadata.jsonl``, as in datasets, or all, with their text files."""
    listed = folder / "metadata.jsonl"
    if listed.is_file():
        for number, row in READERS[".jsonl"](str(listed), section.prompt):
            others = {key: each for key, each in row.items() if key != "file_name"}
            yield number, {**others, section.sample: row.get("file_name")}
        return
    images = [name for name in files_below(folder) if Path(name).suffix.lower() in MEDIA]
    if not images:
        raise DataError(f"{_SETTING}: the folder '{folder}' has neither metadata.jsonl nor images. Name another.")
    for number, name in enumerate(images, 1):
        caption = (folder / name).with_suffix(".txt")
        text = caption.read_bytes().decode("utf-8", errors="replace").strip() if caption.is_file() else None
        yield number, {section.prompt: text, section.sample: name}


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
    """Yield the rows of a WebDataset tar: members of one stem are the columns of a row, by extension.

    Texts and JSON are read; other members are named by their range of the file.
    """
    row, stem = dict[str, Any](), ("", "")
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
                stem = (folder, name)
                row |= _member(archive, member, extension.lower(), section, tar, digest)
        if row:
            yield row
    except (OSError, tarfile.TarError, ValueError, TypeError) as error:
        raise DataError(f"{_SETTING}: '{tar}' cannot be read as a WebDataset tar: {error}.") from None


def _member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str, section: DataSection, tar: Path, digest: str
) -> dict[str, Any]:
    if extension in ("txt", "json", "cls", section.prompt, section.rating):
        data = archive.extractfile(member)
        assert data is not None
        text = data.read(_MOST_TEXT).decode("utf-8")
        return dict(json.loads(text)) if extension == "json" else {extension: text.strip()}
    given = GivenFile(
        name=f"{tar.name}: {member.name}",
        key=f"{digest}/{member.name}",
        folder=tar.parent,
        path=tar.name,
        offset=member.offset_data,
        size=member.size,
    )
    is_sample = f".{extension}" in MEDIA and section.sample == _COLUMN and not section.paired
    return {section.sample if is_sample else extension: given}
