"""Names of fitted rewards: each fit under a name appends one record, which names its artifact."""

from __future__ import annotations

from configs.errors import CorruptError, StoreError
from storage import layout
from storage.artifacts.checksummed_json import seal
from storage.artifacts.commit import ArtifactStore
from storage.artifacts.mirrored_records import number_of
from storage.artifacts.records import AT, content
from storage.layout import ArtifactRef

_ARTIFACT = "artifact"
#: Attempts to create a record under a free number.
_TRIES = 100


def fits_of(store: ArtifactStore, name: str) -> dict[int, ArtifactRef]:
    """Return the artifacts of the fits under a name by number, oldest first, finished or not.

    Raises:
        CorruptError: a record is damaged.
    """
    paths = [f"{layout.fits(name)}/{file}" for file in store.root.list(layout.fits(name)) if file.endswith(".json")]
    found = {}
    for path, data in zip(paths, store.root.read_many(paths), strict=True):
        try:
            found[number_of(path)] = ArtifactRef.parse(content(data or b"", path)[_ARTIFACT])
        except (CorruptError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(
                f"{path} names no fit: {error}. Remove it; 'flowmill reward fit' makes the newest one again."
            ) from None
    return dict(sorted(found.items()))


def add_fit(store: ArtifactStore, name: str, ref: ArtifactRef) -> int:
    """Make an artifact the newest fit under a name, unless it is; return its number, from 1.

    Raises:
        StoreError: no record can be added.
    """
    for _ in range(_TRIES):
        known = fits_of(store, name)
        newest = max(known, default=0)
        if known and known[newest] == ref:
            return newest
        path = layout.fit(name, newest + 1)
        if store.root.create(path, seal({_ARTIFACT: str(ref), AT: path})):
            return newest + 1
    raise StoreError(f"{layout.fits(name)}: no record can be added. Give the fit another 'name'.")


def list_fits(store: ArtifactStore) -> list[str]:
    """Return the names of all fits in a store."""
    return store.root.list(layout.FITS)
