"""Who makes an artifact, and in batches of which sizes: kernels differ with the number of rows, so bytes do too.

An unfinished artifact is made by runs of equal sizes alone. Another run makes an attempt of its own, as with
``--force``, and complete artifacts are found by all. A claim means nothing any more once the artifact is complete, and
one that cannot be read, or is another artifact's, counts as no claim: its artifact is made in another attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.errors import CorruptError
from storage import layout
from storage.checksummed_json import seal, unseal
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.quarantine import revive


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The batch sizes an artifact is made with."""

    run: str
    """The run that began it, or went on with it last with other sizes."""
    sizes: Mapping[str, int | None]
    """Sizes of batches, by setting."""

    def encoded(self, ref: ArtifactRef) -> bytes:
        """Return the claim to an artifact as it is stored."""
        return seal({"artifact": str(ref), "run": self.run, "sizes": dict(self.sizes)})


def anew(store: ArtifactStore, first: ArtifactRef) -> ArtifactRef:
    """Return the attempt to make although the work is committed: the next, or the same if its files were removed.

    Another attempt would then come out equal, and those who read the first would still find no files.
    """
    if store.removed(first):
        revive(store, first)
        return first
    number = 1
    while store.manifest(first.attempt(number)) is not None:
        number += 1
    return first.attempt(number)


def claimed(store: ArtifactStore, first: ArtifactRef, claim: Claim) -> ArtifactRef:
    """Return the attempt at some work that is complete already, or that may be made or gone on with as is claimed.

    Args:
        store: the store; the run is locked, so that no other process works for it.
        first: the attempt to begin with.
        claim: who would make it, and how.
    """
    number = first.number
    while True:
        ref = first.attempt(number)
        if store.manifest(ref) is not None or _is_ours(store, ref, claim):
            return ref
        number += 1


def _is_ours(store: ArtifactStore, ref: ArtifactRef, claim: Claim) -> bool:
    path = layout.claim(ref)
    while not store.root.create(path, claim.encoded(ref)):
        data = store.root.read(path)
        if data is None:
            continue
        try:
            found = unseal(data, path)
        except CorruptError:
            return False
        if found.get("artifact") != str(ref):
            return False
        if found.get("sizes") == dict(claim.sizes):
            return True
        if found.get("run") != claim.run:
            return False
        # A run continues its own attempt, whatever its sizes are now.
        store.root.remove(path)
    return True
