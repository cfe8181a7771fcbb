"""Runs: their first record, later configs, and the artifacts of each stage of each epoch.

Lineage records are small create-once objects that form a log; ``flowmill.tasks.runs.chain`` derives the current ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from flowmill.configs.errors import CorruptError, RunConflictError, StoreError
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.mirrored_records import Loss, losses, number_of, write
from flowmill.storage.artifacts.records import Artifact, Record, content
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.names import part

#: Attempts to create a record under a free number.
_TRIES = 100
#: Version of the first record of a run. 3: the algorithm 'kto' is KTO; before, it was what is 'apo_zero' now.
RUN_VERSION = 3
#: Series of the records that name the artifacts of a run's preferences.
PREFERENCES = "preferences"
#: Series of the answers of raters.
RATINGS = "ratings"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageEntry(Record):
    """One stage of one epoch and its artifact."""

    noun = "a lineage record"

    epoch: int
    """0 before training; epoch n turns policy n-1 into policy n."""
    stage: str
    """Stage name."""
    slot: str
    """Distinguishes stages of the same name: the name of a reward or of an additional evaluation, else empty."""
    artifact: Artifact
    """``kind/id`` of the artifact."""
    forced: bool = False
    """True when --force started a new attempt although the work was committed."""

    @property
    def key(self) -> tuple[int, str, str]:
        """Epoch, stage and slot."""
        return self.epoch, self.stage, self.slot

    @property
    def ref(self) -> ArtifactRef:
        """The artifact."""
        return ArtifactRef.parse(self.artifact)

    def place(self, where: str) -> str:
        """Return the path of the entry in the run of a path, with the number of that path."""
        return layout.lineage_entry(where.split("/")[1], *self.key, number_of(where))


class RunFolder:
    """The records of one run."""

    def __init__(self, store: ArtifactStore, name: str) -> None:
        """Bind to a run, which need not exist yet."""
        self.store = store
        try:
            self.name = part(name)
        except ValueError as error:
            raise StoreError(f"There is no run '{name}': {error}.") from None
        self._entries: dict[str, LineageEntry] | None = None
        self._keyed: dict[tuple[int, str, str], list[LineageEntry]] | None = None
        #: The number of the newest record of each stage, with ``_keyed``.
        self._last: dict[tuple[int, str, str], int] = {}
        self._contents: dict[str, bytes] = {}

    @property
    def lock_path(self) -> str:
        """Path of the lock that the executing process holds."""
        return layout.lock(self.name)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the run's lock inside, so that no other process works on it and none removes artifacts of the store.

        Raises:
            RunConflictError: another process does.
        """
        root = self.store.root
        with root.lock(self.lock_path, f"Run '{self.name}'"):
            # ``at_rest`` takes the store's lock before it lists the runs, so of two processes one sees the other.
            if root.locked(layout.lock()):
                raise RunConflictError(
                    f"Run '{self.name}' cannot be worked on, as 'flowmill store gc' or 'repair' is removing files of "
                    f"'{root.uri}'. Try again when it has finished."
                )
            yield

    def describe(self) -> dict[str, Any] | None:
        """Return the run's first record (config and identity) or its copy, or None when there is neither."""
        path = layout.run_record(self.name)
        data = self.store.root.read(path) or self.store.root.read(layout.copy_of(path))
        record = None if data is None else content(data, path)
        if record is None or "config" not in record:
            return record
        return {**record, "config": _as_now(record["config"], record)}

    def create(self, record: Mapping[str, Any]) -> bool:
        """Write the run's first record; False when the run exists."""
        return write(self.store.root, layout.run_record(self.name), record)

    def restore(self, record: Callable[[], Mapping[str, Any]]) -> None:
        """Restore the run's first record if it is lost: from its copy, else from the values that ``record`` gives."""
        if self.store.root.read(layout.run_record(self.name)) is None:
            self.create(self.describe() or record())

    def entries(self) -> list[LineageEntry]:
        """Return every lineage record, oldest number first within an (epoch, stage, slot)."""
        return [entry for _, entry in self._in_order()]

    def entries_of(self, epoch: int, stage: str, slot: str = "") -> list[LineageEntry]:
        """Return every record of a stage, oldest first; ``flowmill.tasks.runs.chain`` derives the current one."""
        return self._by_key().get((epoch, stage, slot), [])

    def append(self, entry: LineageEntry) -> None:
        """Write an entry as the newest of its stage, unless it already is."""
        number = 0
        for _ in range(_TRIES):
            entries = self.entries_of(*entry.key)
            if entries and entries[-1].artifact == entry.artifact:
                return
            # The number follows the highest one: the number of a lost record is not reused.
            number = max(number, self._last.get(entry.key, 0)) + 1
            path = layout.lineage_entry(self.name, *entry.key, number)
            if write(self.store.root, path, asdict(entry)):
                self._loaded()[path.rpartition("/")[2]] = entry
                self._by_key().setdefault(entry.key, []).append(entry)
                self._last[entry.key] = number
                return
            self.refresh()
        raise _unwritten(layout.lineage(self.name))

    def add(self, series: str, data: Mapping[str, Any]) -> None:
        """Write data as the newest of a series of records (``configs``, ``tracking``), unless it already is."""
        number = 0
        for _ in range(_TRIES):
            if self.newest(series) == dict(data):
                return
            number = max([number, *map(number_of, self._series(series))]) + 1
            if write(self.store.root, layout.run_series(self.name, series, number), data):
                return
        raise _unwritten(f"{layout.run(self.name)}/{series}")

    def newest(self, series: str) -> dict[str, Any] | None:
        """Return the newest record of a series, or None."""
        names = self._series(series)
        return self._read(f"{layout.run(self.name)}/{series}/{names[-1]}") if names else None

    def series(self, series: str, *, last: int | None = None) -> dict[str, bytes]:
        """Return the bytes of all records of a series, or of the last ones, by path, in order; each is read once."""
        names = self._series(series)
        paths = [f"{layout.run(self.name)}/{series}/{name}" for name in names[-(last or len(names)) :]]
        unknown = [path for path in paths if path not in self._contents]
        read = zip(unknown, self.store.root.read_many(unknown), strict=True)
        self._contents |= {path: data for path, data in read if data is not None}
        return {path: self._contents[path] for path in paths if path in self._contents}

    def named(self) -> list[ArtifactRef]:
        """Return the artifacts that the run's records name: of its lineage, its preferences, and the rated samples."""
        recorded = self.recorded(PREFERENCES)
        return [*(entry.ref for entry in self.entries()), *map(ArtifactRef.parse, recorded), *self.rated()]

    def rated(self) -> list[ArtifactRef]:
        """Return the artifacts whose samples people rated, possibly of other runs.

        Those of withdrawn answers count, as earlier preferences may hold them.
        """
        return [*map(ArtifactRef.parse, self.recorded(RATINGS))]

    def recorded(self, series: str) -> dict[str, str]:
        """Return the artifacts that preferences or answers name, each with the path of the last record that does."""
        records = {path: content(data, path) for path, data in self.series(series).items()}
        return {artifact: path for path, record in records.items() for artifact in _artifacts_of(record)}

    def config(self) -> dict[str, Any] | None:
        """Return the config of the run's last start, or None when the run does not exist."""
        newest, first = self.newest("configs"), self.describe()
        if newest is not None:
            return newest if first is None else _as_now(newest, first)
        return None if first is None else dict(first["config"])

    def refresh(self) -> None:
        """Drop cached records, so that records of other processes are read."""
        self._entries = self._keyed = None

    def _series(self, series: str) -> list[str]:
        names = self.store.root.list(f"{layout.run(self.name)}/{series}")
        return sorted((name for name in names if name.endswith(".json")), key=number_of)

    def _read(self, path: str) -> dict[str, Any] | None:
        data = self.store.root.read(path)
        if data is None:
            return None
        return content(data, path)

    def _by_key(self) -> dict[tuple[int, str, str], list[LineageEntry]]:
        if self._keyed is None:
            keyed: dict[tuple[int, str, str], list[LineageEntry]] = {}
            in_order = self._in_order()
            for _, entry in in_order:
                keyed.setdefault(entry.key, []).append(entry)
            self._last = {entry.key: number_of(name) for name, entry in in_order}
            self._keyed = keyed
        return self._keyed

    def _in_order(self) -> list[tuple[str, LineageEntry]]:
        """Return every lineage record with its name, oldest number first within an (epoch, stage, slot)."""
        return sorted(self._loaded().items(), key=lambda item: (*_stem(item[0]), number_of(item[0])))

    def _loaded(self) -> dict[str, LineageEntry]:
        if self._entries is None:
            folder = layout.lineage(self.name)
            names = [name for name in self.store.root.list(folder) if name.endswith(".json")]
            contents = self.store.root.read_many([f"{folder}/{name}" for name in names])
            self._entries = {
                name: LineageEntry.decode(data or b"", f"{folder}/{name}")
                for name, data in zip(names, contents, strict=True)
            }
        return self._entries


