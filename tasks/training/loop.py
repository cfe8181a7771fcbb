"""The training loop: accumulate, reduce, clip, step, average. It is independent of algorithms and model families.

Legend: B rows of a micro-batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from flowmill.configs.errors import DivergedError
from flowmill.configs.schema import OptimizeSection
from flowmill.models.devices import as_here
from flowmill.models.policies.compute_meter import backward
from flowmill.models.policies.trainable import Trainable
from flowmill.models.weights.ema import Ema
from flowmill.models.weights.sharding import number as number_of
from flowmill.tasks.algorithms.base import LARGEST, Algorithm, Batch, Models
from flowmill.tasks.modalities.rows import Units, micro_batches
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.learning_rates import learning_rate
from flowmill.tasks.training.loss_scaling import LossScale, unscale
from flowmill.tasks.training.metrics import MODULE_NORM, RowFigures, entry
from flowmill.tasks.training.optimizers import MomentOptimizer

#: Micro-batches that are prefetched.
_AHEAD = 2


@dataclass(slots=True)
class TrainedPart:
    """A further trained model, such as a critic, with its own optimizer."""

    trainable: Trainable
    """Its parameters change in place."""
    optimizer: MomentOptimizer
    """Optimizer of these parameters."""
    learning_rate: Callable[[int], float]
    """Updates done -> the rate of the next update."""
    max_grad_norm: float
    """Gradients of this part alone are clipped to this norm."""


@dataclass(slots=True)
class TrainerState:
    """Everything that must survive a restart."""

    trainable: Trainable
    """The policy; its parameters change in place."""
    optimizer: MomentOptimizer
    """Optimizer of the trained parameters."""
    ema: Ema | None
    """The moving average, if there is one."""
    total_updates: int
    """Optimizer updates since the start of the run."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One entry per update of this epoch."""
    left_out: dict[str, float] = field(default_factory=dict)
    """If ``optimize.stop_kl`` leaves out updates of this epoch: their number, and the KL that exceeded it."""
    moved: dict[str, float] = field(default_factory=dict)
    """KLs of the policy after the updates of this epoch, see ``policy_moves``."""
    scale: LossScale | None = None
    """Scale of the loss, with a float16 forward."""
    extra_parts: dict[str, TrainedPart] = field(default_factory=dict)
    """Further trained models, by name."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The policy's trained parameters."""
        return self.trainable.parameters()

    @property
    def everything(self) -> list[torch.nn.Parameter]:
        """All trained parameters."""
        return [*self.parameters, *(each for part in self.extra_parts.values() for each in part.trainable.parameters())]


@dataclass(frozen=True, slots=True)
class Reading:
    """Functions that read the rows of an update."""

    read: Callable[[Units], Batch]
    """Units -> micro-batch, padded."""
    begin: Callable[[Units], None] = lambda units: None
    """Called with the units of an update before its first batch is read."""
    alike: Callable[[Units], Sequence[Units]] = lambda units: [units]
    """Units of an update -> parts that do not share micro-batches."""
    mismatched: Callable[[Units], Batch] | None = None
    """Units -> micro-batch under the prompts of other rows of the update, if the algorithm needs such."""


def run_updates(
    state: TrainerState,
    algorithm: Algorithm,
    models: Models,
    plan: Sequence[Units],
    *,
    reading: Reading,
    micro_batch_size: int,
    section: OptimizeSection,
    ranks: Ranks,
    after_update: Callable[[int], None],
) -> None:
    """Run the remaining updates of an epoch; ``len(state.metrics)`` are already done.

    PPO's early stop: where the KL exceeds ``stop_kl`` before an update, this and all later ones are left out, and so is
    the one before, which the caller undoes (OpenAI's Spinning Up and Stable-Baselines3 keep it). All ranks see the same
    sum over their rows, so they agree on it.

    Args:
        state: changed in place.
        algorithm: gives the loss of each row.
        models: the models the algorithm may call.
        plan: units of each update.
        reading: reads micro-batches.
        micro_batch_size: maximum rows per micro-batch.
        section: optimizer settings.
        ranks: micro-batches are distributed to ranks round-robin.
        after_update: called with the number of updates done.
    """
    for number in range(len(state.metrics), len(plan)):
        rows = len(plan[number].rows)
        own, chunks, ahead = _own_batches(state.trainable, plan[number], reading, micro_batch_size, ranks)
        point = _reference_point(algorithm, models, plan[number], reading, size=micro_batch_size, ranks=ranks)
        means = _gradients(state, algorithm, models, ahead, rows=rows, ranks=ranks)
        kl = means.pop("kl_epoch", means.get("approx_kl", 0.0))
        if section.stop_kl is not None and kl > section.stop_kl:
            state.left_out = {"left_out": len(plan) - max(0, number - 1), "left_out_kl": kl}
            _clear_gradients(state)
            return
        means |= {**point, **_norms_of_modules(state.trainable)}
        gradient_norm = number_of(torch.nn.utils.clip_grad_norm_(state.parameters, section.max_grad_norm))
        _check_finite(means, gradient_norm, number)
        _step_extra_parts(state, means, number)
        means["lr"] = learning_rate(section, state.total_updates)
        state.optimizer.set_learning_rate(means["lr"])
        state.optimizer.step()
        state.trainable.changed()
        state.optimizer.zero_grad(set_to_none=True)
        state.total_updates += 1
        models.on_policy = False
        if algorithm.requires.after:
            means |= _measured(algorithm, models, reading.read(own[0] if own else chunks[0]), ranks, counts=bool(own))
        if state.ema is not None and section.ema is not None and state.total_updates % section.ema.every == 0:
            state.ema.update(state.parameters, state.total_updates)
        state.metrics.append(entry(state.total_updates, rows, gradient_norm, means))
        after_update(number + 1)


