"""Rows of WebDataset tars: members of one stem are the columns of a row, by extension. Nothing is extracted.

Member names are never paths here. A member that cannot be used makes its row unusable and no other.
"""

from __future__ import annotations

import contextlib
import glob
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from configs.data import DataSection
from configs.errors import DataError
from storage.backends.file_hash_cache import file_hashes
from tasks.inputs.given_file import MEDIA, MOST_TEXT, GivenFile, is_unicode, too_many_bytes
from tasks.inputs.remote_files import copied, is_remote, remote_matches

#: A range of numbers in the name of tars, and the mark between names, as WebDataset writes them.
_BRACES, _AND = re.compile(r"\{(\d+)\.\.(\d+)\}"), "::"
#: Extensions that are always read as texts.
_TEXTS = ("txt", "json", "cls")
_COLUMN = "image"


def is_tar(source: str) -> bool:
    """Return whether a source names tars."""
    return source.lower().endswith(".tar")


def tar_paths(source: str) -> list[str]:
    """Return the tars that a source names: with ranges ({000..015}), patterns (*, ?, [...]), or several with ::.

    Raises:
        DataError: a pattern matches none.
    """
    return [path for part in source.split(_AND) for name in _expanded(part) for path in _matching(name)]


def _expanded(name: str) -> list[str]:
    found = _BRACES.search(name)
    if found is None:
        return [name]
    first, last = found.groups()
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [each for number in numbers for each in _expanded(name[: found.start()] + number + name[found.end() :])]


def _matching(name: str) -> list[str]:
    if not glob.has_magic(name) or Path(name).exists():
        return [name]
    if found := remote_matches(name) if is_remote(name) else sorted(glob.glob(name)):
        return found
    raise DataError(f"no tar matches '{name}'. Paths are relative to the config file.")


def tar_rows(tar: str, section: DataSection) -> Iterator[Mapping[str, Any] | DataError]:
    """Yield the rows of a tar, and an error without its place for each row that cannot be read.

    Texts and JSON are read; other members are named by their range of the tar. A damaged tar has no more rows after the
    damage.

    Raises:
        DataError: there is no such tar.
    """
    with _opened(tar) as (file, digest):
        row = _Row("")
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    # It keeps all members for random access.
                    archive.members = []  # type: ignore[attr-defined]
                    if member.size < 0:
                        # The next header would be looked for before this one, forever.
                        raise tarfile.TarError(f"member {member.name[:200]!r} has {member.size} bytes")
                    if member.isdir():
                        continue
                    stem, extension = _named(member)
                    if stem != row.stem:
                        yield from row.made()
                        row = _Row(stem)
                    _add(row, extension, member, _Tar(tar, archive, digest, section))
                file.seek(archive.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.TarError(f"at byte {archive.offset} is neither a member nor the mark of the end")
        except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
            # The row before may lack members, so it is not used.
            yield DataError(f"cannot be read as a WebDataset tar: {error}. Write it again.")
        else:
            yield from row.made()


@dataclass
class _Row:
    stem: str
    columns: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def made(self) -> Iterator[Mapping[str, Any] | DataError]:
        if self.problem:
            yield DataError(self.problem)
        elif self.columns:
            yield self.columns


@dataclass(frozen=True)
class _Tar:
    path: str
    archive: tarfile.TarFile
    digest: str
    section: DataSection


@contextlib.contextmanager
def _opened(tar: str) -> Iterator[tuple[IO[bytes], str]]:
    """Give a tar for reading, and its checksum."""
    if is_remote(tar):
        with copied(tar) as opened:
            yield opened
        return
    path = Path(tar)
    try:
        digest, file = file_hashes(path.parent, [path.name])[path.name], path.open("rb")
    except OSError as error:
        raise DataError(f"'{tar}' cannot be read as a WebDataset tar: {error}.") from None
    with file:
        yield file, digest


def _named(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return stem and extension of a member: the extension begins at the first point of its last part."""
    folder, slash, base = member.name.rpartition("/")
    name, _, extension = base.partition(".")
    return f"{folder}{slash}{name}", extension.lower()


def _add(row: _Row, extension: str, member: tarfile.TarInfo, tar: _Tar) -> None:
    try:
        column, value = _column(extension, member, tar)
        new = value if column is None else {column: value}
        if again := next((name for name in new if name in row.columns), None):
            raise ValueError(f"repeats '{again}' of the same sample")
        row.columns |= new
    except (ValueError, TypeError, RecursionError) as error:
        row.problem = row.problem or f"member {member.name[:200]!r} {error}. Write the tar again, or remove the member."


def _column(extension: str, member: tarfile.TarInfo, tar: _Tar) -> tuple[str | None, Any]:
    """Return name and value of a column; None and several columns for JSON."""
    section = tar.section
    if not member.isreg() or member.issparse():
        raise ValueError("is a link, a device or a sparse file, and no regular one")
    if not is_unicode(member.name):
        raise ValueError("has a name that is not UTF-8")
    if extension in (*_TEXTS, section.prompt, section.rating):
        if large := too_many_bytes(member.size, MOST_TEXT):
            raise ValueError(large)
        data = tar.archive.extractfile(member)
        assert data is not None
        text = data.read().decode("utf-8").strip()
        if extension != "json":
            return extension, text
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"holds {type(found).__name__}, not an object")
        return None, found
    if large := too_many_bytes(member.size):
        raise ValueError(large)
    folder, _, name = tar.path.rpartition("/")
    given = GivenFile(
        name=f"{name}: {member.name}",
        key=f"{tar.digest}/{member.name}",
        folder=folder,
        path=name,
        offset=member.offset_data,
        size=member.size,
    )
    is_sample = f".{extension}" in MEDIA and section.sample == _COLUMN and not section.paired
    return section.sample if is_sample else extension, given
