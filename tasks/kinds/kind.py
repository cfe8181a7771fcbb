"""What a kind of policy must provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from configs.errors import ConfigError, StoreError
from configs.registry import create
from configs.rewards import RewardSection
from configs.schema import RunConfig
from models.policies.base import Part
from models.rewards.base import Batch as Scored
from models.rewards.base import Needs
from storage.layout import ArtifactRef
from storage.trajectories.base import Sample, TrajectoryShard
from tasks.algorithms.base import Models, Requirements
from tasks.inputs.policy_kind import kind_name
from tasks.inputs.prompts import Prompt, StoredPrompt
from tasks.inputs.sources import Weights
from tasks.kinds import KINDS
from tasks.kinds.cost import Cost
from tasks.kinds.gradients import Followed, Following, RewardGradients, no_slopes
from tasks.kinds.memory import DrawingMemory, Memory, OptimizerSizes
from tasks.kinds.sample_set import SampleSet

if TYPE_CHECKING:
    from torch import Tensor

    from models.policies.trainable import Trainable
    from tasks.hosting.host import ModelHost
    from tasks.hosting.renderer import Renderer
    from tasks.identities.export import ExportIdentity
    from tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample to make."""

    prompt: StoredPrompt
    """Its prompt."""
    replica: int
    """Which of the prompt's samples."""
    name: str
    """Its id; of several that one job gives, what their ids begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What samples are made with."""

    context: RunContext
    """The run."""
    host: ModelHost
    """Holds its models."""
    policy: ArtifactRef
    """The policy that makes them."""
    epoch: int
    """Of the rollout, or after which the policy is evaluated."""

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config


