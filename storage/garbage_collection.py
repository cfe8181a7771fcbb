"""Garbage collection: artifacts no run names, runs that are given up, and files of epochs long past."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from configs.errors import StoreError
from storage import layout
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.lineage import LineageEntry, RunFolder, damaged_records, list_runs
from storage.tombstones import removal_note
from storage.verify import list_artifacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules of what stays."""

    forget: Collection[str] = ()
    """Runs to give up: their lineage, and artifacts that only they name."""
    keep_epochs: int | None = None
    """Epochs, counted from each run's last, whose files stay; None: all."""
    stages: Collection[str] = ("rollout",)
    """Stages whose files of earlier epochs may go."""
    runs: Collection[str] = ()
    """Runs ``keep_epochs`` is about; all when empty."""
    older_than_s: float = 86400.0
    """Artifacts that no run names yet may belong to a run at work; they stay this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One thing that may go."""

    label: str
    """``kind/id`` of an artifact, or ``runs/<name>``."""
    size: int
    """Bytes."""
    reason: str
    """Why it may go."""
    trace: bool
    """Keep records and manifest, so that lineage and digests stay whole."""


def plan_removals(store: ArtifactStore, retention: Retention) -> list[Removal]:
    """Return the removals of a retention; artifacts that other runs need stay.

    Raises:
        StoreError: a record of a run that stays is damaged or lost, so that the needs of the run are unknown.
    """
    _check_records(store, retention.forget)
    kept = {name: RunFolder(store, name) for name in list_runs(store) if name not in retention.forget}
    named = {entry.artifact for run in kept.values() for entry in run.entries()}
    past = _past(kept, retention)
    removals = [
        Removal(label=layout.run(name), size=0, reason="the run is given up", trace=False)
        for name in sorted(retention.forget)
    ]
    for item in list_artifacts(store):
        artifact, size = item["artifact"], item["size"]
        if artifact not in named:
            # Without a record it may be a training under way: its age is not known, so it counts as new.
            if item["runs"] or (item["age_s"] or 0.0) >= retention.older_than_s:
                removals.append(Removal(label=artifact, size=size, reason="no run names it", trace=False))
        elif artifact in past and (not item["removed"] or _left(store, ArtifactRef.parse(artifact))):
            reason = f"all runs that name it are more than {retention.keep_epochs} epochs further"
            removals.append(Removal(label=artifact, size=size, reason=reason, trace=True))
    return removals


def _check_records(store: ArtifactStore, forgotten: Collection[str]) -> None:
    damaged = [loss for loss in damaged_records(store) if loss.path.split("/")[1] not in forgotten]
    if damaged:
        raise StoreError(
            f"Nothing is removed from '{store.root.uri}': {damaged[0].message} The run's needs are unknown without "
            "it. Run 'flowmill store repair' first; 'flowmill store verify' lists everything that is damaged."
        )


def remove(store: ArtifactStore, removal: Removal) -> None:
    """Remove one thing. Killed halfway, the same removal is found again."""
    if removal.label.startswith(f"{layout.RUNS}/"):
        store.root.remove(removal.label)
        return
    ref = ArtifactRef.parse(removal.label)
    if removal.trace:
        store.root.create(layout.removed(ref), removal_note(ref, removal.reason))
    else:
        # Without its manifest no reader takes it for complete; its records, which hold its age, go last.
        store.root.remove(layout.manifest(ref))
    for name in _left(store, ref):
        store.root.remove(f"{ref.path}/{name}")
    if not removal.trace:
        store.root.remove(ref.path)


def _left(store: ArtifactStore, ref: ArtifactRef) -> list[str]:
    """Return the folders of an artifact that hold files of its shards."""
    return [name for name in store.root.list(ref.path) if layout.holds_files(name)]


def _past(kept: Mapping[str, RunFolder], retention: Retention) -> set[str]:
    """Return the artifacts that only past epochs of the chosen runs name, and no run goes on from."""
    if retention.keep_epochs is None:
        return set()
    past: set[str] = set()
    needed: set[str] = set()
    for name, run in kept.items():
        entries = run.entries()
        last = max((entry.epoch for entry in entries), default=0)
        limit = min(last - retention.keep_epochs, _still_read(run, entries) - 1)
        for entry in entries:
            chosen = not retention.runs or name in retention.runs
            old = 0 < entry.epoch <= limit
            (past if chosen and old and entry.stage in retention.stages else needed).add(entry.artifact)
    return past - needed


def _still_read(run: RunFolder, entries: Sequence[LineageEntry]) -> int:
    """Return the first epoch of which a run may read something when it goes on.

    Training of the next epoch replays ``optimize.replay.epochs`` before it; rollouts of the epochs to come are made
    with policies that are ``execution.ahead`` older.
    """
    trained = max((entry.epoch for entry in entries if entry.stage == "optimize"), default=0)
    config = run.config() or {}
    replayed = (config.get("optimize", {}).get("replay") or {}).get("epochs", 0)
    ahead = config.get("execution", {}).get("ahead", 0)
    return trained - max(int(replayed) - 1, int(ahead), 0)
