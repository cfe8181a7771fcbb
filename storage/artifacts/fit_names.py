"""Names of fitted rewards: each fit under a name appends one record, which names its artifact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flowmill.configs.errors import CorruptError, StoreError
from flowmill.storage import layout
from flowmill.storage.artifacts.checksummed_json import seal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.mirrored_records import Loss, compare, is_whole, number_of, read_with_copies, write
from flowmill.storage.artifacts.records import content
from flowmill.storage.artifacts.remedies import remedy
from flowmill.storage.layout import ArtifactRef

_ARTIFACT = "artifact"
#: Attempts to create a record under a free number.
_TRIES = 100


def fits_of(store: ArtifactStore, name: str) -> dict[int, ArtifactRef]:
    """Return the artifacts of the fits under a name by number, oldest first, finished or not."""
    fits = {number_of(path): _artifact(data, path) for path, data in _records(store, name)}
    return dict(sorted(fits.items()))


def is_lost(store: ArtifactStore, ref: ArtifactRef) -> bool:
    """Return whether the artifact that a fit names is not complete, and not being created either."""
    parts = (layout.manifest(ref), layout.claim(ref))
    return all(store.root.read(path) is None for path in parts) and not store.root.list(layout.checkpoints(ref))


def damaged_fits(store: ArtifactStore) -> Iterator[tuple[Loss, ArtifactRef | None]]:
    """Yield the lost or damaged records of fits, and the intact ones whose artifact is lost, with the artifact."""
    for name in list_fits(store):
        copies = _paths(store, f"{layout.fits(name)}/{layout.COPIES}")
        records, copied = read_with_copies(store.root, copies, partial(_paths, store, layout.fits(name)))
        for path in sorted({*records, *copied}):
            # Records of earlier versions have no copy.
            has_copy = path in copied or is_whole(records[path], path)
            losses = [*compare(path, records.get(path), copied.get(path))] if has_copy else []
            yield from ((loss, None) for loss in losses)
            if not losses:
                yield from _of_record(store, path, records[path])


def _of_record(store: ArtifactStore, path: str, data: bytes) -> Iterator[tuple[Loss, ArtifactRef | None]]:
    try:
        ref = _artifact(data, path)
    except CorruptError as error:
        yield Loss(path, "corrupt", str(error)), None
        return
    if is_lost(store, ref):
        message = (
            f"{layout.manifest(ref)} is missing; {path} names it. {remedy(ref)} Otherwise restore it from a "
            f"copy of the store, or remove {path}."
        )
        yield Loss(path, "missing", message), ref


def add_fit(store: ArtifactStore, name: str, ref: ArtifactRef) -> int:
    """Make an artifact the newest fit under a name, unless it is, and claim it; return its number, from 1."""
    if store.manifest(ref) is None:
        # An artifact that is being created has no files yet: the claim distinguishes it from a lost one.
        store.root.create(layout.claim(ref), seal({_ARTIFACT: str(ref), "run": "", "sizes": {}}))
    for _ in range(_TRIES):
        fits = fits_of(store, name)
        newest = max(fits, default=0)
        if fits and fits[newest] == ref:
            return newest
        if write(store.root, layout.fit(name, newest + 1), {_ARTIFACT: str(ref)}):
            return newest + 1
    raise StoreError(f"{layout.fits(name)}: no record can be added. Give the fit another 'name'.")


def list_fits(store: ArtifactStore) -> list[str]:
    """Return the names of all fits in a store."""
    return store.root.list(layout.FITS)


def _records(store: ArtifactStore, name: str) -> Iterator[tuple[str, bytes]]:
    paths = _paths(store, layout.fits(name))
    return ((path, data or b"") for path, data in zip(paths, store.root.read_many(paths), strict=True))


def _paths(store: ArtifactStore, folder: str) -> list[str]:
    return [f"{folder}/{file}" for file in store.root.list(folder) if file.endswith(".json")]


def _artifact(data: bytes, path: str) -> ArtifactRef:
    try:
        return ArtifactRef.parse(content(data, path)[_ARTIFACT])
    except (CorruptError, KeyError, TypeError, ValueError):
        raise CorruptError(
            f"{path} names no fit: the file was damaged. 'flowmill store repair' puts its copy back, or sets it aside; "
            "'flowmill reward fit' makes the newest one again."
        ) from None
