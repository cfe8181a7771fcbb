"""The training data of an epoch and the plan of its updates, from stored artifacts, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowmill.configs.errors import CorruptError, DataError
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.storage.trajectories.gradients import StoredGradients
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.advantages.ratings import advantages_of_ratings
from flowmill.tasks.algorithms.base import Algorithm
from flowmill.tasks.inputs.components import open_trajectory_store
from flowmill.tasks.inputs.data_section import data_of
from flowmill.tasks.modalities.gradients import RewardGradients
from flowmill.tasks.modalities.modality import Training, TrainingRows
from flowmill.tasks.modalities.rows import Units, plan_updates
from flowmill.tasks.modalities.sample_set import SampleSet

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext
    from flowmill.tasks.runtime.host import ModelHost

#: Reasons why ingested samples train nothing: if an algorithm compares those of a prompt, trains on desired ones alone,
#: or counts each alone.
_NO_PAIR = (
    "no prompt has two samples of different ratings, and optimize.algorithm '{}' compares samples of one prompt. Give "
    "such samples, or use 'kto', which learns from single ratings, or 'sft'."
)
_NONE_DESIRED = (
    "no sample is chosen or rated above the neutral rating (data.neutral, or else the middle of data.scale), and "
    "optimize.algorithm '{}' trains on such alone. Set data.neutral to a rating between good and bad, or use 'kto'."
)
_NEUTRAL = (
    "all ratings are neutral (data.neutral, or else the middle of data.scale), so optimize.algorithm '{}' learns "
    "nothing from them. Set data.neutral to a rating between good and bad, or use 'sft' without ratings."
)


class TrainingData:
    """The stored samples of an epoch, and of those it replays, with their advantages."""

    def __init__(self, context: RunContext, modality: TrainingRows, epoch: int, inputs: Sequence[ArtifactRef]) -> None:
        """Bind to the artifacts of an epoch.

        Args:
            modality: that of the policy.
            inputs: the previous policy, then trajectories, advantages and, if stored, gradients of this epoch and of
                the replayed ones.
        """
        self.context, self.modality, self.epoch = context, modality, epoch
        self.policy, *rest = inputs
        self.config = context.config
        # Each epoch has trajectories, advantages and, if stored, the gradient of each reward.
        each = 2 + (len(self.config.rewards) if self.context.plan.has_gradients else 0)
        self._trajectories, self._advantages = rest[::each], rest[1::each]
        self._gradients = [rest[start + 2 : start + each] for start in range(0, len(rest), each)]

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return self.context.plan.algorithm

    def samples(self, host: ModelHost | None = None) -> SampleSet:
        """Return the samples; batches need a host."""
        advantages = self.earned()
        shards = [shard for ref in self._trajectories for shard in self._open(ref)]
        if self.context.plan.has_data:
            # An epoch trains on some of the ingested samples.
            chosen = [advantages.column(name).combine_chunks() for name in ("sample_id", "prompt_id")]
            shards = [shard.only(*chosen) for shard in shards]
        training = Training(
            context=self.context,
            host=host,
            epoch=self.epoch,
            predicted=self._predicted,
            gradients=self._followed() if self.context.plan.has_gradients else None,
        )
        requires, replay = self.algorithm.requires, self.config.optimize.replay
        samples = self.modality.training_set(training, shards, advantages, requires)
        if replay is not None:
            samples.choose(replay, requires)
        if self.config.data is not None and self.config.data.prior is not None:
            samples.factors = samples.advantages
        return samples

    def earned(self) -> pa.Table:
        """Return the advantages of all samples."""
        return pa.concat_tables([self._earned(ref) for ref in self._advantages])

    def _earned(self, advantages: ArtifactRef) -> pa.Table:
        store = self.context.store
        table = read_rows(store, advantages)
        if not self.context.plan.estimator.per_token:
            return table
        parts = read_rows(store, advantages, "token_advantages")
        if parts.column("sample_id") != table.column("sample_id"):
            raise CorruptError(f"{advantages} has token advantages of samples other than its own.")
        for name in parts.column_names[1:]:
            table = table.append_column(parts.schema.field(name), parts.column(name))
        return table

    def _followed(self) -> RewardGradients:
        """Return the gradients of all rewards, each over all epochs."""
        store, rewards = self.context.store, self.config.rewards
        parts = [
            (reward.weight, StoredGradients(store, [refs[number] for refs in self._gradients]))
            for number, reward in enumerate(rewards)
        ]
        return RewardGradients(parts=parts)

    def plan(self, samples: SampleSet) -> list[Units]:
        """Return the units of each update."""
        units = samples.units(self.algorithm.requires)
        if not len(units):
            self._without_units()
        section, seed = self.config.optimize, self.config.run.seed
        updates, inner = section.updates_per_epoch, section.inner_epochs
        return plan_updates(units, updates=updates, inner_epochs=inner, seed=seed, epoch=self.epoch)

    def _without_units(self) -> None:
        """Say why the epoch trains nothing; refuse ingested samples if none of them can be trained on."""
        data, say, at = self.config.data, self.context.reporter.message, f"epoch {self.epoch}"
        if data is None:
            say(f"{at}: in every group all rewards are equal: nothing to learn, the policy stays.")
            return
        requires = self.algorithm.requires
        reason = _NONE_DESIRED if requires.desired else _NEUTRAL if requires.unit == "row" else _NO_PAIR
        text = f"data.train: {reason.format(self.config.optimize.algorithm.name)}"
        if data.groups_per_epoch is None:
            raise DataError(text)
        say(f"{at}: {text} Other epochs have other samples.")

    def updates_of(self, sample_id: str) -> list[int]:
        """Return the updates of the epoch, counted from 0, that train a sample."""
        samples = self.samples()
        (numbers,) = np.nonzero(pc.equal(samples.reader.sample_ids, sample_id).to_numpy())
        return [i for i, units in enumerate(self.plan(samples)) if np.isin(units.rows[:, 0], numbers).any()]

    @property
    def _predicted(self) -> bool:
        """Whether the trained policy sampled all samples, so that their stored predictions are still valid."""
        if self.config.optimize.replay is not None or self.config.execution.ahead:
            return False
        return bool(self.context.store.require(self._trajectories[0]).options.get("unconditional"))

    def _open(self, trajectories: ArtifactRef) -> list[TrajectoryShard]:
        store, opener = self.context.store, open_trajectory_store(self.config.rollout.store)
        return [opener.open(store.files(trajectories, record)) for record in store.shards(trajectories)]


class HeldOutData(TrainingData):
    """All held-out rows of the data, with the advantages that they would have in training."""

    def earned(self) -> pa.Table:
        """Return the advantages of all rows."""
        table = read_rows(self.context.store, self._trajectories[0], "rewards")
        advantages = advantages_of_ratings(table.column("reward").to_numpy(), data_of(self.config))
        return table.append_column("advantage", pa.array(advantages))
