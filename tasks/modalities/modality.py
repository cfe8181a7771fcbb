"""The interfaces of a modality, which is a kind of policies: its samples, training rows, exports and estimates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.base import Batch as Scored
from flowmill.models.rewards.base import Needs
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.algorithms.base import Models, Requirements
from flowmill.tasks.inputs.base_model import BaseModel, describe_base
from flowmill.tasks.inputs.policy_kind import kind_name
from flowmill.tasks.inputs.prompts import Prompt, StoredPrompt
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.gradients import RewardGradientRequest, RewardGradientResult, RewardGradients, no_slopes
from flowmill.tasks.modalities.samplers import Sampler, SamplingContext

if TYPE_CHECKING:
    from torch import Tensor

    from flowmill.models.policies.parts import Part
    from flowmill.models.policies.trainable import Trainable
    from flowmill.tasks.modalities.forward_cost import Cost
    from flowmill.tasks.modalities.memory import DrawingMemory, Memory, OptimizerSizes
    from flowmill.tasks.modalities.sample_set import SampleSet
    from flowmill.tasks.runs.context import RunContext
    from flowmill.tasks.runtime.host import ModelHost
    from flowmill.tasks.runtime.renderer import Renderer
    from flowmill.tasks.specs.plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRequest:
    """Context and models for critic values of stored samples."""

    context: RunContext
    host: ModelHost
    """Holds its models."""
    policy: ArtifactRef
    """The policy that the epoch trains, with its critic."""
    values: bool
    """Compute a critic's values."""
    reference: bool
    """Compute log-probs of the base model."""

    def load(self) -> None:
        """Load the models, whole on every rank; all ranks must call this together, once."""
        self.host.assemble(self.policy, Weights.TRAINED)
        if self.values:
            self.host.critic.of(self.policy).gather()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Context and models for training on an epoch's samples."""

    context: RunContext
    host: ModelHost | None
    """Holds its models; None if no batches are needed."""
    epoch: int
    predicted: bool
    """The trained policy, with its current weights, drew all samples."""
    gradients: RewardGradients | None = None
    """Gradients of rewards at the samples, if the algorithm needs them."""

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Context and artifacts for an export."""

    context: RunContext
    host: ModelHost
    """Holds its models."""
    epoch: int
    """The epoch of the policy."""
    format: str
    """The written weights: "lora" or "full"."""
    inputs: Sequence[ArtifactRef]
    """Policy, base model, prompts."""

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.context.config

    @property
    def base(self) -> BaseModel:
        """The model that training started from."""
        identity = {} if self.config.model.path is None else self.context.model_identity
        return describe_base(self.config.model, identity, self.context.base_folder)


class SampleGeneration(ABC):
    """How samples are drawn, scored and shown."""

    encodes: ClassVar[bool] = True
    """Prompts are encoded in advance, into the embedding cache."""
    writes: ClassVar[bool] = False
    """Samples are texts, which an image model can render."""
    draws: ClassVar[bool] = False
    """It can render texts."""
    sampling_parts: ClassVar[frozenset[Part]]
    """Parts of the model that make samples; the others may leave the device during sampling."""

    def longest(self, config: RunConfig) -> int | None:
        """Return the maximum number of choices of a sample; None if all samples have the same number."""
        return None

    def truncated(self, config: RunConfig, shard: TrajectoryShard, row: int) -> bool:
        """Return whether a stored sample ended, or a turn of it, because it had the maximum number of choices."""
        return len(shard.table.column("log_probs")[row]) == self.longest(config)

    @abstractmethod
    def encode(self, host: ModelHost, prompts: Sequence[Prompt]) -> Mapping[str, Tensor]:
        """Return one row of each conditioning tensor per prompt; called only if ``encodes``."""

    def cut_notes(self, host: ModelHost, prompts: Sequence[Prompt]) -> list[str]:
        """Return notes on prompts that are longer than the encoders read, a sentence each."""
        return []

    @abstractmethod
    def rollout(self, making: SamplingContext) -> Sampler:
        """Return the sampler of rollouts, with log-probs."""

    def readable(self, context: RunContext, prompts: Sequence[StoredPrompt]) -> Sequence[StoredPrompt]:
        """Return the prompts of a split that evaluations sample: rows of data may have some that no model reads."""
        return prompts

    @abstractmethod
    def evaluation(self, making: SamplingContext) -> Sampler:
        """Return the sampler of evaluations, with fixed draws."""

    @abstractmethod
    def check_scored(self, section: RewardSection, needs: Needs, config: RunConfig) -> None:
        """Check that samples hold the media a reward scores."""

    @abstractmethod
    def trial(self, config: RunConfig) -> np.ndarray:
        """Return one synthetic sample as a reward receives it, (1, ...), to test that it can be scored."""

    @abstractmethod
    def scored(self, shard: TrajectoryShard, needs: Needs, recent: Sequence[np.ndarray] | None) -> np.ndarray:
        """Return a reward's inputs from the samples of a shard, (B, ...).

        Args:
            needs: the reward's needs.
            recent: the media of all rows, if this process has just drawn them.
        """

    def texts(self, shard: TrajectoryShard) -> list[str]:
        """Return the texts of samples, one each; called only if ``writes``."""
        raise NotImplementedError

    def draw(
        self, renderer: Renderer, texts: Sequence[str], seeds: Sequence[int], images: Sequence[Sequence[np.ndarray]]
    ) -> np.ndarray:
        """Return images of texts by a frozen model, (B, H, W, 3) uint8; called only if ``draws``.

        Args:
            renderer: the model.
            texts: at most ``execution.rollout_batch_size``.
            seeds: seeds of the initial noise.
            images: source images of each text's prompt, (H, W, 3) uint8; none where the model reads none.
        """
        raise NotImplementedError

    def decoder(self, config: RunConfig, host: ModelHost) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from stored states (N, ...) of a sample to (N, H, W, 3) or (N, F, H, W, 3) uint8."""
        raise StoreError(f"Samples of the kind '{kind_name(config)}' have no intermediate states to show.")

    @abstractmethod
    def show(self, folder: Path, batch: Scored, verdicts: Sequence[str], texts: Sequence[str] | None = None) -> None:
        """Write a preview of the first samples of an evaluation, one verdict each, if the kind has one.

        Args:
            folder: target folder.
            batch: the reward's inputs.
            verdicts: its remark and score for each shown sample.
            texts: the rendered texts, if they differ from the prompts.
        """

    def add_examples(  # noqa: B027
        self, config: RunConfig, folder: Path, samples: Sequence[Sample], *, before: int
    ) -> None:
        """Write the first samples of an evaluation as files for viewing, if the kind has such a format.

        Args:
            config: the run's config.
            folder: target folder.
            samples: this shard's part of the first samples.
            before: number of the first samples in other shards before it.
        """


