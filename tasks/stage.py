"""The stage contract: fingerprint, skip, run, commit, report. A stage file holds only its own work.

A stage says what it is (name, version, kind), which options change its result, what it reads, which shards it
consists of, and how one shard becomes files. Everything about skipping, committing, resuming, timing and lineage is
here, once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from configs.fingerprint import fingerprint
from configs.schema import RunConfig
from storage.disk import named_disk
from storage.layout import ArtifactRef
from storage.lineage import LineageEntry
from storage.records import Manifest, ShardRecord
from storage.together import Company
from tasks.chain import Node
from tasks.context import RunContext
from tasks.limits import enough_memory

if TYPE_CHECKING:
    from models.policies.base import Part
    from tasks.execution.host import ModelHost


@dataclass(frozen=True, slots=True)
class Shard:
    """One unit of work and of commit."""

    name: str
    """Unique within the artifact, sorts in order."""
    start: int = 0
    """First item (group, prompt, ...) of the shard."""
    stop: int = 1
    """One past the last item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What running a shard gives besides files."""

    rows: int
    """Rows written."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Figures about the content, equal for equal content."""


class Stage(ABC):
    """One stage of one epoch, bound to a context."""

    name: ClassVar[str]
    """Name in commands, lineage and metrics."""
    version: ClassVar[int] = 1
    """Raised when the meaning of the stage's output changes."""
    kind: ClassVar[str]
    """Kind of the artifact it makes."""
    grows: ClassVar[bool] = False
    """True for a cache that is never complete and has no manifest."""
    parts: ClassVar[frozenset[Part]] = frozenset()
    """Parts of the model it works with; the others may leave the device."""
    saves_memory: ClassVar[tuple[str, ...]] = ()
    """What to change when there is too little memory, a sentence each."""
    collective: ClassVar[bool] = False
    """On several ranks: True when all work on each shard together, False when each takes its own shards."""
    first_rank_only: ClassVar[bool] = False
    """On several ranks: True where the first does it all, since libraries it writes files with write none on others."""
    separable: ClassVar[bool] = False
    """True when no shard needs another, so that any process that reaches the store may make it."""
    slot: str = ""
    """Which of several equal stages of the epoch: the reward's name for score and judge, an evaluation's own name."""

    def __init__(self, context: RunContext, epoch: int) -> None:
        """Bind to a context and an epoch."""
        self.context = context
        self.epoch = epoch
        self._ref: ArtifactRef | None = None
        self._inputs: tuple[ArtifactRef, ...] | None = None

    @property
    def on_ranks(self) -> bool:
        """True for what holds models and so runs where the ranks are, if there are several."""
        return bool(self.parts)

    @property
    def host(self) -> ModelHost:
        """What holds the models of this process."""
        return self.context.host

    @property
    def node(self) -> Node:
        """Epoch, name and slot."""
        return Node(self.epoch, self.name, self.slot)

    @property
    def ref(self) -> ArtifactRef:
        """The artifact this stage makes."""
        if self._ref is None:
            self._ref = self.context.chain.target(self)
        return self._ref

    def adopt(self, ref: ArtifactRef, inputs: Sequence[ArtifactRef]) -> None:
        """Make what another process resolved the artifact of this stage and what it reads."""
        self._ref, self._inputs = ref, tuple(inputs)

    def begin_attempt(self) -> None:
        """Make the next attempt at the same work the artifact of this stage."""
        plain, number = self.ref.attempt(1), 1
        while self.context.store.manifest(plain.attempt(number)) is not None:
            number += 1
        self._ref = plain.attempt(number)

    def work(self, inputs: Sequence[ArtifactRef]) -> ArtifactRef:
        """Return the first attempt at what this stage makes of some inputs."""
        work: dict[str, Any] = {
            "stage": self.name,
            "version": self.version,
            "options": dict(self.options()),
            "inputs": [str(ref) for ref in inputs],
        }
        return ArtifactRef(self.kind, fingerprint(work))

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Return the options that change the result, and nothing else."""

    @abstractmethod
    def upstream(self) -> tuple[Node, ...]:
        """Return the stages whose artifacts this one reads."""

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """Return the artifacts this stage reads, in the order of ``upstream``.

        Raises:
            NotCommittedError: one has not been made yet.
        """
        if self._inputs is None:
            return tuple(self.context.chain.require(*node).ref for node in self.upstream())
        return self._inputs

    def load(self) -> None:  # noqa: B027 - most stages load nothing
        """Load what every shard needs; on ranks that hold weights together, all do it before they take shards."""

    def rest(self) -> None:  # noqa: B027 - most stages need nobody for their shards
        """Take part, with no shard left for this rank, in what the others can only do together with it."""

    @abstractmethod
    def shards(self) -> Sequence[Shard]:
        """Return all shards of the artifact, in order; ``covered`` ones included."""

    @abstractmethod
    def run(self, shard: Shard, folder: Path) -> Output:
        """Do the work of one shard and write its files into an empty folder."""

    def committed(self, record: ShardRecord) -> None:  # noqa: B027 - most stages have nothing to do then
        """Hear in every process that worked on a shard that it is committed."""

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Return figures about the whole artifact for its manifest."""
        return {}

    def cleanup(self, ref: ArtifactRef) -> None:  # noqa: B027 - most stages have nothing to remove
        """Remove transient files once the artifact is complete."""


