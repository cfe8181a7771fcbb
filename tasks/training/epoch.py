"""Trains one epoch: runs the stored trajectories, in micro-batches of rows, through the configured algorithm."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowmill.configs.advantages import ReplaySection
from flowmill.configs.errors import DataError
from flowmill.configs.schema import OptimizeSection
from flowmill.models.policies.trainable import Trainable
from flowmill.models.weights.ema import Ema
from flowmill.models.weights.lora import stack_note
from flowmill.models.weights.sharding import between
from flowmill.storage.artifacts.checkpoints import latest_checkpoint
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.algorithms.base import Batch, Models, Requirements
from flowmill.tasks.inputs.weight_sources import POLICY_FILE, Weights, policy_folder, tensor_files
from flowmill.tasks.modalities.rows import Units, micro_batches, padded, rows_among
from flowmill.tasks.modalities.sample_set import Correctable, SampleSet
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.checkpoints import Checkpoints
from flowmill.tasks.training.data import TrainingData
from flowmill.tasks.training.learning_rates import learning_rate
from flowmill.tasks.training.loop import Reading, TrainedPart, TrainerState, mean_losses, read_chunks, run_updates
from flowmill.tasks.training.loss_scaling import loss_scale
from flowmill.tasks.training.metrics import idle_modules, idle_note
from flowmill.tasks.training.optimizers import make_optimizer
from flowmill.tasks.training.policy_moves import measured_units, policy_moves
from flowmill.tasks.training.reference_cache import recall_reference
from flowmill.tasks.training.state import METRICS, read_state, write_state

if TYPE_CHECKING:
    from flowmill.tasks.runtime.host import ModelHost


class TrainingEpoch:
    """Prepares the training of a policy on the data of an epoch, and writes the result."""

    def __init__(self, data: TrainingData, host: ModelHost, ref: ArtifactRef) -> None:
        """Bind to data and models.

        Args:
            host: holds the models.
            ref: the policy that training makes, which owns the checkpoints.
        """
        self._data, self._host, self._ref = data, host, ref
        self._context, self._config, self._epoch = data.context, data.config, data.epoch

    @contextmanager
    def updates(
        self, folder: Path, left_out: Mapping[str, float]
    ) -> Iterator[tuple[Callable[[], None], TrainerState, int]]:
        """Yield a function, the trainer and the epoch's number of rows; write the policy afterwards.

        The caller calls the function inside: it runs the updates after the last committed checkpoint. If the trainer
        then has another ``left_out``, nothing is written: an update is to be undone, so the caller trains the epoch
        again without those left out, which takes no memory for a copy of the trainer.

        Args:
            folder: for the policy.
            left_out: that of the trainer of the call before; empty in the first.
        """
        self._host.use_threads()
        requires, state, samples = self._data.algorithm.requires, self._state(), self._data.samples(self._host)
        average = state.ema.values if state.ema is not None else None
        models = self._models(state.trainable, requires, average, state.extra_parts)
        plan = self._data.plan(samples)
        self._note_stack(state.trainable)
        remaining = plan[: len(plan) - int(left_out.get("left_out", 0))]
        section = self._config.optimize
        if left_out:
            section = section.model_copy(update={"stop_kl": None})
        else:
            self._resume(state)
        models.on_policy = models.on_policy and not state.metrics
        if state.metrics:
            samples.changed_policy()
        split = self._host.token_split
        together = nullcontext() if split is None else split.over(state.trainable.modules())
        loop: dict[str, Any] = {
            "reading": self._reading(samples, requires),
            "micro_batch_size": self._config.execution.micro_batch_size,
            "ranks": self._ranks,
        }
        algorithm, rows = self._data.algorithm, sum(len(units.rows) for units in remaining)
        measures = bool(remaining) and requires.approx_kl and not models.frozen
        read = [*remaining, measured_units(plan)] if measures else remaining
        with together, self._checkpoints() as checkpoints, self._corrected(samples, models, requires, read):
            recall_reference(models, plan[: len(state.metrics)], **loop)
            done = partial(self._after_update, state, None if left_out else checkpoints, samples, total=len(remaining))
            yield (
                partial(run_updates, state, algorithm, models, remaining, section=section, after_update=done, **loop),
                state,
                rows,
            )
            if not state.left_out and measures:
                self._measure(state, models, partial(policy_moves, algorithm, models, plan, **loop), section)
        if state.left_out:
            return
        state.left_out = dict(left_out)
        if self._host.ranks.first:
            self._say_left_out(left_out, len(plan))
            self._say_idle(state)
        write_state(state, folder, self._host.ranks, behavior=self._behavior(state, models, requires))
        if self._host.ranks.first:
            metadata = {"trained": "lora" if state.trainable.lora else "full", "updates": state.total_updates}
            (folder / POLICY_FILE).write_text(json.dumps(metadata, sort_keys=True))

    def _measure(
        self, state: TrainerState, models: Models, moves: Callable[[], dict[str, float]], section: OptimizeSection
    ) -> None:
        """Measure how far the updates moved the policy; further than ``stop_kl``, the last is to be undone."""
        if state.trainable.needs_reference:
            models.base = cache(partial(self._host.stored_weights, self._context.start_files))
        else:
            self._host.give_reference(state.trainable)
        state.moved = moves()
        if section.stop_kl is not None and state.moved["kl_epoch"] > section.stop_kl:
            state.left_out = {"left_out": 1, "left_out_kl": state.moved["kl_epoch"]}

    def _note_stack(self, trainable: Trainable) -> None:
        if self._epoch == 1 and self._host.ranks.first and trainable.lora is not None:
            for note in filter(None, map(stack_note, trainable.policy.trained.values())):
                self._context.reporter.message(note)

    def _say_idle(self, state: TrainerState) -> None:
        idle, before = idle_modules(state.metrics), self._host.idle_modules
        self._host.idle_modules = idle
        if idle and idle != before:
            self._context.reporter.message(f"epoch {self._epoch}: {idle_note(idle)}")

    def _say_left_out(self, left_out: Mapping[str, float], total: int) -> None:
        if left_out:
            last = int(total - left_out["left_out"])
            self._context.reporter.message(
                f"epoch {self._epoch}: with update {last + 1} of {total} the policy is {left_out['left_out_kl']:.3g} "
                f"nats from the one that made the samples, above optimize.stop_kl {self._config.optimize.stop_kl:g}: "
                f"this update is undone, and the {total - last - 1} after it are left out."
            )

    def losses(self) -> tuple[dict[str, float], int]:
        """Return the mean loss of the policy's average, or else its weights, with the algorithm's metrics, over all
        rows of the data, and the number of rows; all ranks must call this together.
        """
        self._host.use_threads()
        trainable, requires = self._host.trainable(self._data.policy, Weights.AVERAGE), self._data.algorithm.requires
        trainable.scatter()
        average = [parameter.detach() for parameter in trainable.parameters()]
        models, samples = self._models(trainable, requires, average, {}), self._data.samples(self._host)
        units, split = samples.units(requires), self._host.token_split
        if not len(units):
            raise DataError(
                "data.heldout: no row has a loss, as all ratings are neutral, equal or too low. Add others."
            )
        with nullcontext() if split is None else split.over(trainable.modules()):
            losses = mean_losses(
                self._data.algorithm,
                models,
                units,
                reading=self._reading(samples, requires),
                micro_batch_size=self._config.execution.micro_batch_size,
                ranks=self._ranks,
            )
        return losses, len(units.rows)

    @property
    def _ranks(self) -> Ranks:
        return self._host.ranks.sharing(self._config.execution.context_parallel)

    def _state(self) -> TrainerState:
        """Return the trainer state at the end of the previous policy's training."""
        before = self._data.policy
        trainable = self._host.borrow(before)
        retained, self._host.trainer = self._host.trainer, None
        if retained is not None and retained[0] == before and self._holds(retained[1], trainable):
            state: TrainerState = retained[1]
            return state
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

    def _holds(self, state: TrainerState, trainable: Trainable) -> bool:
        """Borrow the further trained models; return whether all models are the retained ones."""
        parts = state.extra_parts.values()
        extra = all(part.trainable is self._host.critic.borrow(self._data.policy) for part in parts)
        return extra and state.trainable is trainable

    def _critic(self, trainable: Trainable) -> TrainedPart:
        section = self._config.critic.settings_of(self._config.optimize)
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
        models = self._data.modality.models(self._config, trainable, further)
        models.frozen = requires.critic and self._epoch <= self._config.critic.alone_epochs
        models.average, models.meter = average, trainable.policy.meter
        section = self._config.optimize
        if requires.reference and section.inner_epochs > 1 and not trainable.sharded:
            # Ranks in lockstep cannot skip a forward that only some of them have cached.
            models.remembered = {}
        if requires.rewards:
            self._data.modality.give_rewards(models, self._host)
        if requires.behavior:
            stored = tensor_files(policy_folder(self._context.store, self._data.policy), Weights.BEHAVIOR.value)
            models.on_policy = not stored and self._config.optimize.replay is None
            if stored:
                models.behavior = self._host.stored_weights(stored)
            else:
                models.behavior = [parameter.detach().clone() for parameter in trainable.parameters()]
        return models

    def _reading(self, samples: SampleSet, requires: Requirements) -> Reading:
        """Return how rows are read: a whole update is announced before its first micro-batch."""
        size = self._config.execution.micro_batch_size

        def read(batch: Callable[[Units, int], Batch], units: Units) -> Batch:
            return batch(units, padded(len(units.rows), size))

        def begin(units: Units) -> None:
            samples.begin_update(units)
            if requires.mismatched:
                samples.pair_prompts(units)

        apart = partial(read, samples.mismatched) if requires.mismatched else None
        return Reading(partial(read, samples.batch), begin, samples.alike, apart)

    @contextmanager
    def _corrected(
        self, samples: SampleSet, models: Models, requires: Requirements, plan: Sequence[Units]
    ) -> Iterator[None]:
        """Inside, replace old log-probs and means of stale rows with those of the policy this epoch starts from."""
        section = self._config.optimize.replay
        if section is None and self._config.execution.ahead:
            section = ReplaySection(epochs=0)
        compares = requires.data == "transitions"
        if section is None or not (compares and isinstance(samples, Correctable)):
            yield
            return
        start = self._host.starting_weights(self._data.policy)
        size = self._config.execution.micro_batch_size
        with tempfile.TemporaryFile() as file:
            with models.trainable.holding(start):
                stale, idle = self._own_stale(samples, requires, plan, sharded=models.trainable.sharded)
                means_file = file if requires.old_means else None
                proximal = samples.recompute(stale, models, size=size, file=means_file, idle=idle)
            samples.correct(proximal, section)
            yield

    def _own_stale(
        self, samples: Correctable, requires: Requirements, plan: Sequence[Units], *, sharded: bool
    ) -> tuple[Units, list[Units]]:
        """Return the stale rows this rank reads, and extra micro-batches that keep ranks in lockstep."""
        ranks, size, stale = self._ranks, self._config.execution.micro_batch_size, samples.stale(requires)
        if ranks.shares == 1 or not len(plan):
            return stale, []
        read = partial(read_chunks, alike=samples.alike, size=size, ranks=ranks, sharded=sharded)
        own = rows_among(stale, [chunk for units in plan for chunk in read(units)])
        if not sharded:
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
        self, state: TrainerState, checkpoints: Checkpoints | None, samples: SampleSet, done: int, *, total: int
    ) -> None:
        latest = state.metrics[-1]
        samples.changed_policy()
        if done == 1:
            self._warn_of_gap(latest)
        if self._host.ranks.first:
            self._context.reporter.progress("optimize", self._epoch, done, total, f"loss {latest['loss']:+.4f}")
        every = self._config.execution.checkpoint_every
        if checkpoints is not None and every and done % every == 0 and done < total:
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
        checkpoint = latest_checkpoint(self._context.store, self._ref, self._host.ranks)
        if checkpoint is None:
            return
        state.metrics.clear()
        read_state(state, checkpoint[1])
        self._context.reporter.message(f"epoch {self._epoch}: training resumes after update {checkpoint[0]}.")
