"""A second kind of policy, as a user would add one: it chooses one of a few words, regardless of the prompt.

The whole kind is here: policy, identity, rows, algorithm and reward. Nothing else of the project knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.base import Policy, PolicySettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.trainable import Trainable
from flowmill.models.rewards.base import Batch as Scored
from flowmill.models.rewards.base import Needs, declare
from flowmill.models.weights.stored_weights import StoredWeights
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.algorithms.base import Batch, Models, Requirements, RowLoss, expect
from flowmill.tasks.inputs.prompts import Prompt
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.inputs.weight_sources import PIPELINE, Weights
from flowmill.tasks.modalities.forward_cost import Cost
from flowmill.tasks.modalities.modality import ExportRequest, Modality, Training
from flowmill.tasks.modalities.sample_set import SampleSet, tensor_of
from flowmill.tasks.modalities.samplers import SampleRequest, SamplingContext
from flowmill.tasks.runs.seeds import derive
from flowmill.tasks.runs.sharding import rollout_cuts
from flowmill.tasks.specs.modalities import ModalitySpec
from flowmill.tasks.specs.plan import RunPlan

WORDS = ("red", "green", "blue", "gray")
NAME = "tests.support.categorical:Categorical"
FILE = "choice.safetensors"


class Choice(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(len(WORDS)))


class Chooser(Policy):
    """The policy."""

    kind = NAME
    blocks, lora_targets = (), ()

    def __init__(self, settings: PolicySettings, model: Choice) -> None:
        super().__init__(settings)
        self.model = model

    @classmethod
    def settings_for(
        cls, config: RunConfig, *, dtype: torch.dtype, device: torch.device, empty: bool
    ) -> PolicySettings:
        return PolicySettings(dtype=dtype, device=device, empty=empty)

    @classmethod
    def load(cls, folder: Path, settings: Any, parts: frozenset[Part], options: Mapping[str, Any]) -> Chooser:
        model = Choice()
        model.load_state_dict(load_file(folder / FILE))
        policy = cls(settings, model)
        policy.stored = {"choice": StoredWeights((folder / FILE,), {"logits": torch.float32})}
        return policy

    @property
    def trained(self) -> dict[str, Any]:
        return {"choice": self.model}

    def trainable(self, lora: Any, *, seed: int) -> Trainable:
        return Trainable(self, lora, seed=seed)

    def save_lora(self, folder: Path) -> None:
        raise NotImplementedError


def write_base(folder: Path) -> None:
    folder.mkdir()
    save_file(Choice().state_dict(), folder / FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceBatch(Batch):
    """Choices that were made."""

    words: Tensor
    """(B,) int64."""
    old_log_probs: Tensor
    """(B,) float32."""


class ChoiceSet(SampleSet):
    """One row per sample."""

    def positions(self) -> np.ndarray:
        return np.ones(len(self.reader), np.int64)

    def gather(self, rows: np.ndarray, common: Mapping[str, Any]) -> ChoiceBatch:
        samples = rows[:, 0].tolist()
        return ChoiceBatch(
            words=torch.tensor([int(self.reader.array("tokens", sample)[0]) for sample in samples]),
            old_log_probs=tensor_of([self.reader.log_probs[sample][0] for sample in samples], self.device),
            **common,
        )


class ChoiceMaker:
    """Draws words from seeds of run, epoch, prompt and replica."""

    def __init__(self, making: SamplingContext, weights: Weights, seed: tuple[Any, ...]) -> None:
        self._making, self._weights, self._seed = making, weights, seed

    def load(self) -> None:
        self._making.host.assemble(self._making.policy, self._weights)

    def rest(self) -> None:
        pass

    @torch.no_grad()
    def make(self, jobs: Sequence[SampleRequest]) -> list[Sample]:
        held = self._making.host.trainable(self._making.policy, self._weights)
        log_probs = held.policy.trained["choice"].logits.log_softmax(0)
        bounds = log_probs.exp().cumsum(0).numpy()
        samples = []
        for job in jobs:
            seed = derive(*self._seed, job.prompt.id, job.replica)
            word = int(np.searchsorted(bounds, np.random.default_rng(seed).random() * bounds[-1], side="right"))
            samples.append(
                Sample(
                    sample_id=job.name,
                    prompt_id=job.prompt.id,
                    group_id=job.prompt.id,
                    prompt=job.prompt.text,
                    metadata=job.prompt.metadata,
                    epoch=self._making.epoch,
                    replica=job.replica,
                    seed=seed,
                    policy=str(self._making.policy),
                    sigmas=(),
                    steps=(0,),
                    log_probs=log_probs[word : word + 1].numpy(),
                    tokens=np.array([word], np.int32),
                )
            )
        return samples


class Categorical(Modality, ModalitySpec):
    """Everything that is asked of the kind."""

    encodes = False
    sampling_parts = training_parts = exporting_parts = frozenset({Part.DENOISER})

    def encoding_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        return {}

    def rollout_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        rollout = plan.config.rollout
        names = ("prompts_per_epoch", "group_size", "store")
        return {"rollout": {name: getattr(rollout, name) for name in names}}

    def given_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        return {}

    def evaluation_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        return {}

    def training_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        return {}

    def export_options(self, plan: ResolvedConfig) -> Mapping[str, Any]:
        return {}

    def check(self, plan: RunPlan) -> None:
        pass

    def cost(self, plan: RunPlan) -> Cost:
        config = plan.config
        samples = config.rollout.prompts_per_epoch * config.rollout.group_size
        return Cost(
            prompts=plan.prompt_counts,
            samples_per_epoch=samples,
            rollout_forwards=samples,
            optimize_rows=samples,
            optimize_forwards=samples,
            reference_forwards=0,
            evaluate_forwards=config.evaluate.samples,
            updates=config.run.epochs * config.optimize.updates_per_epoch,
            shards_per_epoch=len(rollout_cuts(config)),
            latent_bytes_per_epoch=None,
            latent_bytes=None,
            evaluations=1 + config.run.epochs,
            reference=False,
        )

    def encode(self, host: Any, prompts: Sequence[Prompt]) -> Mapping[str, Tensor]:
        raise AssertionError("prompts are taken as they are")

    def rollout(self, making: SamplingContext) -> ChoiceMaker:
        return ChoiceMaker(making, Weights.BEHAVIOR, (making.config.run.seed, "rollout", making.epoch))

    def evaluation(self, making: SamplingContext) -> ChoiceMaker:
        return ChoiceMaker(making, Weights.AVERAGE, (making.config.evaluate.seed, "evaluate"))

    def check_scored(self, section: RewardSection, needs: Needs, config: RunConfig) -> None:
        if needs.media not in ("samples", "texts"):
            raise ConfigError(f"rewards: '{section.slot}' scores {needs.media}, but words are made.")

    def trial(self, config: RunConfig) -> np.ndarray:
        return np.array(WORDS[:1], object)

    def scored(self, shard: TrajectoryShard, needs: Needs, recent: Sequence[np.ndarray] | None) -> np.ndarray:
        return np.array([WORDS[int(shard.array("tokens", row)[0])] for row in range(shard.table.num_rows)], object)

    def show(self, folder: Path, batch: Scored, verdicts: Sequence[str]) -> None:
        lines = [
            f"{each[0]}: {each[1]} ({each[2]})" for each in zip(batch.prompts, batch.media, verdicts, strict=False)
        ]
        (folder / "choices.txt").write_text("\n".join(lines))

    def training_set(
        self, training: Training, shards: Sequence[TrajectoryShard], advantages: pa.Table, requires: Requirements
    ) -> ChoiceSet:
        return ChoiceSet(shards, advantages)

    def models(self, config: RunConfig, trainable: Trainable, beside: Mapping[str, Trainable]) -> Models:
        return Models(trainable=trainable)

    def export(self, exporting: ExportRequest, folder: Path) -> None:
        model = exporting.host.exportable(exporting.inputs[0], Weights.AVERAGE).policy.trained["choice"]
        (folder / PIPELINE).mkdir()
        save_file({"logits": model.logits.detach()}, folder / PIPELINE / FILE)


@dataclass(frozen=True)
class Reinforce:
    """Ratio times advantage, once over the data."""

    @property
    def requires(self) -> Requirements:
        return Requirements(kind=NAME)

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        rows = expect(batch, ChoiceBatch)
        log_probs = models.trainable.policy.trained["choice"].logits.log_softmax(0)[rows.words]
        ratio = torch.exp(log_probs - rows.old_log_probs)
        return RowLoss(loss=-rows.advantages * ratio, metrics={"ratio": ratio.detach()})


@declare(media="texts")
def is_green(media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(word == "green") for word in media]


def settings(folder: Path) -> dict[str, Any]:
    """Return a config of such a run, with its base model and prompts in a folder."""
    write_base(folder / "chooser")
    (folder / "train.txt").write_text("a wall\na door\na roof\na gate\n")
    (folder / "heldout.txt").write_text("a house\n")
    return {
        "run": {"name": "chooser", "epochs": 3},
        "store": {"root": str(folder / "store")},
        "model": {"policy": "tests.support.categorical:Chooser", "kind": NAME, "path": str(folder / "chooser")},
        "prompts": {"train": str(folder / "train.txt"), "heldout": str(folder / "heldout.txt")},
        "rollout": {"prompts_per_epoch": 4, "group_size": 16, "groups_per_shard": 1, "media": {"format": "none"}},
        "rewards": [{"name": "tests.support.categorical:is_green", "label": "green"}],
        "optimize": {"learning_rate": 0.3, "algorithm": {"name": "tests.support.categorical:Reinforce"}},
        "evaluate": {"every": 1, "samples": 32, "images": 4},
    }
