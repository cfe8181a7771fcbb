"""One execution of a stage: skip, run, commit, report. All of it is here, once, for all stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flowmill.configs.errors import CommitLostError
from flowmill.configs.exits import without_exits
from flowmill.storage.artifacts.collective_publish import ProcessGroup
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.storage.artifacts.records import Manifest, ShardRecord
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.backends.disk_errors import named_disk
from flowmill.tasks.runs.background_commit import BackgroundCommit
from flowmill.tasks.runs.memory_errors import REMEDIES, enough_memory
from flowmill.tasks.runtime.devices import allocator_advice
from flowmill.tasks.stages.stage import Output, Shard, Stage


class StageRun:
    """One execution of a stage: its pending shards, running them, and completing the artifact."""

    def __init__(self, stage: Stage, *, force: bool = False, ordered: bool = False) -> None:
        """Bind to a stage.

        Args:
            force: make a new attempt although the work is committed.
            ordered: which attempt it is was decided by who ordered it.
        """
        stage.inputs()
        self.stage = stage
        self.store = stage.context.store
        self.forced = force
        stage.begin(again=force and not stage.spec.grows, chosen=ordered)
        self.ref = stage.ref
        self._failures: list[tuple[Exception, Shard]] = []
        self._manifest: Manifest | None = None

    @property
    def reused(self) -> bool:
        """Whether the artifact was complete when ``pending`` looked."""
        return self._manifest is not None

    def pending(self) -> list[Shard]:
        """Return the shards that are left: those without a commit record, none of an artifact that is complete."""
        if self.stage.spec.grows:
            done = set(self.store.committed(self.ref))
        else:
            state = self.store.state(self.ref)
            self._manifest, done = state.manifest, set(state.committed)
            if self._manifest is not None:
                return []
        return [shard for shard in self.stage.shards() if shard.name not in done]

    def failed(self, error: Exception) -> Shard | None:
        """Return the shard whose failure an error reports, None if it reports something else."""
        return next((shard for failure, shard in self._failures if failure is error), None)

    def run_shards(
        self, shards: Iterable[Shard], *, on_commit: Callable[[Sequence[str]], None] = lambda names: None
    ) -> list[str]:
        """Run and commit shards in order; return their names. Committed ones are passed on as they are.

        Where no shard needs another, each is written and committed while the next is worked on, so the next starts
        before the last counts.

        Args:
            on_commit: called with the name of each as soon as it is committed, maybe on another thread.
        """
        names: list[str] = []

        def finished(commit: Callable[[], ShardRecord]) -> None:
            on_commit([commit().shard])

        with BackgroundCommit() as behind:
            for shard in shards:
                names.append(shard.name)
                try:
                    commit = partial(finished, self.work_on(shard))
                except Exception:
                    # If the shard before failed too, its error is raised.
                    behind.wait()
                    raise
                if not self.stage.separable:
                    commit()
                    continue
                try:
                    behind.wait()
                finally:
                    # A finished shard is committed even if the one before it failed.
                    behind.do(commit)
            behind.wait()
        return names

    def run_shard(self, shard: Shard) -> ShardRecord:
        """Run and commit one shard; a shard that is committed already is returned as it is."""
        return self.work_on(shard)()

    def is_due(self, shard: Shard) -> bool:
        """Return whether a shard is not committed."""
        with self.named(shard):
            return self.store.record(self.ref, shard.name) is None

    def forget(self, shard: Shard) -> None:
        """Forget this process's results of a shard: another one may have committed other bytes."""
        self.stage.context.recent.forget(self.ref, shard.name)

    def work_on(self, shard: Shard, *, is_due: bool = False) -> Callable[[], ShardRecord]:
        """Run a shard unless it is committed; return the function that commits it, on any thread.

        Args:
            is_due: it is not committed, or is worked on anyway, as other ranks do.
        """
        stage = self.stage
        with self.named(shard), ExitStack() as stack:
            committed = None if is_due else self.store.record(self.ref, shard.name)
            if committed is not None:
                self.forget(shard)
                return lambda: committed
            stack.enter_context(named_disk(self.store.root.disk))
            folder = stack.enter_context(self.store.root.staging())
            if stage.parts:
                # Earlier computation, for loading or another stage, does not belong to this shard.
                stage.host.computed()
            started = time.time()
            with self._working():
                output = stage.run(shard, folder)
            producer: dict[str, Any] = {"started": started}
            if stage.parts:
                host = stage.host
                producer |= {"memory": host.memory(), **host.computed(), "computed_by": host.facts()}
            resources = stack.pop_all()

        def commit() -> ShardRecord:
            with self.named(shard):
                with resources:
                    with self._enough_memory():
                        hashed = output.written()
                    producer["seconds"] = round(time.time() - started, 4)
                    record = self._committed(shard, folder, output, producer, hashed)
                stage.committed(record)
            return record

        return commit

    def _committed(
        self, shard: Shard, folder: Path, output: Output, producer: Mapping[str, Any], hashed: Sequence[FileEntry]
    ) -> ShardRecord:
        try:
            return self.store.commit(
                self.ref,
                shard.name,
                folder,
                rows=output.rows,
                summary=output.summary,
                producer=producer,
                company=self._company,
                hashed=hashed,
                content=output.content(),
            )
        except CommitLostError:
            winner = self.store.record(self.ref, shard.name) if self.stage.spec.grows else None
            if winner is None:
                raise
            # Readers of a cache read committed rows: those computed in other batches are as good.
            return winner

    @contextmanager
    def named(self, shard: Shard) -> Iterator[None]:
        """Record the shard of an error inside, see ``failed``."""
        try:
            with without_exits(str(self.stage.node)):
                yield
        except Exception as error:
            self._failures.append((error, shard))
            raise

    def join_shard(self, shard: Shard) -> None:
        """Work on a shard together with the rank that commits it, to which this process adds its part."""
        with self.named(shard), named_disk(self.store.root.disk), self.store.root.staging() as folder:
            with self._working():
                output = self.stage.run(shard, folder)
            output.written()
            self.store.contribute(self.ref, shard.name, folder, self.stage.host.ranks)

    def joined(self, shard: Shard) -> None:
        """Hear that a shard that was worked on together is committed."""
        record = self.store.record(self.ref, shard.name)
        assert record is not None
        self.stage.committed(record)

    def finish(self) -> Manifest | None:
        """Write the manifest if it is not there, and make the artifact current in the run's lineage."""
        manifest = None
        with named_disk(self.store.root.disk):
            if not self.stage.spec.grows:
                # One that another process created meanwhile shows when ours is to be created.
                manifest = self._manifest or self._completed()
                self.stage.cleanup(self.ref)
            if not self._restores():
                self.stage.context.run.append(self._entry())
        self.stage.context.chain.note(self.stage.node, self.ref)
        return manifest

    def _restores(self) -> bool:
        """Return whether the run has the artifact already, and another attempt at the same work after it."""
        refs = [each.ref for each in self.stage.context.run.entries_of(*self.stage.node)]
        same = [ref for ref in refs if ref.fingerprint == self.ref.fingerprint]
        return self.ref in same and same[-1] != self.ref

    def _entry(self) -> LineageEntry:
        return LineageEntry(
            epoch=self.stage.epoch,
            stage=self.stage.name,
            slot=self.stage.slot,
            artifact=str(self.ref),
            forced=self.forced,
        )

    def execute(self) -> Manifest | None:
        """Run all pending shards here, one after the other, and finish."""
        self.run_shards(self.pending())
        return self.finish()

    @property
    def _company(self) -> ProcessGroup | None:
        return self.stage.host.ranks if self.stage.collective else None

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Make room for the models of the stage; inside, count the time, and name remedies for too little memory."""
        if self.stage.parts:
            self.stage.host.prepare(self.stage.parts, str(self.ref))
        with self.stage.context.ledger.work(self.stage.name), self._enough_memory():
            yield

    def _enough_memory(self) -> AbstractContextManager[None]:
        stage = self.stage
        remedy = REMEDIES.get(stage.name, "")
        return enough_memory(str(stage.node), remedy, lambda: allocator_advice(stage.host.device))

    def _completed(self) -> Manifest:
        closing = self.stage.closing()
        for shard in closing:
            self.run_shard(shard)
        names = [shard.name for shard in (*self.stage.shards(), *closing)]
        records = self.store.recorded(self.ref, names)
        inputs = self.stage.inputs()
        return self.store.seal(
            self.ref,
            shards=names,
            summary=self.stage.summarize(records),
            stage=self.stage.name,
            stage_version=self.stage.spec.version,
            options=self.stage.counted(inputs),
            inputs=tuple(str(ref) for ref in inputs),
        )
