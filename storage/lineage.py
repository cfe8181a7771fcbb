"""Runs: what was decided at the start, the configs since, and which artifacts each stage of each epoch made.

Lineage records are small create-once objects, a log: which of them make up the run is derived in ``tasks.runs.chain``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from configs.errors import CorruptError, StoreError
from storage import layout
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.names import part
from storage.sealed import seal, unseal


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry:
    """One stage of one epoch and the artifact it made."""

    epoch: int
    """0 before training; epoch n turns policy n-1 into policy n."""
    stage: str
    """Stage name."""
    slot: str
    """Which of several equal stages: the reward's name, the name of an evaluation of its own, else empty."""
    artifact: str
    """``kind/id`` of the artifact."""
    forced: bool = False
    """True when --force made a new attempt although the work was committed."""

    @property
    def key(self) -> tuple[int, str, str]:
        """Epoch, stage and slot."""
        return self.epoch, self.stage, self.slot

    @property
    def ref(self) -> ArtifactRef:
        """The artifact."""
        return ArtifactRef.parse(self.artifact)


class RunFolder:
    """The records of one run."""

    def __init__(self, store: ArtifactStore, name: str) -> None:
        """Bind to a run, which need not exist yet.

        Raises:
            StoreError: there can be no run of this name.
        """
        self.store = store
        try:
            self.name = part(name)
        except ValueError as error:
            raise StoreError(f"There is no run '{name}': {error}.") from None
        self._entries: dict[str, LineageEntry] | None = None
        self._keyed: dict[tuple[int, str, str], list[LineageEntry]] | None = None

    @property
    def lock_path(self) -> str:
        """Path of the lock that one executing process holds."""
        return f"{layout.run(self.name)}/.lock"

    def describe(self) -> dict[str, Any] | None:
        """Return the run's first record (config and identity), or None when the run does not exist."""
        return self._read(layout.run_record(self.name))

    def create(self, record: Mapping[str, Any]) -> bool:
        """Write the run's first record; False when the run exists."""
        return self.store.root.create(layout.run_record(self.name), seal(record))

    def entries(self) -> list[LineageEntry]:
        """Return every lineage record, oldest number first within an (epoch, stage, slot)."""
        return [self._loaded()[name] for name in sorted(self._loaded())]

    def made(self, epoch: int, stage: str, slot: str = "") -> list[LineageEntry]:
        """Return every record of a stage, oldest first; which of them counts is derived, see ``tasks.runs.chain``."""
        return self._by_key().get((epoch, stage, slot), [])

    def append(self, entry: LineageEntry) -> None:
        """Write an entry down as the newest of its stage, unless it is already."""
        while True:
            made = self.made(*entry.key)
            if made and made[-1].artifact == entry.artifact:
                return
            path = layout.lineage_entry(self.name, *entry.key, len(made) + 1)
            created = self.store.root.create(path, seal(asdict(entry)))
            if created:
                self._loaded()[path.rpartition("/")[2]] = entry
                self._by_key().setdefault(entry.key, []).append(entry)
                return
            self.refresh()

    def add(self, series: str, data: Mapping[str, Any]) -> None:
        """Write data down as the newest of a series of records (``configs``, ``tracking``), unless it is already."""
        while self.newest(series) != dict(data):
            number = len(self._series(series)) + 1
            if self.store.root.create(layout.run_series(self.name, series, number), seal(data)):
                return

    def newest(self, series: str) -> dict[str, Any] | None:
        """Return the newest record of a series, or None."""
        names = self._series(series)
        return self._read(f"{layout.run(self.name)}/{series}/{names[-1]}") if names else None

    def config(self) -> dict[str, Any] | None:
        """Return the config the run was last started with, or None when the run does not exist."""
        first = self.describe()
        return None if first is None else self.newest("configs") or dict(first["config"])

    def refresh(self) -> None:
        """Forget what was read, so that records of other processes are seen."""
        self._entries = self._keyed = None

    def _series(self, series: str) -> list[str]:
        return [name for name in self.store.root.list(f"{layout.run(self.name)}/{series}") if name.endswith(".json")]

    def _read(self, path: str) -> dict[str, Any] | None:
        data = self.store.root.read(path)
        if data is None:
            return None
        return unseal(data, path)

    def _by_key(self) -> dict[tuple[int, str, str], list[LineageEntry]]:
        keyed: dict[tuple[int, str, str], list[LineageEntry]] = {}
        if self._keyed is None:
            for entry in self.entries():
                keyed.setdefault(entry.key, []).append(entry)
            self._keyed = keyed
        return self._keyed

    def _loaded(self) -> dict[str, LineageEntry]:
        if self._entries is None:
            folder = layout.lineage(self.name)
            names = [name for name in self.store.root.list(folder) if name.endswith(".json")]
            found = self.store.root.read_many([f"{folder}/{name}" for name in names])
            self._entries = {name: _entry(f"{folder}/{name}", data) for name, data in zip(names, found, strict=True)}
        return self._entries


def _entry(path: str, data: bytes | None) -> LineageEntry:
    try:
        entry = LineageEntry(**unseal(data or b"", path))
        ArtifactRef.parse(entry.artifact)
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} is not a lineage record: {error}.") from None
    return entry


def records_of(store: ArtifactStore, name: str) -> dict[str, bytes]:
    """Return every record of a run by its path, as it is stored."""
    top = layout.run(name)
    paths = [f"{top}/{file}" for file in store.root.files(top) if file.endswith(".json")]
    return {path: data for path, data in zip(paths, store.root.read_many(paths), strict=True) if data is not None}


def damaged_records(store: ArtifactStore) -> list[tuple[str, str]]:
    """Return path and what is wrong with it, of every record of runs that is not what was written."""
    found = []
    for name in store.root.list(layout.RUNS):
        for path, data in records_of(store, name).items():
            try:
                if f"/{layout.LINEAGE}/" in path:
                    _entry(path, data)
                else:
                    unseal(data, path)
            except CorruptError as error:
                found.append((path, str(error)))
    return found


@contextmanager
def at_rest(store: ArtifactStore) -> Iterator[None]:
    """Keep every run of a store from being executed, inside: what one reads or makes must not go meanwhile.

    Raises:
        RunConflictError: one is being executed.
    """
    with ExitStack() as held:
        for name in list_runs(store):
            held.enter_context(store.root.lock(RunFolder(store, name).lock_path, f"Run '{name}'"))
        yield


def list_runs(store: ArtifactStore) -> list[str]:
    """Return the names of all runs in a store."""
    return [name for name in store.root.list(layout.RUNS) if store.root.read(layout.run_record(name)) is not None]
