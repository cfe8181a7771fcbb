"""The training of one epoch: rows of the stored trajectories, in micro-batches, through the configured algorithm."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from configs.learning import ReplaySection
from models.averages import Ema
from models.policies.base import Conditioning
from models.sharding import between
from storage.checkpoints import latest_checkpoint
from storage.layout import ArtifactRef
from storage.tables import read_rows
from storage.trajectories.base import TrajectoryShard
from tasks.algorithms.base import Batch, Models, Requirements
from tasks.components import make_algorithm, make_kernel, open_trajectory_store
from tasks.execution.ranks import Ranks
from tasks.optimize.batches import ForwardSet, SampleSet, TransitionSet
from tasks.optimize.checkpoints import Checkpoints
from tasks.optimize.loop import TrainerState, dealt, run_updates
from tasks.optimize.optimizers import make_optimizer
from tasks.optimize.replay import RowFile, recompute
from tasks.optimize.rows import Units, micro_batches, padded, plan_updates, rows_among
from tasks.optimize.scaling import loss_scale
from tasks.optimize.state import METRICS, Kept, read_state, write_state
from tasks.seeds import derive
from tasks.sources import Weights, policy_folder, tensor_files
from tasks.stage import Output
from tasks.stages.policy import ABOUT

if TYPE_CHECKING:
    from tasks.execution.host import ModelHost
    from tasks.stages.optimize import OptimizeStage


class TrainingEpoch:
    """What an optimize stage does when it runs."""

    def __init__(self, stage: OptimizeStage) -> None:
        """Bind to a stage, for its inputs, its settings and its models."""
        self._stage, self._context, self._config = stage, stage.context, stage.config
        self._epoch, self._inputs = stage.epoch, stage.inputs()

    @property
    def _host(self) -> ModelHost:
        return self._stage.host

    def run(self, folder: Path) -> tuple[TrainerState, Output]:
        """Train, resuming from the last committed checkpoint of the epoch; return the trainer and what was written."""
        self._host.use_threads()
        algorithm = make_algorithm(self._config)
        state = self._state()
        samples = self._samples(algorithm.requires)
        models = self._models(state, algorithm.requires)
        plan = self._plan(samples, algorithm.requires)
        self._resume(state)
        models.on_policy = models.on_policy and not state.metrics
        if state.metrics:
            samples.changed_policy()
        batches = self._batches(samples)
        split = self._host.token_split
        together = nullcontext() if split is None else split.over(state.trainable.modules())
        with (
            together,
            self._checkpoints() as checkpoints,
            self._corrected(samples, models, batches, algorithm.requires, plan),
        ):
            run_updates(
                state,
                algorithm,
                models,
                plan,
                batches=batches,
                micro_batch_size=self._config.execution.micro_batch_size,
                section=self._config.optimize,
                ranks=self._ranks,
                after_update=lambda done: self._after_update(state, checkpoints, samples, done, len(plan)),
            )
        write_state(state, folder, self._host.ranks, behavior=self._behavior(state, models, algorithm.requires))
        if self._host.ranks.first:
            about = {"trained": "lora" if state.trainable.lora else "full", "updates": state.total_updates}
            (folder / ABOUT).write_text(json.dumps(about, sort_keys=True))
        rows = sum(len(units.rows) for units in plan)
        return state, Output(rows=rows, summary={"updates": state.metrics})

    def updates_of(self, sample_id: str) -> list[int]:
        """Return which updates of the epoch, counted from 0, a sample enters; no model is loaded."""
        requires = make_algorithm(self._config).requires
        samples = self._samples(requires)
        (numbers,) = np.nonzero(pc.equal(samples.reader.sample_ids, sample_id).to_numpy())
        plan = self._plan(samples, requires)
        return [i for i, units in enumerate(plan) if np.isin(units.rows[:, 0], numbers).any()]

    @property
    def _ranks(self) -> Ranks:
        return self._host.ranks.sharing(self._config.execution.context_parallel)

    def _state(self) -> TrainerState:
        """Return the trainer as the policy before left it."""
        before = self._inputs[0]
        trainable = self._host.borrow(before)
        kept, self._host.trainer = self._host.trainer, None
        if kept is not None and kept.policy == str(before):
            return cast(Kept, kept).state(trainable)
        section = self._config.optimize
        parameters = trainable.parameters()
        ema = Ema(parameters, decay=section.ema.decay) if section.ema else None
        scale = loss_scale(self._config.model.dtype)
        optimizer = make_optimizer(parameters, section, fused=self._config.execution.fused_adamw)
        state = TrainerState(trainable, optimizer, ema, 0, scale=scale)
        folder = policy_folder(self._context.store, before)
        if (folder / METRICS).exists():
            read_state(state, folder)
            state.metrics.clear()
        return state

    def _models(self, state: TrainerState, requires: Requirements) -> Models:
        """Return what the algorithm may ask for: behavior weights, base model and teacher only if it does."""
        if requires.reference:
            self._host.give_reference(state.trainable)
        if requires.teacher is not None:
            self._host.give_teacher(state.trainable, requires.teacher)
        average = state.ema.values if state.ema is not None else None
        trainable = state.trainable
        meter, kernel = trainable.policy.meter, make_kernel(self._config)
        models = Models(trainable=trainable, kernel=kernel, average=average, meter=meter)
        if self._config.optimize.inner_epochs > 1 and not trainable.sharded:
            # Ranks that compute in step cannot leave out what one of them happens to know.
            models.remembered = {}
        if requires.behavior:
            stored = tensor_files(policy_folder(self._context.store, self._inputs[0]), Weights.BEHAVIOR.value)
            models.on_policy = not stored and self._config.optimize.replay is None
            if stored:
                models.behavior = self._host.stored_weights(stored)
            else:
                models.behavior = [parameter.detach().clone() for parameter in state.parameters]
        return models

    def _samples(self, requires: Requirements) -> SampleSet:
        shards: list[TrajectoryShard] = []
        tables: list[pa.Table] = []
        for trajectories, rated in zip(self._inputs[1::2], self._inputs[2::2], strict=True):
            shards += self._open(trajectories)
            tables.append(read_rows(self._context.store, rated))
        advantages, ahead = pa.concat_tables(tables), self._config.execution.ahead
        if requires.data == "forward" and requires.times is not None:
            seed = derive(self._config.run.seed, "forward", self._epoch)
            return ForwardSet(shards, advantages, times=requires.times, seed=seed, ahead=ahead)
        return TransitionSet(
            shards,
            advantages,
            kernel=make_kernel(self._config),
            means=requires.old_means,
            unconditional=self._predicted_already(),
            ahead=ahead,
        )

    def _predicted_already(self) -> bool:
        """Return whether the rollouts hold what the policy, before its first update, predicts without the prompt."""
        manifest = self._context.store.require(self._inputs[1])
        made_by_it = self._config.optimize.replay is None and not self._config.execution.ahead
        return made_by_it and bool(manifest.options.get("unconditional"))

    def _open(self, trajectories: ArtifactRef) -> list[TrajectoryShard]:
        store, opener = self._context.store, open_trajectory_store(self._config.rollout.store)
        return [opener.open(store.files(trajectories, record)) for record in store.shards(trajectories)]

    def _plan(self, samples: SampleSet, requires: Requirements) -> list[Units]:
        units = samples.units(requires)
        if not len(units):
            self._context.reporter.message(
                f"epoch {self._epoch}: in every group all rewards are equal: nothing to learn, the policy stays."
            )
        section = self._config.optimize
        seed, epoch = self._config.run.seed, self._epoch
        return plan_updates(
            units, updates=section.updates_per_epoch, inner_epochs=section.inner_epochs, seed=seed, epoch=epoch
        )

    def _batches(self, samples: SampleSet) -> Callable[[Units], Batch]:
        by_id = self._context.prompts_by_id
        host, size = self._host, self._config.execution.micro_batch_size

        def condition(ids: Sequence[str]) -> Conditioning:
            # Read per batch: an epoch's conditioning may be larger than a device.
            return host.conditioning([by_id[prompt_id] for prompt_id in ids])

        return lambda units: samples.batch(units, padded(len(units.rows), size), condition)

    @contextmanager
    def _corrected(
        self,
        samples: SampleSet,
        models: Models,
        batches: Callable[[Units], Batch],
        requires: Requirements,
        plan: Sequence[Units],
    ) -> Iterator[None]:
        """Give rows of older policies, inside, the log-probs and means of the policy this epoch starts from."""
        section = self._config.optimize.replay
        if section is None and self._config.execution.ahead:
            section = ReplaySection(epochs=0)
        if section is None or not section.proximal or not isinstance(samples, TransitionSet):
            yield
            return
        start, ranks = self._host.starting_weights(self._inputs[0]), self._ranks
        size = self._config.execution.micro_batch_size
        with tempfile.TemporaryFile() as file:
            with models.trainable.holding(start):
                means = RowFile(file) if requires.old_means else None
                stale, idle = self._own_stale(samples.stale(requires), plan, models)
                proximal = recompute(stale, batches, models, micro_batch_size=size, means=means, idle=idle)
            # The weight of a whole sample is made of all its rows, which may be other ranks' to train.
            everything = section.level == "sequence" and ranks.shares > 1
            known = ranks.gather_parts(proximal.log_probs) if everything else proximal.log_probs
            samples.correct(replace(proximal, log_probs=known), section)
            yield

    def _own_stale(self, stale: Units, plan: Sequence[Units], models: Models) -> tuple[Units, list[Units]]:
        """Return the stale rows this rank trains, and micro-batches to take beside them to stay in step."""
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
        """Return the policy that rolls out next, where it follows the trained one slowly."""
        decay = requires.decay(self._epoch) if requires.decay is not None else 0.0
        if decay == 0.0:
            return None
        pairs = zip(state.trainable.named_parameters(), models.behavior, strict=True)
        return {name: between(new.detach(), old, decay) for (name, new), old in pairs}

    def _checkpoints(self) -> Checkpoints:
        ranks = self._host.saving_ranks if self._config.execution.checkpoint_every else self._host.ranks
        return Checkpoints(self._context.store, self._stage.ref, ranks)

    def _after_update(
        self, state: TrainerState, checkpoints: Checkpoints, samples: SampleSet, done: int, total: int
    ) -> None:
        latest = state.metrics[-1]
        samples.changed_policy()
        if done == 1:
            self._warn_of_gap(latest)
        if self._host.ranks.first:
            self._context.reporter.progress(self._stage.name, self._epoch, done, total, f"loss {latest['loss']:+.4f}")
        every = self._config.execution.checkpoint_every
        if every and done % every == 0 and done < total:
            checkpoints.take(state, done)

    def _warn_of_gap(self, first: Mapping[str, float]) -> None:
        """Say where the policy, before it has learned, computes other log-probs than it did in the rollout."""
        limit = getattr(make_algorithm(self._config), "clip_range", math.inf)
        if first.get("replay_gap_max", 0.0) > limit:
            self._context.reporter.message(
                f"epoch {self._epoch}: before the first update log-probs differ from the rollout's by up to "
                f"{first['replay_gap_max']:.2g}, above clip_range {limit:.2g}: ratios of later updates are clipped by "
                "rounding alone. "
                "Rollout and training call the model differently; with model.dtype float32, or equal "
                "execution.rollout_batch_size and micro_batch_size, the gap is smaller."
            )

    def _resume(self, state: TrainerState) -> None:
        found = latest_checkpoint(self._context.store, self._stage.ref)
        if found is None:
            return
        state.metrics.clear()
        read_state(state, found[1])
        self._context.reporter.message(f"epoch {self._epoch}: training resumes after update {found[0]}.")
