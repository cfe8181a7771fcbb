"""Garbage collection: artifacts that no run names, abandoned runs, and files of earlier epochs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flowmill.configs.errors import StoreError
from flowmill.configs.human_units import duration
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RATINGS, LineageEntry, RunFolder, damaged_records, list_runs
from flowmill.storage.artifacts.records import removal_note
from flowmill.storage.backends.base import discard, leftovers
from flowmill.storage.backends.disk_errors import lacks_room, named_disk
from flowmill.storage.backends.process_tags import process_label
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.attempt_claims import claimant
from flowmill.storage.maintenance.verify import list_artifacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Retention rules."""

    forget: Collection[str] = ()
    """Runs to abandon: their lineage and the artifacts that only they name are removed."""
    keep_epochs: int | None = None
    """Number of latest epochs of each run whose files stay; None keeps all."""
    stages: Collection[str] = ("rollout",)
    """Stages whose files of earlier epochs are removed."""
    runs: Collection[str] = ()
    """Runs that ``keep_epochs`` applies to; all when empty."""
    needed: Collection[str] = ()
    """Artifacts, ``kind/id``, that unfinished runs still read: ``keep_epochs`` keeps them."""
    due: Callable[[], Collection[str] | None] = frozenset
    """Returns the artifacts that unfinished stages of the remaining runs make, None if that is unknown: incomplete ones
    stay. Only called if there are some."""
    older_than_s: float = 86400.0
    """Minimum age of removed artifacts that no run names, as a running process may still register younger ones, and of
    unfinished files of other machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One removal."""

    label: str
    """``kind/id`` of an artifact, ``runs/<name>``, or ``.staging/<name>`` of unfinished files."""
    size: int
    """Bytes."""
    reason: str
    """Reason for the removal."""
    trace: bool
    """Keep records and manifest, so that lineage and digests stay complete."""


def plan_removals(store: ArtifactStore, retention: Retention) -> list[Removal]:
    """Return the removals under retention rules in their order; artifacts that other runs need stay."""
    _check_records(store, retention.forget)
    remaining = {name: RunFolder(store, name) for name in list_runs(store) if name not in retention.forget}
    named = {str(ref) for refs in store.root.map(RunFolder.named, [*remaining.values()]) for ref in refs}
    past, due = _past(remaining, retention), cache(retention.due)
    removals = [
        Removal(label=layout.run(name), size=0, reason=_given_up(RunFolder(store, name)), trace=False)
        for name in sorted(retention.forget)
    ]
    # Only the age of artifacts that no run names counts.
    for item in list_artifacts(store, lambda artifact: artifact not in named):
        artifact, size = item["artifact"], item["size"]
        # No run makes a reward model; configs name it by its fit or folder.
        if artifact not in named and not artifact.startswith("reward_models/"):
            # Without a record the age is unknown: it counts as new, as its training may be in progress.
            old = item["runs"] or (item["age_s"] or 0.0) >= retention.older_than_s
            # An interrupted run continues with the shards that it has.
            if old and (item["complete"] or not (_claimed(store, artifact, remaining) or _is_due(artifact, due()))):
                removals.append(Removal(label=artifact, size=size, reason="no run names it", trace=False))
        elif artifact in past and (not item["removed"] or _left(store, ArtifactRef.parse(artifact))):
            reason = f"all runs that name it are more than {retention.keep_epochs} epochs further"
            removals.append(Removal(label=artifact, size=size, reason=reason, trace=True))
    # On a full disk, removals that write a note have room for it after the others.
    return [*_unfinished(store, retention.older_than_s), *sorted(removals, key=lambda removal: removal.trace)]


def _is_due(artifact: str, due: Collection[str] | None) -> bool:
    return due is None or artifact in due


def _claimed(store: ArtifactStore, artifact: str, runs: Collection[str]) -> bool:
    return claimant(store, ArtifactRef.parse(artifact)) in runs