def _own_batches(
    trainable: Trainable, units: Units, reading: Reading, size: int, ranks: Ranks
) -> tuple[Sequence[Units], Sequence[Units], Callable[[], Iterable[Batch]]]:
    """Return this rank's micro-batches of an update, those of all ranks, and a function that reads the former."""
    reading.begin(units)
    chunks = chunks_of(units, reading.alike, size)
    own = dealt(chunks, ranks)
    # Ranks with sharded weights run in lockstep: a rank with too few micro-batches adds some that do not count.
    idle = -(-len(chunks) // ranks.shares) - len(own) if trainable.sharded else 0
    return own, chunks, partial(_with_idle, partial(read_ahead, reading.read, [*own, *[chunks[0]] * idle]), len(own))


@torch.no_grad()
def mean_losses(
    algorithm: Algorithm, models: Models, units: Units, *, reading: Reading, micro_batch_size: int, ranks: Ranks
) -> dict[str, float]:
    """Return the mean loss, and means of the algorithm's metrics, over the rows of all ranks, without a gradient.

    The rows are those of one update: a loss that is a mean over an update's tokens is one over all of them.
    """
    _, _, batches = _own_batches(models.trainable, units, reading, micro_batch_size, ranks)
    _reference_point(algorithm, models, units, reading, size=micro_batch_size, ranks=ranks)
    figures = RowFigures(len(units.rows))
    for batch in batches():
        result = algorithm.loss(batch, models)
        figures.add(batch, {"loss": result.loss, **result.metrics})
    return {name.removeprefix(LARGEST): value for name, value in _reduce(figures, ranks).items()}


@torch.no_grad()
def _reference_point(
    algorithm: Any, models: Models, units: Units, reading: Reading, *, size: int, ranks: Ranks
) -> dict[str, float]:
    """Set and return the reference point of an update, the mean gain of all ranks' rows under other prompts."""
    if reading.mismatched is None:
        return {}
    apart = replace(reading, read=reading.mismatched, begin=lambda units: None)
    # Cached outputs of the reference are those of rows under their own prompts.
    remembered, models.remembered = models.remembered, None
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in _own_batches(models.trainable, units, apart, size, ranks)[2]():
        gains = algorithm.mismatched_gain(batch, models)[: batch.count]
        sums += torch.tensor([float(gains.double().sum()), batch.count], dtype=torch.float64)
    models.remembered = remembered
    total, rows = ranks.sum(sums if ranks.counts else torch.zeros_like(sums)).tolist()
    models.reference_point = max(0.0, total / rows)
    return {"reference_point": models.reference_point}


@torch.no_grad()
def _measured(algorithm: Any, models: Models, batch: Batch, ranks: Ranks, *, counts: bool) -> dict[str, float]:
    """Return the means of the algorithm's metrics after an update, over the batches of all ranks that count."""
    metrics = algorithm.after(batch, models)
    rows = batch.count if counts and ranks.counts else 0
    sums = [float(values[:rows].double().sum()) for values in metrics.values()]
    *totals, number = ranks.sum(torch.tensor([*sums, rows], dtype=torch.float64)).tolist()
    return {name: total / number for name, total in zip(metrics, totals, strict=True)}


def _norms_of_modules(trainable: Trainable) -> dict[str, float]:
    """Return the gradient norm of each module of a policy that has several; 0 for one that no row reached."""
    modules = trainable.policy.trained
    if len(modules) < 2:
        return {}
    by_module = {name: [p.grad for p in module.parameters() if p.grad is not None] for name, module in modules.items()}
    norms = {name: number_of(torch.nn.utils.get_total_norm(gradients)) for name, gradients in by_module.items()}
    return {f"{MODULE_NORM}{name}": norm for name, norm in norms.items()}


def _step_extra_parts(state: TrainerState, means: dict[str, float], number: int) -> None:
    """Clip and step each further trained model separately; record its gradient norm and rate."""
    for name, part in state.extra_parts.items():
        parameters = part.trainable.parameters()
        norm = number_of(torch.nn.utils.clip_grad_norm_(parameters, part.max_grad_norm))
        _check_finite(means, norm, number)
        means[f"{name}_grad_norm"], means[f"{name}_lr"] = norm, part.learning_rate(state.total_updates)
        part.optimizer.set_learning_rate(means[f"{name}_lr"])
        part.optimizer.step()
        part.trainable.changed()
        part.optimizer.zero_grad(set_to_none=True)


def dealt(chunks: Sequence[Units], ranks: Ranks) -> Sequence[Units]:
    """Return this rank's micro-batches of an update."""
    return chunks[ranks.share :: ranks.shares]


def read_chunks(
    units: Units, alike: Callable[[Units], Sequence[Units]], size: int, ranks: Ranks, *, sharded: bool
) -> Sequence[Units]:
    """Return all micro-batches of an update that this rank reads, also the first one in place of one it lacks."""
    chunks = chunks_of(units, alike, size)
    own = dealt(chunks, ranks)
    lacks = len(own) * ranks.shares < len(chunks)
    return [*own, chunks[0]] if lacks and (sharded or not own) else own


def chunks_of(units: Units, alike: Callable[[Units], Sequence[Units]], size: int) -> list[Units]:
    """Return the micro-batches of an update, of all ranks."""
    return [chunk for part in alike(units) for chunk in micro_batches(part, size)]


def _with_idle(batches: Callable[[], Iterable[Batch]], count: int) -> Iterator[Batch]:
    """Yield batches; those after the first ``count`` get weight 0."""
    for place, batch in enumerate(batches()):
        yield batch if place < count else replace(batch, weights=torch.zeros_like(batch.weights), count=0)


def read_ahead(batches: Callable[[Units], Batch], chunks: Sequence[Units]) -> Iterator[Batch]:
    """Yield the batch of each chunk in order, while a thread prefetches the next ones from the store."""
    # The current device and OpenMP's thread count are per thread.
    with ThreadPoolExecutor(1, initializer=as_here()) as pool:
        waiting = deque(pool.submit(batches, chunk) for chunk in chunks[:_AHEAD])
        for chunk in [*chunks[_AHEAD:], *[None] * _AHEAD]:
            if not waiting:
                return
            batch = waiting.popleft().result()
            if chunk is not None:
                waiting.append(pool.submit(batches, chunk))
            yield batch


def _gradients(
    state: TrainerState,
    algorithm: Algorithm,
    models: Models,
    batches: Callable[[], Iterable[Batch]],
    *,
    rows: int,
    ranks: Ranks,
) -> dict[str, float]:
    """Set the parameters' gradients of the mean loss over all ranks' rows; return metric means.

    If a float16 backward overflows, the same rows are computed again at a smaller scale. All ranks see the same summed
    gradient, so they agree on this.
    """
    overflows = 0
    while True:
        factor = 1.0 if state.scale is None else state.scale.factor(rows)
        figures = RowFigures(rows, first=not state.metrics)
        for number, batch in enumerate(batches()):
            ranks.pulse.at(f"micro-batch {number + 1} of an update of {rows} rows")
            result = algorithm.loss(batch, models)
            loss = (sum(result.other_losses.values(), result.loss) * batch.weights * batch.importance).sum()
            loss = loss / rows * factor
            with backward(models.meter):
                loss.backward()  # type: ignore[no-untyped-call]
            further = {f"{name}_loss": values for name, values in result.other_losses.items()}
            figures.add(batch, {"loss": result.loss, **further, **result.metrics})
        ranks.sum_gradients(state.everything)
        means = _reduce(figures, ranks)
        if state.scale is None:
            return means
        finite = unscale(state.everything, factor)
        if finite or state.scale.exhausted or not math.isfinite(means["loss"]):
            break
        state.scale, overflows = state.scale.smaller(), overflows + 1
        _clear_gradients(state)
    means |= {"loss_scale": factor, "overflows": float(overflows)}
    state.scale = state.scale.after_update()
    return means


def _clear_gradients(state: TrainerState) -> None:
    for optimizer in (state.optimizer, *(part.optimizer for part in state.extra_parts.values())):
        optimizer.zero_grad(set_to_none=True)


def _reduce(figures: RowFigures, ranks: Ranks) -> dict[str, float]:
    totals = figures.totals() if ranks.counts else {}
    # Ranks may have different metrics, because they train different rows.
    names = ranks.gather_names(list(totals))
    values = torch.tensor([totals.get(name, 0.0) for name in names], dtype=torch.float64)
    largest = torch.tensor([name.startswith(LARGEST) for name in names])
    sums = torch.where(largest, ranks.largest(values.clone()), ranks.sum(values))
    return dict(zip(names, sums.tolist(), strict=True))


def _check_finite(means: Mapping[str, float], gradient_norm: float, number: int) -> None:
    loss = means.get("loss", 0.0)
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise DivergedError(
            f"optimize: update {number + 1} of this epoch has loss {loss} and gradient norm {gradient_norm}; training "
            "on it would destroy the policy. Lower optimize.learning_rate or rollout noise, or take model.dtype "
            "bfloat16 instead of float16; finished epochs are kept."
        )
