"""Trains one epoch: runs the stored trajectories, in micro-batches of rows, through the configured algorithm."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from configs.advantages import ReplaySection
from configs.errors import DataError
from models.weights.ema import Ema
from models.weights.sharding import between
from storage.artifacts.checkpoints import latest_checkpoint
from storage.layout import ArtifactRef
from tasks.algorithms.base import Batch, Models, Requirements
from tasks.inputs.weight_sources import ABOUT_POLICY, Weights, policy_folder, tensor_files
from tasks.modalities.rows import Units, micro_batches, padded, rows_among
from tasks.modalities.sample_set import Correctable, SampleSet
from tasks.runtime.ranks import Ranks
from tasks.training.checkpoints import Checkpoints
from tasks.training.data import TrainingData
from tasks.training.learning_rates import learning_rate
from tasks.training.loop import Reading, TrainedPart, TrainerState, dealt, mean_losses, run_updates
from tasks.training.loss_scaling import loss_scale
from tasks.training.optimizers import critic_settings, make_optimizer
from tasks.training.state import METRICS, Kept, read_state, write_state

if TYPE_CHECKING:
    from models.policies.trainable import Trainable
    from tasks.runtime.host import ModelHost


class TrainingEpoch:
    """Prepares the training of a policy on the data of an epoch, and writes the result."""

    def __init__(self, data: TrainingData, host: ModelHost, ref: ArtifactRef) -> None:
        """Bind to data and models.

        Args:
            data: the training data.
            host: holds the models.
            ref: the policy that training makes, which owns the checkpoints.
        """
        self._data, self._host, self._ref = data, host, ref
        self._context, self._config, self._epoch = data.context, data.config, data.epoch

    @contextmanager
    def updates(self, folder: Path) -> Iterator[tuple[Callable[[], None], TrainerState, int]]:
        """Yield a function, the trainer and the epoch's number of rows; write the policy afterwards.

        The caller calls the function inside: it runs the updates after the last committed checkpoint.
        """
        self._host.use_threads()
        requires = self._data.algorithm.requires
        state = self._state()
        samples = self._data.samples(self._host)
        average = state.ema.values if state.ema is not None else None
        models = self._models(state.trainable, requires, average, state.extra_parts)
        plan = self._data.plan(samples)
        self._resume(state)
        models.on_policy = models.on_policy and not state.metrics
        if state.metrics:
            samples.changed_policy()
        split = self._host.token_split
        together = nullcontext() if split is None else split.over(state.trainable.modules())
        with (
            together,
            self._checkpoints() as checkpoints,
            self._corrected(samples, models, requires, plan),
        ):
            run = partial(
                run_updates,
                state,
                self._data.algorithm,
                models,
                plan,
                reading=Reading(self._batches(samples), samples.begin_update, samples.alike),
                micro_batch_size=self._config.execution.micro_batch_size,
                section=self._config.optimize,
                ranks=self._ranks,
                after_update=lambda done: self._after_update(state, checkpoints, samples, done, len(plan)),
            )
            yield run, state, sum(len(units.rows) for units in plan)
        if state.left_out and self._host.ranks.first:
            self._context.reporter.message(
                f"epoch {self._epoch}: approx_kl is {state.left_out['left_out_kl']:.3g}, above optimize.stop_kl "
                f"{self._config.optimize.stop_kl:g}: {state.left_out['left_out']} of {len(plan)} updates are left out."
            )
        write_state(state, folder, self._host.ranks, behavior=self._behavior(state, models, requires))
        if self._host.ranks.first:
            about = {"trained": "lora" if state.trainable.lora else "full", "updates": state.total_updates}
            (folder / ABOUT_POLICY).write_text(json.dumps(about, sort_keys=True))

    def losses(self) -> tuple[dict[str, float], int]:
        """Return the mean loss of the policy's average, or else its weights, with the algorithm's metrics, over all
        rows of the data, and the number of rows; all ranks must call this together.

        Raises:
            DataError: no row has a loss.
        """
        self._host.use_threads()
        trainable, requires = self._host.trainable(self._data.policy, Weights.AVERAGE), self._data.algorithm.requires
        trainable.scatter()
        average = [parameter.detach() for parameter in trainable.parameters()]
        models, samples = self._models(trainable, requires, average, {}), self._data.samples(self._host)
        units, split = samples.units(requires), self._host.token_split
        if not len(units):
            raise DataError("data.heldout: no row has a loss, as all ratings are neutral or equal. Add others.")
        with nullcontext() if split is None else split.over(trainable.modules()):
            found = mean_losses(
                self._data.algorithm,
                models,
                units,
                reading=Reading(self._batches(samples), samples.begin_update, samples.alike),
                micro_batch_size=self._config.execution.micro_batch_size,
                ranks=self._ranks,
            )
        return found, len(units.rows)

    @property
    def _ranks(self) -> Ranks:
        return self._host.ranks.sharing(self._config.execution.context_parallel)

    def _state(self) -> TrainerState:
        """Return the trainer state at the end of the previous policy's training."""
        before = self._data.policy
        trainable = self._host.borrow(before)
        kept, self._host.trainer = self._host.trainer, None
        if kept is not None and kept.policy == str(before) and self._holds_extra(cast(Kept, kept)):
            return cast(Kept, kept).state(trainable)
        section = self._config.optimize
        parameters = trainable.parameters()
        ema = Ema(parameters, decay=section.ema.decay) if section.ema else None
        scale = loss_scale(self._config.model.dtype)
        optimizer = make_optimizer(parameters, section, self._config.execution, device=self._host.device)
        state = TrainerState(trainable, optimizer, ema, 0, scale=scale)
        if self._data.algorithm.requires.critic:
            state.extra_parts["critic"] = self._critic(self._host.critic.borrow(before))
        folder = policy_folder(self._context.store, before)
        if (folder / METRICS).exists():
            read_state(state, folder)
            state.metrics.clear()
        return state

    def _holds_extra(self, kept: Kept) -> bool:
        """Borrow the further trained models; return whether they are the kept ones."""
        return all(part.trainable is self._host.critic.borrow(self._data.policy) for part in kept.extra_parts.values())

    def _critic(self, trainable: Trainable) -> TrainedPart:
        section = critic_settings(self._config.optimize, self._config.critic)
        execution, device = self._config.execution, self._host.device
        return TrainedPart(
            trainable,
            make_optimizer(trainable.parameters(), section, execution, device=device),
            learning_rate=partial(learning_rate, section),
            max_grad_norm=section.max_grad_norm,
        )

    def _models(
        self,
        trainable: Trainable,
        requires: Requirements,
        average: list[torch.Tensor] | None,
        extra_parts: Mapping[str, TrainedPart],
    ) -> Models:
        """Return the models of the algorithm; behavior weights, base model and teachers only if it needs them."""
        if requires.reference:
            self._host.give_reference(trainable)
        for name, folder in requires.teachers:
            self._host.give_teacher(trainable, folder, name)
        further = {name: part.trainable for name, part in extra_parts.items()}
        models = self._data.kind.models(self._config, trainable, further)
        models.held = requires.critic and self._epoch <= self._config.critic.alone_epochs
        models.average, models.meter = average, trainable.policy.meter
        if self._config.optimize.inner_epochs > 1 and not trainable.sharded:
            # Ranks in lockstep cannot skip a forward that only some of them have cached.
            models.remembered = {}
        if requires.rewards:
            self._data.kind.give_rewards(models, self._host)
        if requires.behavior:
            stored = tensor_files(policy_folder(self._context.store, self._data.policy), Weights.BEHAVIOR.value)
            models.on_policy = not stored and self._config.optimize.replay is None
            if stored:
                models.behavior = self._host.stored_weights(stored)
            else:
                models.behavior = [parameter.detach().clone() for parameter in trainable.parameters()]
        return models

    def _batches(self, samples: SampleSet) -> Callable[[Units], Batch]:
        size = self._config.execution.micro_batch_size
        return lambda units: samples.batch(units, padded(len(units.rows), size))

    @contextmanager
    def _corrected(
        self, samples: SampleSet, models: Models, requires: Requirements, plan: Sequence[Units]
    ) -> Iterator[None]:
        """Inside, replace old log-probs and means of stale rows with those of the policy this epoch starts from."""
        section = self._config.optimize.replay
        if section is None and self._config.execution.ahead:
            section = ReplaySection(epochs=0)
        compares = requires.data == "transitions"
        if section is None or not (section.proximal and compares and isinstance(samples, Correctable)):
            yield
            return
        start, ranks = self._host.starting_weights(self._data.policy), self._ranks
        size = self._config.execution.micro_batch_size
        with tempfile.TemporaryFile() as file:
            with models.trainable.holding(start):
                stale, idle = self._own_stale(samples.stale(requires), plan, models)
                kept = file if requires.old_means else None
                proximal = samples.recompute(stale, models, size=size, file=kept, idle=idle)
            # The weight of a whole sample needs all its rows, and other ranks may train some of them.
            everything = section.level == "sequence" and ranks.shares > 1
            known = ranks.gather_parts(proximal.log_probs) if everything else proximal.log_probs
            samples.correct(replace(proximal, log_probs=known), section)
            yield

    def _own_stale(self, stale: Units, plan: Sequence[Units], models: Models) -> tuple[Units, list[Units]]:
        """Return the stale rows this rank trains, and extra micro-batches that keep ranks in lockstep."""
        ranks, size = self._ranks, self._config.execution.micro_batch_size
        if ranks.shares == 1 or not len(plan):
            return stale, []
        own = rows_among(stale, [chunk for update in plan for chunk in dealt(micro_batches(update, size), ranks)])
        if not models.trainable.sharded:
            return own, []
        count = len(micro_batches(own, size))
        most = int(ranks.largest(torch.tensor(count)))
        return own, [micro_batches(plan[0], size)[0]] * (most - count)

    def _behavior(
        self, state: TrainerState, models: Models, requires: Requirements
    ) -> Mapping[str, torch.Tensor] | None:
        """Return the weights of the next rollout's policy, if it follows the trained one slowly."""
        decay = requires.decay(self._epoch) if requires.decay is not None else 0.0
        if decay == 0.0:
            return None
        pairs = zip(state.trainable.named_parameters(), models.behavior, strict=True)
        return {name: between(new.detach(), old, decay) for (name, new), old in pairs}

    def _checkpoints(self) -> Checkpoints:
        ranks = self._host.saving_ranks if self._config.execution.checkpoint_every else self._host.ranks
        return Checkpoints(self._context.store, self._ref, ranks)

    def _after_update(
        self, state: TrainerState, checkpoints: Checkpoints, samples: SampleSet, done: int, total: int
    ) -> None:
        latest = state.metrics[-1]
        samples.changed_policy()
        if done == 1:
            self._warn_of_gap(latest)
        if self._host.ranks.first:
            self._context.reporter.progress("optimize", self._epoch, done, total, f"loss {latest['loss']:+.4f}")
        every = self._config.execution.checkpoint_every
        if every and done % every == 0 and done < total:
            checkpoints.take(state, done)

    def _warn_of_gap(self, first: Mapping[str, float]) -> None:
        """Warn if log-probs before the first update differ from the rollout's by more than the algorithm's limit."""
        name, limit = getattr(self._data.algorithm, "gap_limit", ("", math.inf))
        if first.get("replay_gap_max", 0.0) > limit:
            self._context.reporter.message(
                f"epoch {self._epoch}: before the first update log-probs differ from the rollout's by up to "
                f"{first['replay_gap_max']:.2g} in the unit of {name}, above its {limit:.2g}: rows of later updates "
                "are clipped or masked by rounding alone. "
                "Rollout and training call the model differently; with model.dtype float32, or equal "
                "execution.rollout_batch_size and micro_batch_size, the gap is smaller."
            )

    def _resume(self, state: TrainerState) -> None:
        found = latest_checkpoint(self._context.store, self._ref)
        if found is None:
            return
        state.metrics.clear()
        read_state(state, found[1])
        self._context.reporter.message(f"epoch {self._epoch}: training resumes after update {found[0]}.")
