"""Records of runs are written twice, so that lost, damaged, swapped or duplicated ones are detected and restored.

A record is created after its copy, which lies below ``copies/`` of its run; both contain the path of the record.
Readers only read the record. Records of earlier versions have no copy and do not contain their path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowmill.configs.errors import CorruptError
from flowmill.storage import layout
from flowmill.storage.artifacts.checksummed_json import seal, unseal
from flowmill.storage.artifacts.records import AT, content
from flowmill.storage.backends.base import Root
from flowmill.storage.layout import QUARANTINE

#: Seconds within which the writer of a copy also writes the record.
_UNDER_WAY_S = 0.5
#: The first record of a run, and the series of which every record counts.
LOGS = frozenset({"run.json", "configs", layout.LINEAGE, "preferences", "ratings"})


@dataclass(frozen=True, slots=True)
class Loss:
    """A record of a run that is missing or differs from its written content."""

    path: str
    """Actual or expected path of the record or its copy."""
    kind: str
    """missing or corrupt."""
    message: str
    """Evidence and remedy."""


def write(root: Root, path: str, data: Mapping[str, Any]) -> bool:
    """Write a record and its copy; False if another one has, or had, this path.

    If the writer of another record stopped after its copy, the record is completed from it.
    """
    sealed, copy = seal({**data, AT: path}), layout.copy_of(path)
    if not root.create(copy, sealed) and (other := root.read(copy)) != sealed:
        if other is not None and is_whole(other, path):
            root.create(path, other)
        return False
    # Another writer may have completed this one.
    return root.create(path, sealed) or root.read(path) == sealed


def read_with_copies(
    root: Root, copies: list[str], records: Callable[[], list[str]]
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the content of records, whose paths are listed after the copies were read, and of copies, by record."""
    copied = {layout.record_of(path): data for path, data in _read(root, copies).items()}
    read = _read(root, records())
    missing = [path for path in copied if path not in read]
    if missing:
        time.sleep(_UNDER_WAY_S)
        read |= _read(root, missing)
    # Records that were written since the copies were listed; those of versions without copies are not looked for.
    new = {layout.copy_of(path): path for path, data in read.items() if path not in copied and is_whole(data, path)}
    return read, copied | {new[copy]: data for copy, data in _read(root, [*new]).items()}


def number_of(path: str) -> int:
    """Return the number in the name of a record, 0 if it has none."""
    number = path.rpartition("/")[2].removesuffix(".json").rpartition(".")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def losses(root: Root, run: str) -> list[Loss]:
    """Return the lost, damaged or misplaced records of a run; their content is not interpreted."""
    # Copies are read first: a record written in the meantime has its copy before.
    copies = _paths(root, layout.copies(run))
    records, copied = read_with_copies(root, copies, lambda: _paths(root, layout.run(run)))
    present = {*records, *copied}
    damaged = [loss for path in sorted(present) for loss in compare(path, records.get(path), copied.get(path))]
    # Of other series only the newest record counts.
    lost = [path for path in _lost(root, run, present) if path.split("/")[2] in LOGS or not _has_newer(path, present)]
    return [*damaged, *map(_gone, lost)]


def lost_newest(root: Root, run: str) -> list[str]:
    """Return the records that are lost with their copies and have no newer one in their series; none is read."""
    tops = (layout.run(run), layout.copies(run))
    present = {layout.record_of(path) for top in tops for path in _paths(root, top)}
    return [path for path in _lost(root, run, present) if not _has_newer(path, present)]


def put_back(root: Root, path: str) -> dict[str, bytes]:
    """Return the correct content of a record and its copy, empty if neither is intact.

    Args:
        root: root of the run.
        path: path of the record or its copy.
    """
    record = layout.record_of(path)
    for place in (record, layout.copy_of(record)):
        data = root.read(place)
        if data is not None and is_whole(data, record):
            return {record: data, layout.copy_of(record): data}
    return {}


def compare(path: str, record: bytes | None, copy: bytes | None) -> Iterator[Loss]:
    """Yield the losses and damages of a record and its copy."""
    place = layout.copy_of(path)
    restorable = copy is not None and is_whole(copy, path)
    if record is None:
        back = Loss(path, "missing", f"{path} is lost; its copy is there. 'flowmill store repair' puts it back.")
        yield back if restorable else _gone(path)
        return
    try:
        content(record, path)
    except CorruptError as error:
        yield Loss(path, "corrupt", str(error))
        return
    whole = is_whole(record, path)
    if copy is None and whole:
        yield Loss(place, "missing", f"{place} is lost; the record is there. 'flowmill store repair' copies it again.")
    elif copy is not None and copy != record and restorable and not whole:
        yield Loss(path, "corrupt", f"{path} differs from its copy. 'flowmill store repair' puts that back.")
    elif copy is not None and copy != record:
        yield Loss(place, "corrupt", f"{place} differs from its record. 'flowmill store repair' copies it again.")


def is_whole(data: bytes, path: str) -> bool:
    """Return whether the data are an intact record that contains this path."""
    try:
        return unseal(data, path).get(AT) == path
    except CorruptError:
        return False


def _gone(path: str) -> Loss:
    return Loss(
        path,
        "missing",
        f"{path} is lost, and has no intact copy. 'flowmill run' with the run's config writes the records it still "
        "knows; otherwise restore it from a copy of the store, or give the run up with 'flowmill store gc --forget'.",
    )


def _lost(root: Root, run: str, present: Collection[str]) -> list[str]:
    """Return the missing records that must have existed; present are those that are there or have a copy."""
    return [*dict.fromkeys([*_gaps(run, present), *_set_aside(root, run, present)])]


def _gaps(run: str, present: Collection[str]) -> list[str]:
    """Return the missing records that must have existed: the first one of the run, and gaps in numbers."""
    first, series = layout.run_record(run), dict[str, dict[int, str]]()
    for path in present:
        if number := number_of(path):
            series.setdefault(_stem(path), {})[number] = path
    lost = [] if first in present else [first]
    for stem, paths in sorted(series.items()):
        width = len(paths[min(paths)]) - len(stem) - len(".json")
        # Bounded, so that a damaged file name cannot make the list arbitrarily long.
        newest = min(max(paths), 10 * len(paths) + 100)
        lost += [f"{stem}{number:0{width}d}.json" for number in range(1, newest) if number not in paths]
    return lost


def _set_aside(root: Root, run: str, present: Collection[str]) -> list[str]:
    """Return the records that were quarantined, or their copies, and were not written again."""
    top = f"{QUARANTINE}/{layout.run(run)}"
    names = [name.partition(".json")[0] + ".json" for name in root.files(top) if ".json" in name]
    paths = [layout.record_of(f"{layout.run(run)}/{name}") for name in names]
    return [path for path in paths if path not in present]


def _has_newer(path: str, present: Collection[str]) -> bool:
    """Return whether a newer record is in the series of a record."""
    return any(_stem(each) == _stem(path) and number_of(each) > number_of(path) for each in present)


def _stem(path: str) -> str:
    """Return the path of a record without its number."""
    return path.removesuffix(".json").rstrip("0123456789")


def _read(root: Root, paths: list[str]) -> dict[str, bytes]:
    """Return the bytes of those objects that exist by path."""
    return {path: data for path, data in zip(paths, root.read_many(paths), strict=True) if data is not None}


def _paths(root: Root, top: str) -> list[str]:
    """Return the paths of the records in a folder of a run."""
    return [path for name in root.files(top) if layout.is_record(path := f"{top}/{name}", top)]