class StageRun:
    """One execution of a stage: what is left to do, doing it, and completing the artifact."""

    def __init__(self, stage: Stage, *, force: bool = False) -> None:
        """Bind to a stage.

        Args:
            stage: the stage.
            force: make a new attempt although the work is committed.

        Raises:
            NotCommittedError: something the stage reads has not been made yet.
        """
        stage.inputs()
        self.stage = stage
        self.store = stage.context.store
        self.forced = force
        if force and not stage.grows:
            stage.begin_attempt()
        self.ref = stage.ref
        self._manifest: Manifest | None = None

    @property
    def found(self) -> bool:
        """Whether the artifact was complete when ``pending`` looked."""
        return self._manifest is not None

    def pending(self) -> list[Shard]:
        """Return the shards that are left: those without a commit record, none of an artifact that is complete."""
        if self.stage.grows:
            done = set(self.store.committed(self.ref))
        else:
            state = self.store.state(self.ref)
            self._manifest, done = state.manifest, set(state.committed)
            if self._manifest is not None:
                return []
        return [shard for shard in self.stage.shards() if shard.name not in done]

    def run_shard(self, shard: Shard) -> ShardRecord:
        """Run and commit one shard; a shard that is committed already is returned as it is."""
        found = self.store.record(self.ref, shard.name)
        if found is not None:
            return found
        with named_disk(self.store.root.uri), self.store.root.staging() as folder:
            if self.stage.parts:
                # What was computed before, in loading or for another stage, is not of this shard.
                self.stage.host.computed()
            started = time.time()
            output = self._work(shard, folder)
            producer: dict[str, Any] = {"started": started, "seconds": round(time.time() - started, 4)}
            if self.stage.parts:
                producer |= {"memory": self.stage.host.memory(), **self.stage.host.computed()}
            record = self.store.commit(
                self.ref,
                shard.name,
                folder,
                rows=output.rows,
                summary=output.summary,
                producer=producer,
                company=self._company,
            )
        self.stage.committed(record)
        return record

    def join_shard(self, shard: Shard) -> None:
        """Work on a shard together with the rank that commits it, to which this process adds its part."""
        with named_disk(self.store.root.uri), self.store.root.staging() as folder:
            self._work(shard, folder)
            self.store.contribute(self.ref, shard.name, folder, self.stage.host.ranks)

    def joined(self, shard: Shard) -> None:
        """Hear that a shard that was worked on together is committed."""
        record = self.store.record(self.ref, shard.name)
        assert record is not None
        self.stage.committed(record)

    def finish(self) -> Manifest | None:
        """Write the manifest if it is not there, and make the artifact current in the run's lineage."""
        manifest = None
        with named_disk(self.store.root.uri):
            if not self.stage.grows:
                # One that another process made meanwhile is found when ours is to be created.
                manifest = self._manifest or self._seal()
                self.stage.cleanup(self.ref)
            self.stage.context.run.append(self._entry())
        self.stage.context.chain.note(self.stage)
        return manifest

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
        for shard in self.pending():
            self.run_shard(shard)
        return self.finish()

    @property
    def _company(self) -> Company | None:
        return self.stage.host.ranks if self.stage.collective else None

    def _work(self, shard: Shard, folder: Path) -> Output:
        if self.stage.parts:
            self.stage.host.prepare(self.stage.parts)
        with (
            self.stage.context.ledger.work(self.stage.name),
            enough_memory(str(self.stage.node), self.stage.saves_memory),
        ):
            return self.stage.run(shard, folder)

    def _seal(self) -> Manifest:
        names = [shard.name for shard in self.stage.shards()]
        records = self.store.recorded(self.ref, names)
        return self.store.seal(
            self.ref,
            shards=names,
            summary=self.stage.summarize(records),
            stage=self.stage.name,
            stage_version=self.stage.version,
            options=self.stage.options(),
            inputs=tuple(str(ref) for ref in self.stage.inputs()),
        )
