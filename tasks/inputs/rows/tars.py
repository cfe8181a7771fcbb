"""Rows of WebDataset tars: members of one stem are the columns of a row, by extension. Nothing is extracted.

Member names are never paths here. A member that cannot be used makes its row unusable and no other.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from flowmill.configs.errors import DataError
from flowmill.storage.backends.range_hash_cache import RangeHashes
from flowmill.tasks.inputs.rows.bounds import MOST_TEXT, BoundedTar, too_many_bytes
from flowmill.tasks.inputs.rows.lines import DAMAGED, File, unpacked
from flowmill.tasks.inputs.rows.row import MEDIA, Media, Names, Rows, is_of_mac, is_unicode

#: Extensions that are always read as texts.
_TEXTS = ("txt", "json", "cls")
_COLUMN = "image"


def tar_rows(file: File, names: Names) -> Rows:
    """Yield the rows of a tar, and an error for each that cannot be read.

    Texts and JSON are read; other members are named by their range of the tar. A damaged tar has no more rows after the
    damage.
    """
    number, row = 1, _Row("")
    with (
        io.BufferedReader(cast(Any, unpacked(file.path, file.name)), 1 << 16) as opened,
        # A copy has no cache.
        RangeHashes(opened, Path(file.path) if file.path == file.name else None) as hashes,
    ):
        tar = _Tar(file.name, opened, hashes, names)
        try:
            for member in _members(opened):
                stem, extension = _named(member)
                if stem != row.stem:
                    if row.members:
                        yield number, row.read(f"{file.name}, row {number}")
                    number, row = number + bool(row.members), _Row(stem)
                _add(row, extension, member, tar)
        except (*DAMAGED, tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            # The row before may lack members, so it is not used.
            problem = f"{file.name}, row {number}: cannot be read as a WebDataset tar: {error}. Write it again."
            yield number, DataError(problem)
        else:
            if row.members:
                yield number, row.read(f"{file.name}, row {number}")


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar that are files of people; raise TarError where it is damaged."""
    bounded = BoundedTar(file)
    with tarfile.open(fileobj=cast(Any, bounded), mode="r:") as archive:
        for member in archive:
            # It keeps all members for random access, and headers of all later members.
            archive.members = []  # type: ignore[attr-defined]
            if member.size < 0 or too_many_bytes(sum(map(len, archive.pax_headers.values())), MOST_TEXT):
                # After a negative size the next header would be looked for before this one, forever.
                raise tarfile.TarError(f"member {member.name[:200]!r} has {member.size} bytes, or too large headers")
            bounded.next_member()
            if not (member.isdir() or is_of_mac(member.name)):
                yield member
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.TarError(f"at byte {archive.offset} is neither a member nor the mark of the end")


@dataclass
class _Row:
    stem: str
    columns: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    members: int = 0

    def read(self, place: str) -> Mapping[str, Any] | DataError:
        return DataError(f"{place}: {self.problem}") if self.problem else self.columns


class _Tar(NamedTuple):
    name: str
    file: IO[bytes]
    hashes: RangeHashes
    names: Names


def _named(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return stem and extension of a member: the extension begins at the first point of its last part."""
    folder, slash, base = member.name.rpartition("/")
    name, _, extension = base.partition(".")
    return f"{folder}{slash}{name}", extension.lower()


def _add(row: _Row, extension: str, member: tarfile.TarInfo, tar: _Tar) -> None:
    row.members += 1
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
    if not member.isreg() or member.issparse():
        raise ValueError("is a link, a device or a sparse file, and no regular one")
    if not is_unicode(member.name):
        raise ValueError("has a name that is not UTF-8")
    if extension in _TEXTS or extension in tar.names.texts:
        if large := too_many_bytes(member.size, MOST_TEXT):
            raise ValueError(large)
        tar.file.seek(member.offset_data)
        data = tar.file.read(member.size)
        if len(data) < member.size:
            raise tarfile.ReadError("unexpected end of data")
        text = data.decode("utf-8").strip()
        if extension != "json":
            return extension, text
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"holds {type(values).__name__}, not an object")
        return None, values
    if large := too_many_bytes(member.size):
        raise ValueError(large)
    name = f"{tar.name.rpartition('/')[2]}: {member.name}"
    media = Media(name, tar.hashes.of(member.offset_data, member.size), member.offset_data, member.size)
    is_sample = f".{extension}" in MEDIA and tar.names.sample == _COLUMN
    return _COLUMN if is_sample else extension, media
