"""Claims to unfinished artifacts: the run that makes one, and its batch sizes, which affect the bytes of the result.

Only runs with equal batch sizes continue an unfinished artifact. Another run makes a separate attempt, as with
``--force``. Complete artifacts are shared by all runs, and their claims have no effect. A claim that cannot be read or
names another artifact belongs to no run, so the work is done in another attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowmill.configs.errors import CorruptError
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.records import Artifact, Record
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.quarantine import revive


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Record):
    """The run and batch sizes that an artifact is created with."""

    noun = "a claim"

    artifact: Artifact = ""
    """``kind/id`` of the artifact, once it is claimed."""
    run: str
    """The run that began it, or that last continued it with other sizes."""
    sizes: Mapping[str, int | None]
    """Batch sizes by setting."""

    def place(self, where: str) -> str:
        """Return the path of the claim."""
        return layout.claim(ArtifactRef(*self.artifact.partition("/")[::2]))


def next_attempt(store: ArtifactStore, first: ArtifactRef) -> ArtifactRef:
    """Return the attempt for repeating committed work: the next one, or the same one if its files were removed.

    In the latter case another attempt would only give equal content, and readers of the first would still lack files.
    """
    if store.removed(first):
        revive(store, first)
        return first
    number = 1
    while store.manifest(first.attempt(number)) is not None:
        number += 1
    return first.attempt(number)


def claimed(store: ArtifactStore, first: ArtifactRef, claim: Claim) -> ArtifactRef:
    """Return the first attempt that is complete, or that may be started or continued under the claim.

    Args:
        store: the store; the caller holds the lock of the run.
        first: the attempt to begin with.
        claim: the claim of the run.
    """
    number = first.number
    while True:
        ref = first.attempt(number)
        if store.manifest(ref) is not None or _is_ours(store, ref, claim):
            return ref
        number += 1


def claimant(store: ArtifactStore, ref: ArtifactRef) -> str | None:
    """Return the run of an artifact's claim; None without one."""
    path = layout.claim(ref)
    data = store.root.read(path)
    try:
        return None if data is None else Claim.decode(data, path).run
    except CorruptError:
        return None


def _is_ours(store: ArtifactStore, ref: ArtifactRef, claim: Claim) -> bool:
    path, ours = layout.claim(ref), replace(claim, artifact=str(ref))
    while not store.root.create(path, ours.encoded()):
        data = store.root.read(path)
        if data is None:
            continue
        try:
            current = Claim.decode(data, path)
        except CorruptError:
            return False
        if current.sizes == ours.sizes:
            return True
        if current.run != ours.run:
            return False
        # A run continues its own attempt, even with other sizes.
        store.root.remove(path)
    return True
