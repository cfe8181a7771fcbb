"""One epoch of training as a stage, with checkpoints inside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs.errors import CorruptError
from configs.registry import create
from models.adapters import Ema
from models.transitions import KERNELS, Kernel
from storage.checkpoints import clear_checkpoints, commit_checkpoint, latest_checkpoint
from storage.commit import ShardRecord
from storage.layout import ArtifactRef
from storage.schema import ADVANTAGES, read_table
from tasks.algorithms import ALGORITHMS
from tasks.algorithms.base import Algorithm, Batch, Models
from tasks.optimize.batches import Row, TrainingSet, plan_updates
from tasks.optimize.loop import TrainerState, make_optimizer, run_updates
from tasks.policy import ABOUT, SHARD
from tasks.rollout import open_trajectory_store
from tasks.sources import AVERAGE, OPTIMIZER, WEIGHTS, policy_folder
from tasks.stage import Output, Shard, Stage

METRICS = "metrics.json"


class OptimizeStage(Stage):
    """Trains policy n-1 on the trajectories and advantages of epoch n; writes policy n."""

    name = "optimize"
    kind = "policies"
    spreads = True
    collective = True

    def options(self) -> Mapping[str, Any]:
        """The objective, the optimizer, the step the log-probs belong to, and the seed of the row order."""
        return {
            "optimize": self.config.optimize.model_dump(mode="json"),
            "sampler": self.config.rollout.sampler.model_dump(mode="json"),
            "seed": self.config.run.seed,
            "epoch": self.epoch,
        }

    def inputs(self) -> tuple[ArtifactRef, ...]:
        """The policy before, the trajectories, the advantages."""
        run = self.workspace.run
        return (
            self.workspace.policy_ref(self.epoch - 1),
            run.require(self.epoch, "rollout").ref,
            run.require(self.epoch, "advantage").ref,
        )

    def shards(self) -> list[Shard]:
        """One."""
        return [Shard(SHARD)]

    def run(self, shard: Shard, folder: Path) -> Output:
        """Train, resuming from the last committed checkpoint of this epoch."""
        self.workspace.use_threads()
        state, samples = self._state(), self._samples()
        algorithm = create(ALGORITHMS, self.config.optimize.algorithm.name, self._algorithm_options, what="algorithm")
        if algorithm.requires.reference:
            self.workspace.give_reference(state.trainable)
        models = Models(trainable=state.trainable, kernel=self._kernel())
        plan = self._plan(samples, algorithm)
        self._resume(state)
        run_updates(
            state,
            algorithm,
            models,
            plan,
            batches=self._batches(samples),
            micro_batch_size=self.config.execution.micro_batch_size,
            section=self.config.optimize,
            ranks=self.ranks,
            after_update=lambda done: self._after_update(state, done, len(plan)),
        )
        _write_state(state, folder)
        about = {"trained": "lora" if state.trainable.lora else "full", "updates": state.total_updates}
        (folder / ABOUT).write_text(json.dumps(about, sort_keys=True))
        return Output(rows=sum(len(rows) for rows in plan), summary={"updates": state.metrics})

    def summarize(self, records: Sequence[ShardRecord]) -> Mapping[str, Any]:
        """Metrics of every update."""
        return records[0].summary

    def cleanup(self, ref: ArtifactRef) -> None:
        """Remove the checkpoints within the epoch."""
        clear_checkpoints(self.workspace.store, ref)

    @property
    def _algorithm_options(self) -> Mapping[str, Any]:
        return self.config.optimize.algorithm.options  # type: ignore[no-any-return]

    def _kernel(self) -> Kernel:
        sampler = self.config.rollout.sampler
        return create(KERNELS, sampler.name, sampler.options, what="rollout.sampler")  # type: ignore[no-any-return]

    def _state(self) -> TrainerState:
        """Return the trainer as the policy before left it."""
        before = self.inputs()[0]
        trainable = self.workspace.trainable(before)
        self.workspace.forget_weights()
        section = self.config.optimize
        parameters = trainable.parameters()
        ema = Ema(parameters, decay=section.ema.decay) if section.ema else None
        state = TrainerState(trainable, make_optimizer(parameters, section), ema, 0)
        folder = policy_folder(self.workspace.store, before)
        if (folder / OPTIMIZER).exists():
            _read_state(state, folder)
            state.metrics.clear()
        return state

    def _samples(self) -> TrainingSet:
        _, trajectories, advantages = self.inputs()
        store = self.workspace.store
        store.require(trajectories)
        store.require(advantages)
        opener = open_trajectory_store(self.config.rollout.store)
        shards = [opener.open(store.folder(trajectories, record)) for record in store.records(trajectories)]
        folder = store.folder(advantages, store.records(advantages)[0])
        table = read_table(folder / "advantages.parquet", ADVANTAGES)
        columns = (table.column("sample_id").to_pylist(), table.column("advantage").to_pylist())
        return TrainingSet(shards, dict(zip(*columns, strict=True)))

    def _plan(self, samples: TrainingSet, algorithm: Algorithm) -> list[list[Row]]:
        rows = samples.rows(with_zero=algorithm.requires.zero_advantages)
        if not rows:
            self.workspace.reporter.message(
                f"epoch {self.epoch}: in every group all rewards are equal: nothing to learn, the policy stays."
            )
        section = self.config.optimize
        seed, epoch = self.config.run.seed, self.epoch
        return plan_updates(
            rows, updates=section.updates_per_epoch, inner_epochs=section.inner_epochs, seed=seed, epoch=epoch
        )

    def _batches(self, samples: TrainingSet) -> Any:
        prompts = list(dict.fromkeys(samples.prompts))
        conditioning = self.workspace.conditioning(prompts)
        prompt_rows = {prompt: row for row, prompt in enumerate(prompts)}
        size = self.config.execution.micro_batch_size

        def batches(rows: Sequence[Row]) -> Batch:
            return samples.batch(rows, size, conditioning, prompt_rows)

        return batches

    def _after_update(self, state: TrainerState, done: int, total: int) -> None:
        latest = state.metrics[-1]
        if self.ranks.first:
            self.workspace.reporter.progress(self.name, self.epoch, done, total, f"loss {latest['loss']:+.4f}")
        every = self.config.execution.checkpoint_every
        if every and done % every == 0 and done < total and self.ranks.first:
            with self.workspace.store.root.staging() as folder:
                _write_state(state, folder)
                commit_checkpoint(self.workspace.store, self.ref, done, folder)

    def _resume(self, state: TrainerState) -> None:
        found = latest_checkpoint(self.workspace.store, self.ref)
        if found is None:
            return
        state.metrics.clear()
        _read_state(state, found[1])
        self.workspace.reporter.message(f"epoch {self.epoch}: training resumes after update {found[0]}.")


def _write_state(state: TrainerState, folder: Path) -> None:
    """Write weights, average, optimizer moments and the metrics so far."""
    names = [name for name, _ in state.trainable.named_parameters()]
    save_file(state.trainable.state(), folder / WEIGHTS)
    if state.ema is not None:
        save_file(dict(zip(names, (v.cpu() for v in state.ema.values), strict=True)), folder / AVERAGE)
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in state.trainable.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            moments[f"{key}/{name}"] = value.detach().cpu().reshape(-1) if value.ndim == 0 else value.detach().cpu()
    save_file(moments, folder / OPTIMIZER)
    progress = {"total_updates": state.total_updates, "metrics": state.metrics}
    (folder / METRICS).write_text(json.dumps(progress, sort_keys=True))


def _read_state(state: TrainerState, folder: Path) -> None:
    """Read what ``_write_state`` wrote.

    Raises:
        CorruptError: the optimizer state belongs to other parameters.
    """
    state.trainable.load(load_file(folder / WEIGHTS))
    _read_average(state, folder)
    moments = load_file(folder / OPTIMIZER)
    own = dict(state.trainable.named_parameters())
    for key, value in moments.items():
        kind, _, name = key.partition("/")
        if name not in own:
            raise CorruptError(f"{folder / OPTIMIZER} holds moments of '{name}', which is not trained.")
        moved = value.reshape(()) if kind == "step" else value.to(own[name].device)
        state.optimizer.state[own[name]][kind] = moved
    progress = json.loads((folder / METRICS).read_text())
    state.total_updates = progress["total_updates"]
    state.metrics.extend(progress["metrics"])


def _read_average(state: TrainerState, folder: Path) -> None:
    if state.ema is None:
        return
    if not (folder / AVERAGE).exists():
        raise CorruptError(f"{folder} has no moving average, but optimize.ema is set.")
    stored = load_file(folder / AVERAGE)
    for value, (name, _) in zip(state.ema.values, state.trainable.named_parameters(), strict=True):
        value.copy_(stored[name])