def _unfinished(store: ArtifactStore, older_than_s: float) -> Iterator[Removal]:
    """Yield the files that killed processes did not finish, with their age."""
    # A process of another machine changes its files within an hour.
    for entry, age in sorted(leftovers(Path(store.root.disk) / layout.STAGING, max(older_than_s, 3600.0)).items()):
        sizes = [each.stat().st_size for each in (entry, *entry.rglob("*")) if each.is_file()]
        maker = process_label(entry.name.removesuffix(".tmp"))
        reason = f"unfinished, by a process that is gone ({maker}), unchanged for {duration(age)}"
        yield Removal(label=f"{layout.STAGING}/{entry.name}", size=sum(sizes), reason=reason, trace=False)


def _given_up(run: RunFolder) -> str:
    answers = len(run.series(RATINGS))
    return "the run is given up" + (f", and {answers} answers of raters with it" if answers else "")


def _check_records(store: ArtifactStore, forgotten: Collection[str]) -> None:
    damaged = [loss for loss in damaged_records(store) if loss.path.split("/")[1] not in forgotten]
    if damaged:
        raise StoreError(
            f"Nothing is removed from '{store.root.uri}': {damaged[0].message} The run's needs are unknown without "
            "it. Run 'flowmill store repair' first; 'flowmill store verify' lists everything that is damaged."
        )


def remove(store: ArtifactStore, removal: Removal) -> None:
    """Carry out a removal. After a crash in between, the same removal is planned again."""
    with named_disk(store.root.disk):
        _remove(store, removal)


def _remove(store: ArtifactStore, removal: Removal) -> None:
    if removal.label.startswith(f"{layout.RUNS}/"):
        store.root.remove(removal.label)
        return
    if removal.label.startswith(f"{layout.STAGING}/"):
        discard(Path(store.root.disk) / removal.label)
        return
    ref = ArtifactRef.parse(removal.label)
    if removal.trace:
        _leave_note(store, ref, removal.reason)
    else:
        # The manifest goes first, so that readers see an incomplete artifact; records go last, as they hold its age.
        store.root.remove(layout.manifest(ref))
    store.root.remove_below(ref.path, layout.holds_files)
    if not removal.trace:
        store.root.remove(ref.path)


def _leave_note(store: ArtifactStore, ref: ArtifactRef, reason: str) -> None:
    """Write the note of a removal; while the disk is too full for it, remove shards before."""
    while True:
        try:
            store.root.create(layout.removed(ref), removal_note(ref, reason))
        except OSError as error:
            left = _left(store, ref)
            if not (left and lacks_room(error)):
                raise
        else:
            return
        # Without the note the artifact counts as damaged, and its removal is planned again.
        store.root.remove(f"{ref.path}/{left[0]}")


def _left(store: ArtifactStore, ref: ArtifactRef) -> list[str]:
    """Return the folders of an artifact that hold files of its shards."""
    return [name for name in store.root.list(ref.path) if layout.holds_files(name)]


def _past(remaining: Mapping[str, RunFolder], retention: Retention) -> set[str]:
    """Return the artifacts that only past epochs of the selected runs name, and that no run still reads."""
    if retention.keep_epochs is None:
        return set()
    past: set[str] = set()
    needed = set(retention.needed)
    for name, run in remaining.items():
        # No stage makes judgments of people again.
        needed.update(map(str, run.rated()))
        entries, config = run.entries(), run.config() or {}
        # A run that was rewound ends before its last records.
        own = [entry for entry in entries if entry.epoch <= config.get("run", {}).get("epochs", entry.epoch)]
        last = max((entry.epoch for entry in own), default=0)
        limit = min(last - retention.keep_epochs, _still_read(config, own) - 1)
        for entry in entries:
            chosen = not retention.runs or name in retention.runs
            old = 0 < entry.epoch <= limit
            (past if chosen and old and entry.stage in retention.stages else needed).add(entry.artifact)
    return past - needed


def _still_read(config: Mapping[str, Any], entries: Sequence[LineageEntry]) -> int:
    """Return the first epoch that a continued run may still read.

    Training of the next epoch replays ``optimize.replay.epochs`` earlier ones; rollouts of later epochs use policies
    that are ``execution.ahead`` epochs older.
    """
    trained = max((entry.epoch for entry in entries if entry.stage == "optimize"), default=0)
    replayed = (config.get("optimize", {}).get("replay") or {}).get("epochs", 0)
    ahead = config.get("execution", {}).get("ahead", 0)
    return trained - max(int(replayed) - 1, int(ahead), 0)
