"""Runs: what was decided at the start, and which artifact each stage of each epoch made.

Lineage records are small create-once objects; the highest number for an (epoch, stage, slot) is the current one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from configs.errors import CorruptError, NotCommittedError
from configs.fingerprint import fingerprint
from storage import layout
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """One stage of one epoch and the artifact it made."""

    epoch: int
    """0 before training; epoch n turns policy n-1 into policy n."""
    stage: str
    """Stage name."""
    slot: str
    """Which of several equal stages: the reward's name for score, else empty."""
    artifact: str
    """``kind/id`` of the artifact."""
    forced: bool = False
    """True when --force made a new attempt although the work was committed."""

    @property
    def ref(self) -> ArtifactRef:
        """The artifact."""
        return ArtifactRef.parse(self.artifact)


class RunFolder:
    """The records of one run."""

    def __init__(self, store: ArtifactStore, name: str) -> None:
        """Bind to a run, which need not exist yet."""
        self.store = store
        self.name = name
        self._entries: dict[str, LineageEntry] | None = None

    @property
    def lock_path(self) -> str:
        """Path of the lock that one executing process holds."""
        return f"{layout.run(self.name)}/.lock"

    def describe(self) -> dict[str, Any] | None:
        """Return the run's first record (config and identity), or None when the run does not exist."""
        data = self.store.root.read(layout.run_record(self.name))
        if data is None:
            return None
        try:
            return dict(json.loads(data))
        except ValueError:
            raise CorruptError(f"{layout.run_record(self.name)} is not JSON: it was damaged.") from None

    def create(self, record: Mapping[str, Any]) -> bool:
        """Write the run's first record; False when the run exists."""
        return self.store.root.create(layout.run_record(self.name), _encode(record))

    def note(self, name: str, data: Mapping[str, Any]) -> bool:
        """Write a create-once side record of the run (tracking ids, for one); False when it exists."""
        return self.store.root.create(f"{layout.run(self.name)}/{name}.json", _encode(data))

    def read_note(self, name: str) -> dict[str, Any] | None:
        """Return a side record, or None."""
        data = self.store.root.read(f"{layout.run(self.name)}/{name}.json")
        return None if data is None else dict(json.loads(data))

    def entries(self) -> list[LineageEntry]:
        """Return every lineage record, oldest number first within an (epoch, stage, slot)."""
        return [self._loaded()[name] for name in sorted(self._loaded())]

    def current(self) -> list[LineageEntry]:
        """Return the current record of each (epoch, stage, slot), in order."""
        latest = {(entry.epoch, entry.stage, entry.slot): entry for entry in self.entries()}
        return [latest[key] for key in sorted(latest)]

    def find(self, epoch: int, stage: str, slot: str = "") -> LineageEntry | None:
        """Return the current record of a stage, or None."""
        found = None
        for entry in self.entries():
            if (entry.epoch, entry.stage, entry.slot) == (epoch, stage, slot):
                found = entry
        return found

    def require(self, epoch: int, stage: str, slot: str = "") -> LineageEntry:
        """Return the current record of a stage that must have run.

        Raises:
            NotCommittedError: it has not.
        """
        found = self.find(epoch, stage, slot)
        if found is None:
            label = f"{stage} of '{slot}'" if slot else stage
            option = "" if epoch == 0 else f" --epoch {epoch}"
            raise NotCommittedError(
                f"Run '{self.name}' has no {label} for epoch {epoch} yet. "
                f"Run 'flowmill stage {stage} --run {self.name}{option}' first."
            )
        return found

    def append(self, entry: LineageEntry) -> None:
        """Make an entry current, unless it is already."""
        while True:
            names = [name for name, e in self._loaded().items() if _key(e) == _key(entry)]
            if names and self._loaded()[max(names)].artifact == entry.artifact:
                return
            path = layout.lineage_entry(self.name, entry.epoch, entry.stage, entry.slot, len(names) + 1)
            created = self.store.root.create(path, _encode(asdict(entry)))
            if created:
                self._loaded()[path.rpartition("/")[2]] = entry
                return
            self._entries = None

    def digest(self) -> str:
        """Return one hash over the content of all committed artifacts of the run, without times or hosts."""
        parts: list[list[int | str]] = []
        for entry in self.current():
            if entry.ref.kind == "embeddings":
                # The cache serves many runs; what this run took from it is hashed in its prompts artifact.
                continue
            manifest = self.store.manifest(entry.ref)
            content = manifest.digest if manifest is not None else "incomplete"
            parts.append([entry.epoch, entry.stage, entry.slot, content])
        return fingerprint(parts)

    def _loaded(self) -> dict[str, LineageEntry]:
        if self._entries is None:
            folder = layout.lineage(self.name)
            names = [name for name in self.store.root.list(folder) if name.endswith(".json")]
            self._entries = {name: self._load(f"{folder}/{name}") for name in names}
        return self._entries

    def _load(self, path: str) -> LineageEntry:
        try:
            return LineageEntry(**json.loads(self.store.root.read(path) or b""))
        except (ValueError, TypeError):
            raise CorruptError(f"{path} is not a lineage record: it was damaged.") from None


def list_runs(store: ArtifactStore) -> list[str]:
    """Return the names of all runs in a store."""
    return [name for name in store.root.list(layout.RUNS) if store.root.read(layout.run_record(name)) is not None]


def _key(entry: LineageEntry) -> tuple[int, str, str]:
    return entry.epoch, entry.stage, entry.slot


def _encode(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()