def _as_now(config: dict[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run with the present names of its components; the run's first record has the old ones."""
    optimize = config.get("optimize") or {}
    if first.get("schema_version", 0) >= 3 or (optimize.get("algorithm") or {}).get("name") != "kto":
        return config
    return {**config, "optimize": {**optimize, "algorithm": {**optimize["algorithm"], "name": "apo_zero"}}}


def _artifacts_of(record: Mapping[str, Any]) -> list[str]:
    """Return the artifacts that a record of preferences or an answer of a rater names."""
    if "artifact" in record:
        return [record["artifact"]]
    return [record["first_artifact"], record["second_artifact"], *(each for each, _ in record.get("others", ()))]


def _stem(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(".json").split(".")[:-1])


def _unwritten(folder: str) -> StoreError:
    return StoreError(
        f"{folder}: no record can be added, each of {_TRIES} numbers is taken and none can be read. "
        "'flowmill store verify' lists its content."
    )


def records_of(store: ArtifactStore, name: str) -> dict[str, bytes]:
    """Return the bytes of all records of a run and their copies by path; the first record comes last."""
    records: dict[str, bytes] = {}
    for top in (layout.copies(name), layout.run(name)):
        paths = [f"{top}/{file}" for file in store.root.files(top)]
        paths = [path for path in paths if layout.is_record(path, top)]
        records |= {
            path: data for path, data in zip(paths, store.root.read_many(paths), strict=True) if data is not None
        }
    return records


def readable_entries(store: ArtifactStore) -> list[tuple[str, LineageEntry]]:
    """Return the readable lineage records of all runs, each with its run; ``damaged_records`` returns the others."""

    def entries(name: str) -> list[tuple[str, LineageEntry]]:
        folder, of_run = layout.lineage(name), []
        paths = [f"{folder}/{file}" for file in store.root.list(folder) if file.endswith(".json")]
        for path, data in zip(paths, store.root.read_many(paths), strict=True):
            with suppress(CorruptError):
                of_run.append((name, LineageEntry.decode(data or b"", path)))
        return of_run

    return [entry for of_run in store.root.map(entries, list_runs(store)) for entry in of_run]


def damaged_records(store: ArtifactStore) -> list[Loss]:
    """Return all lost, damaged or misplaced records of runs."""

    def damaged(name: str) -> list[Loss]:
        lost = losses(store.root, name)
        return [*lost, *_misplaced(store, name, {loss.path for loss in lost})]

    return [loss for losses_of_run in store.root.map(damaged, list_runs(store)) for loss in losses_of_run]


def _misplaced(store: ArtifactStore, name: str, lost: Collection[str]) -> Iterator[Loss]:
    """Yield problems of lineage records: malformed ones, and duplicates."""
    folder = layout.lineage(name)
    paths = [f"{folder}/{file}" for file in store.root.list(folder) if file.endswith(".json")]
    before: dict[tuple[int, str, str], str] = {}
    for path, data in sorted(
        zip(paths, store.root.read_many(paths), strict=True), key=lambda each: (_stem(each[0]), number_of(each[0]))
    ):
        if path in lost or data is None:
            continue
        try:
            entry = LineageEntry.decode(data, path)
        except CorruptError as error:
            yield Loss(path, "corrupt", str(error))
            continue
        if before.get(entry.key) == entry.artifact:
            yield Loss(path, "corrupt", f"{path} repeats the record before it: it was copied there.")
        before[entry.key] = entry.artifact


@contextmanager
def at_rest(store: ArtifactStore) -> Iterator[None]:
    """Lock a store and all its runs inside the context, so that no artifact that a run reads or makes is removed.

    Runs that begin meanwhile are refused, see ``RunFolder.at_work``, and those that have just begun are not at rest,
    though they have no record yet.
    """
    with ExitStack() as locks:
        label = f"A 'flowmill store gc' or 'repair' of '{store.root.uri}'"
        locks.enter_context(store.root.lock(layout.lock(), label))

        def lock(name: str) -> None:
            locks.enter_context(store.root.lock(RunFolder(store, name).lock_path, f"Run '{name}'"))

        store.root.map(lock, [name for name, files in _run_folders(store).items() if files])
        yield


def list_runs(store: ArtifactStore) -> list[str]:
    """Return the names of all runs in a store, including those that lost their first record."""
    folders = _run_folders(store).items()
    return [name for name, files in folders if any(not file.startswith(".") for file in files)]


def _run_folders(store: ArtifactStore) -> dict[str, list[str]]:
    root = store.root
    names = root.list(layout.RUNS)
    return dict(zip(names, root.map(root.list, [layout.run(name) for name in names]), strict=True))
