"""The interface of samplers of policy kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flowmill.configs.schema import RunConfig
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.prompts import StoredPrompt
from flowmill.tasks.inputs.renderer import SEEN_KEY, TURN_KEY

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext
    from flowmill.tasks.runtime.host import ModelHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The state of a conversation before a turn."""

    sample: Sample
    """The sample up to the turn before."""
    comment: str | None
    """The comment on its newest image; None: the sample has ended."""
    turn: int
    """The turn that follows."""
    image: str | None = None
    """The artifact of its newest image, if the policy sees that."""

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the turn that follows: its number, and the artifacts of all images that it sees."""
        seen = [*self.sample.metadata.get(SEEN_KEY, ()), self.image]
        return {TURN_KEY: self.turn, **({} if self.image is None else {SEEN_KEY: seen})}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample to make."""

    prompt: StoredPrompt
    replica: int
    """Index of the sample within its prompt."""
    name: str
    """Id of the sample; if one job gives several, the prefix of their ids."""
    before: Said | None = None
    """The turns before; None: it is the first."""

    def columns(self, making: SamplingContext) -> dict[str, Any]:
        """Return the fields of its ``Sample`` that do not depend on the kind of policy, besides the seed."""
        return {
            "sample_id": self.name,
            "prompt_id": self.prompt.id,
            "group_id": self.prompt.id,
            "prompt": self.prompt.text,
            "metadata": {**self.prompt.metadata, **({} if self.before is None else self.before.metadata)},
            "epoch": making.epoch,
            "replica": self.replica,
            "policy": str(making.policy),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingContext:
    """Context, models and policy for sampling."""

    context: RunContext
    host: ModelHost
    """Holds its models."""
    policy: ArtifactRef
    """The policy that makes the samples."""
    epoch: int
    """Epoch of the rollout, or the last epoch before the evaluation."""

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config


class Sampler(Protocol):
    """Makes samples, batch by batch: a job's sample does not depend on the other jobs of its batch."""

    def load(self) -> None:
        """Load models for all batches; ranks that shard weights do it collectively."""

    def make(self, jobs: Sequence[SampleRequest]) -> list[Sample]:
        """Return the samples of at most ``execution.rollout_batch_size`` jobs, computed at one fixed size."""

    def rest(self) -> None:
        """Take part in collective calls of other ranks, with no job left."""


class WorksAhead(ABC):
    """A sampler that begins with later parts while it makes one."""

    @abstractmethod
    def each(self, parts: Sequence[Sequence[SampleRequest]]) -> Iterator[list[Sample]]:
        """Yield the samples of parts like those of ``Sampler.make``, in order."""
