"""The stage contract: a stage file holds options, inputs and work of one stage.

A stage says which shards its artifact consists of, and how one shard becomes files. Skipping, committing, resuming,
timing and lineage are ``StageRun``'s. Status and lineage read options and inputs of all stages, so a stage file imports
torch and other heavy packages inside its functions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flowmill.configs.errors import StoreError
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.attempt_claims import Claim, claimed, next_attempt
from flowmill.tasks.inputs.components import open_trajectory_store
from flowmill.tasks.modalities.modality import Modality
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.identity import StageIdentity

if TYPE_CHECKING:
    from flowmill.models.policies.parts import Part
    from flowmill.storage.trajectories.base import TrajectoryShard
    from flowmill.tasks.runs.context import RunContext
    from flowmill.tasks.runtime.host import ModelHost


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
    """Result of a shard besides files."""

    rows: int
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the content, equal for equal content."""
    written: Callable[[], Sequence[FileEntry]] = tuple
    """Waits until all files are written; returns the entries of those whose checksums were taken meanwhile."""
    content: Callable[[], str] = str
    """The digest of written rows, if shards are a matter of choice."""


class Stage(StageIdentity):
    """One stage of one epoch, bound to a context."""

    collective: ClassVar[bool] = False
    """On several ranks: True when all work on each shard together, False when each takes its own shards."""
    first_rank_only: ClassVar[bool] = False
    """On several ranks: True where the first does it all, since libraries it writes files with write none on others."""
    only: ClassVar[str]
    """Name of the shard, for a stage whose artifact is one shard."""
    separable: ClassVar[bool] = False
    """True when no shard needs another, so that any process that reaches the store may make it."""
    context: RunContext
    """The run; set when the stage is bound."""
    host: ModelHost
    """The holder of this process's models; set when the stage is bound."""
    _ref: ArtifactRef | None = None
    _inputs: tuple[ArtifactRef, ...] | None = None

    def bind(self, context: RunContext, host: ModelHost) -> None:
        """Bind to the run and to models; options and inputs need neither."""
        self.context, self.host = context, host

    @property
    def modality(self) -> Modality:
        """The modality of the run's policy."""
        modality: Modality = self.plan.modality
        return modality

    @property
    def parts(self) -> frozenset[Part]:
        """Parts of the model it works with; the others may leave the device."""
        return frozenset()

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """The settings of batches that its bytes depend on, as kernels differ with the number of rows."""
        return {}

    @property
    def on_ranks(self) -> bool:
        """True for a stage that holds models and so runs on the ranks, if there are several."""
        return bool(self.parts)

    @property
    def ref(self) -> ArtifactRef:
        """The artifact this stage makes."""
        if self._ref is None:
            self._ref = self.context.chain.target(self.node)
        return self._ref

    def adopt(self, ref: ArtifactRef, inputs: Sequence[ArtifactRef]) -> None:
        """Set artifact and inputs of this stage as another process resolved them."""
        self._ref, self._inputs = ref, tuple(inputs)

    def begin(self, *, again: bool, chosen: bool) -> None:
        """Make the attempt that is worked on the artifact of this stage.

        Args:
            again: make another although the work is committed.
            chosen: the requester has decided which; else it is complete, or no process makes it with batches
                of other sizes.
        """
        store = self.context.store
        if again:
            self._ref = next_attempt(store, self.ref)
        if self.sizes and not chosen:
            self._ref = claimed(store, self.ref, Claim(run=self.context.run.name, sizes=self.sizes))

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """Return the artifacts this stage reads, in the order of ``upstream``."""
        if self._inputs is None:
            return tuple(self.context.chain.require(*node).ref for node in self.upstream())
        return self._inputs

    def opened(self, ref: ArtifactRef, name: str) -> TrajectoryShard:
        """Return a committed shard of an artifact of samples."""
        record = self.context.store.record(ref, name)
        if record is None:
            raise StoreError(f"Shard {name} of {ref} is not committed, which stage '{self.name}' reads.")
        return open_trajectory_store(self.config.rollout.store).open(self.context.store.files(ref, record))

    def meet(self) -> None:
        """Run collective work of all ranks before shards are taken."""
        self.host.meet(self.parts, self.load)

    def load(self) -> None:
        """Load the models of all shards; ranks that shard weights do it together before they take shards."""

    def rest(self) -> None:
        """Take part in collective calls of other ranks, with no shard left."""

    def shards(self) -> Sequence[Shard]:
        """Return all shards of the artifact but the closing ones, in order; committed ones included."""
        return [Shard(self.only)]

    def closing(self) -> Sequence[Shard]:
        """Return the shards that are computed last, from all others, where the artifact is completed."""
        return ()

    @abstractmethod
    def run(self, shard: Shard, folder: Path) -> Output:
        """Do the work of one shard and write its files into an empty folder."""

    def committed(self, record: ShardRecord) -> None:
        """Hear in every process that worked on a shard that it is committed."""

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Return figures of the whole artifact for its manifest; by default those of its only shard."""
        return records[0].summary if len(records) == 1 else {}

    def cleanup(self, ref: ArtifactRef) -> None:
        """Remove transient files once the artifact is complete."""


def make_stage(context: RunContext, host: ModelHost, node: Node) -> Stage:
    """Return a stage of a run, bound to context and models."""
    stage = context.chain.identity(node)
    assert isinstance(stage, Stage)
    stage.bind(context, host)
    return stage