class Maker(Protocol):
    """Makes samples, batch by batch: what comes out of a job does not depend on the others of its batch."""

    def load(self) -> None:
        """Load what all batches need; ranks that hold weights together do it at once."""

    def make(self, jobs: Sequence[Job]) -> list[Sample]:
        """Return the samples of at most ``execution.rollout_batch_size`` jobs, computed at one fixed size."""

    def rest(self) -> None:
        """Take part, with nothing left to make, in what other ranks can only do together with this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Valuing:
    """What values of stored samples are computed with."""

    context: RunContext
    """The run."""
    host: ModelHost
    """Holds its models."""
    policy: ArtifactRef
    """The policy that the epoch trains, with its critic."""
    values: bool
    """A critic's values are asked for."""
    reference: bool
    """Log-probs of the base model are asked for."""

    def load(self) -> None:
        """Load the models, whole on every rank; all ranks ask together, once."""
        self.host.assemble(self.policy, Weights.TRAINED)
        if self.values:
            self.host.critic.of(self.policy).gather()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the samples of an epoch are trained with."""

    context: RunContext
    """The run."""
    host: ModelHost | None
    """Holds its models; None where no batch is asked for."""
    epoch: int
    """The epoch."""
    predicted: bool
    """The policy that is trained made all samples, as it is."""
    gradients: RewardGradients | None = None
    """Gradients of rewards at the samples, where the algorithm needs them."""

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporting:
    """What an export is written from."""

    context: RunContext
    """The run."""
    host: ModelHost
    """Holds its models."""
    identity: ExportIdentity
    """Which export."""
    inputs: Sequence[ArtifactRef]
    """Policy, base model, prompts."""

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config


class Kind(ABC):
    """How policies of one kind make samples, are trained, and are shown."""

    encodes: ClassVar[bool] = True
    """Prompts are encoded ahead, into the embedding cache."""
    per_token: ClassVar[bool] = False
    """Every entry of a sample's log-probs is a choice that can have an advantage of its own."""
    writes: ClassVar[bool] = False
    """Samples are texts, which an image model can draw."""
    draws: ClassVar[bool] = False
    """It can draw texts."""
    sampling_parts: ClassVar[frozenset[Part]]
    """Parts of the model that make samples; the others may leave the device meanwhile."""
    training_parts: ClassVar[frozenset[Part]]
    """Parts of the model that are trained."""
    exporting_parts: ClassVar[frozenset[Part]]
    """Parts of the model that an export needs."""
    saves_memory: ClassVar[tuple[str, ...]] = ()
    """What to change when there is too little memory to make samples, a sentence each."""

    def longest(self, config: RunConfig) -> int | None:
        """Return how many choices a sample may have that ends by itself; None where all have equally many."""
        return None

    @abstractmethod
    def check(self, config: RunConfig, requires: Requirements) -> None:
        """Check what of the config only this kind has; ``requires`` is what its algorithm needs.

        Raises:
            ConfigError: something cannot work.
        """

    @abstractmethod
    def cost(self, config: RunConfig, requires: Requirements, prompts: Mapping[str, int]) -> Cost:
        """Return what a run takes whose config was checked; ``prompts`` is their number by split."""

    def memory(
        self, config: RunConfig, requires: Requirements, optimizer: OptimizerSizes, *, reference: bool
    ) -> Memory | None:
        """Return what a rank needs, from the model's architecture alone; None where that is not known.

        Args:
            config: a config that was checked.
            requires: what its algorithm needs.
            optimizer: what of its optimizer decides memory.
            reference: the base model is compared with.
        """
        return None

    def drawing_memory(self, config: RunConfig) -> DrawingMemory | None:
        """Return what drawing texts needs under a config of its own; None where the model is not known."""
        return None

    @abstractmethod
    def encode(self, host: ModelHost, prompts: Sequence[Prompt]) -> Mapping[str, Tensor]:
        """Return one row of every conditioning tensor per prompt; asked only where ``encodes``."""

    def cut_notes(self, host: ModelHost, prompts: Sequence[Prompt]) -> list[str]:
        """Return what a person should know of prompts that are longer than what is read of them, a sentence each."""
        return []

    @abstractmethod
    def rollout(self, making: Making) -> Maker:
        """Return what makes the samples that are trained on, with the log-probs that made them."""

    @abstractmethod
    def evaluation(self, making: Making) -> Maker:
        """Return what makes samples of fixed draws, for comparison."""

    def add_examples(  # noqa: B027
        self, config: RunConfig, folder: Path, samples: Sequence[Sample], *, before: int
    ) -> None:
        """Write the first samples of an evaluation as files that a person opens, where there is such a form.

        Args:
            config: the run's config.
            folder: where files go.
            samples: those that this shard has of the first.
            before: how many of the first others have.
        """

    @abstractmethod
    def check_scored(self, section: RewardSection, needs: Needs, config: RunConfig) -> None:
        """Check that samples hold what a reward scores.

        Raises:
            ConfigError: they do not.
        """

    @abstractmethod
    def trial(self, config: RunConfig) -> np.ndarray:
        """Return one made-up sample as a reward gets it, (1, ...): only that it can be scored means something."""

    @abstractmethod
    def scored(self, shard: TrajectoryShard, needs: Needs, recent: Sequence[np.ndarray] | None) -> np.ndarray:
        """Return what a reward gets of the samples of a shard, (B, ...).

        Args:
            shard: the shard.
            needs: what the reward needs.
            recent: the media of all rows, where this process has just made them.
        """

    @abstractmethod
    def show(self, folder: Path, batch: Scored, verdicts: Sequence[str], texts: Sequence[str] | None = None) -> None:
        """Write what a person looks at of the first samples of an evaluation, one verdict each, if there is something.

        Args:
            folder: where files go.
            batch: what a reward was given.
            verdicts: what it read and gave, of as many samples as are shown.
            texts: what was drawn, where it is another than the prompts.
        """

    def texts(self, shard: TrajectoryShard) -> list[str]:
        """Return the texts of samples, one each; asked only where ``writes``.

        Raises:
            CorruptError: one is not stored, or the file is damaged.
        """
        raise NotImplementedError

    def draw(self, renderer: Renderer, texts: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
        """Return images of texts by a frozen model, (B, H, W, 3) uint8; asked only where ``draws``.

        Args:
            renderer: the model.
            texts: at most ``execution.rollout_batch_size``.
            seeds: of the noise they begin with.
        """
        raise NotImplementedError

    def decoder(self, config: RunConfig, host: ModelHost) -> Callable[[np.ndarray], np.ndarray]:
        """Return what makes pictures, (N, H, W, 3) or (N, F, H, W, 3) uint8, of the stored states (N, ...) of a sample.

        Raises:
            StoreError: samples of this kind have no states that can be seen.
        """
        raise StoreError(f"Samples of the kind '{kind_name(config)}' have no states between that could be shown.")

    @abstractmethod
    def training_set(
        self, training: Training, shards: Sequence[TrajectoryShard], advantages: pa.Table, requires: Requirements
    ) -> SampleSet:
        """Return stored samples as rows to train on."""

    def values(self, valuing: Valuing, shard: TrajectoryShard) -> Mapping[str, list[np.ndarray] | None]:
        """Return ``values`` and ``reference_log_probs`` of samples, a float32 row each, None for what is not asked for.

        Raises:
            ConfigError: samples of this kind have none.
        """
        raise ConfigError(
            f"advantage.estimator asks for values, which samples of the kind '{kind_name(valuing.context.config)}' do "
            "not have. Set it to 'group'."
        )

    def follow(self, following: Following, batch: Scored) -> Followed:
        """Return gradients of a reward with respect to what samples ended in.

        Args:
            following: the reward, and what holds the models.
            batch: the samples; media are what their sampling ended in, (B, ...).

        Raises:
            ConfigError: samples of this kind have no such end.
        """
        raise no_slopes(following.config)

    def asked_parts(self, config: RunConfig) -> frozenset[Part]:
        """Return what of the model it takes to ask rewards while training."""
        return frozenset()

    def give_rewards(self, models: Models, host: ModelHost) -> None:
        """Let an algorithm ask the run's rewards, with gradients.

        Raises:
            ConfigError: samples of this kind are nothing that gradients lead back to.
        """
        raise no_slopes(host.config)

    @abstractmethod
    def models(self, config: RunConfig, trainable: Trainable, beside: Mapping[str, Trainable]) -> Models:
        """Return what an algorithm may ask of the policy, and of what is trained beside it, by part."""

    @abstractmethod
    def export(self, exporting: Exporting, folder: Path) -> None:
        """Write model, settings and card for other libraries, below ``folder``/pipeline."""


def make_kind(config: RunConfig) -> Kind:
    """Return the kind of a run's policy.

    Raises:
        ConfigError: there is no such kind.
    """
    found: Kind = create(KINDS, kind_name(config), {}, what="model.kind")
    return found