class TrainingRows(ABC):
    """How samples, drawn or of data, become rows to train on; and the models that are trained."""

    trained_as: ClassVar[str | None] = None
    """Kind whose algorithms train its policies; None: its own."""
    per_token: ClassVar[bool] = False
    """Each entry of a sample's log-probs is a choice that can have its own advantage."""
    training_parts: ClassVar[frozenset[Part]]
    """Parts of the model that are trained."""
    given_parts: ClassVar[frozenset[Part]] = frozenset()
    """Parts of the model that encode samples of data."""

    def read_given(self, making: SamplingContext, sample: DataSample) -> Any:
        """Return the content of a sample of data, in the form that ``given`` takes."""
        raise ConfigError(
            f"data: samples of the kind '{kind_name(making.config)}' cannot be given. Remove the section."
        )

    def around_given(self, plan: RunPlan, folder: Path) -> Sequence[str]:
        """Return the texts that a model in a folder has before and after a given text; empty for none."""
        return ()

    def same_given(self, first: Any, second: Any) -> bool:
        """Return whether two contents of samples of data are equal."""
        return bool(first == second)

    def given(self, making: SamplingContext, samples: Sequence[DataSample], contents: Sequence[Any]) -> list[Sample]:
        """Return samples of data in the form of a rollout's: with final latents or tokens, without behavior log-probs.

        Args:
            making: run and models.
            samples: at most ``execution.decode_batch_size``.
            contents: the result of ``read_given`` for each.
        """
        raise NotImplementedError

    @abstractmethod
    def training_set(
        self, training: Training, shards: Sequence[TrajectoryShard], advantages: pa.Table, requires: Requirements
    ) -> SampleSet:
        """Return stored samples as rows to train on."""

    def values(self, valuing: ValueRequest, shard: TrajectoryShard) -> Mapping[str, list[np.ndarray] | None]:
        """Return ``values`` and ``reference_log_probs`` of samples, a float32 row each, None if not needed."""
        raise ConfigError(
            f"advantage.estimator needs values, which samples of the kind '{kind_name(valuing.context.config)}' do "
            "not have. Set it to 'group'."
        )

    def follow(self, following: RewardGradientRequest, batch: Scored) -> RewardGradientResult:
        """Return gradients of a reward with respect to final samples.

        Args:
            following: the reward, and the holder of models.
            batch: the samples; media are their final latents, (B, ...).
        """
        raise no_slopes(following.config)

    def asked_parts(self, config: RunConfig) -> frozenset[Part]:
        """Return the model parts that reward calls during training need."""
        return frozenset()

    def give_rewards(self, models: Models, host: ModelHost) -> None:
        """Give an algorithm access to the run's rewards, with gradients."""
        raise no_slopes(host.config)

    @abstractmethod
    def models(self, config: RunConfig, trainable: Trainable, further: Mapping[str, Trainable]) -> Models:
        """Return the models an algorithm can call: the policy, and further trained models by name."""


class Exporting(ABC):
    """How models are written for other libraries."""

    exporting_parts: ClassVar[frozenset[Part]]
    """Parts of the model that an export needs."""

    @abstractmethod
    def export(self, exporting: ExportRequest, folder: Path) -> None:
        """Write model, settings and card for other libraries, below ``folder``/pipeline."""


class Estimates(ABC):
    """Forwards and memory of a run, from its config."""

    @abstractmethod
    def cost(self, plan: RunPlan) -> Cost:
        """Return the cost of a run with a checked config."""

    def memory(self, plan: RunPlan, optimizer: OptimizerSizes, *, reference: bool) -> Memory | None:
        """Return the memory of a rank, from the model's architecture alone; None if the architecture is unknown.

        Args:
            plan: of a checked config.
            optimizer: sizes of its optimizer's state.
            reference: the loss compares with the base model.
        """
        return None

    def drawing_memory(self, plan: ResolvedConfig) -> DrawingMemory | None:
        """Return the memory of rendering texts with the renderer's model; None if the model is unknown."""
        return None


class Modality(SampleGeneration, TrainingRows, Exporting, Estimates):
    """All about policies of one kind."""

    @abstractmethod
    def check(self, plan: RunPlan) -> None:
        """Check the settings of this kind."""
