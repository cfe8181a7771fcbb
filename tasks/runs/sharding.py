"""Shard boundaries of a stage's samples: chosen for the number of processes, so that none waits long for another.

Sizes shrink towards the end: half of the remaining samples is split into equal shards, one per process, then half of
the rest (factoring: Hummel, Schonberg and Flynn, CACM 35(8), 1992). Results do not depend on the boundaries.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.factory import needs_of

#: Most groups of a rollout, or batches of an evaluation, per shard: the work a crash can lose.
_LARGEST = 4
#: Prompts per shard of encoding; with SD3 a shard takes 700 MB.
_PROMPTS = 256
#: Candidates for the units in the smallest shard: more units mean less padding, fewer mean less waiting.
_SMALLEST = (1, 2, 4)


def rollout_cuts(config: RunConfig) -> tuple[int, ...]:
    """Return the end of each shard of a rollout, in samples; branches of one trunk count as one.

    Groups stay whole if a reward compares their samples, or if splitting them saves no time.
    """
    rollout, execution = config.rollout, config.execution
    size, batch = rollout.group_size, execution.rollout_batch_size
    # A batch is computed as a whole, so a shard without a configured limit holds at least one.
    largest = (rollout.groups_per_shard or max(_LARGEST, math.ceil(batch / size))) * size
    # Rewards of servers may compare the samples of a group, too.
    compares = (each.server is not None or needs_of(each.name, each.options).groupwise for each in config.scored)
    units = (size,) if execution.ranks == 1 or any(compares) else (size, batch)
    total = rollout.prompts_per_epoch * size
    return planned_cuts(total, batch=batch, ranks=execution.ranks, units=units, largest=largest)


def evaluation_cuts(config: RunConfig) -> tuple[int, ...]:
    """Return the end of each shard of one prompt list of an evaluation, in samples: batches stay whole."""
    batch = config.execution.rollout_batch_size
    ranks, samples = config.execution.ranks, config.evaluate.samples
    return planned_cuts(samples, batch=batch, ranks=ranks, units=(batch,), largest=_LARGEST * batch)


def encoding_cuts(count: int) -> tuple[int, ...]:
    """Return the end of each shard of prompts to encode; every process that takes one loads the encoders."""
    return _even(count, _PROMPTS) if count else ()


@lru_cache(maxsize=64)
def planned_cuts(total: int, *, batch: int, ranks: int, units: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """Return the end of each shard, such that equally fast processes finish as early as possible.

    Args:
        total: number of samples.
        batch: samples per batch; a partial batch takes as long as a full one.
        ranks: number of processes; a free process takes the next shard.
        units: candidates for the number of samples that stay together; the first one wins a tie.
        largest: most samples of a shard, a multiple of the first unit.
    """
    if ranks == 1:
        return _even(total, largest)
    plans = [
        _shrinking(total, ranks, smallest=smallest * unit, largest=largest // unit * unit, unit=unit)
        for unit in units
        for smallest in _SMALLEST
        if smallest * unit <= largest
    ]
    # Among plans that finish at the same time, choose the one with the fewest batches, which are padded.
    return min(plans, key=lambda ends: _spent(costs(ends, batch), ranks))


def costs(ends: Sequence[int], batch: int) -> list[int]:
    """Return the number of batches of each shard."""
    return [math.ceil((end - start) / batch) for start, end in zip((0, *ends), ends, strict=False)]


def makespan(spent: Sequence[int], ranks: int) -> int:
    """Return the finish time of the last process when free processes take shards in order."""
    free = [0] * min(ranks, max(1, len(spent)))
    for cost in spent:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def _spent(spent: Sequence[int], ranks: int) -> tuple[int, int]:
    return makespan(spent, ranks), sum(spent)


def idle_share(ends: Sequence[int], *, batch: int, ranks: int, times: int = 1) -> float:
    """Return the share of all processes' time spent waiting for the last process or computing padding.

    Args:
        ends: end of each shard.
        batch: samples per batch.
        ranks: number of processes.
        times: number of consecutive repetitions of the shards.
    """
    took = makespan(costs(ends, batch) * times, ranks)
    return 1 - times * ends[-1] / batch / (ranks * took) if took else 0.0


def cover(ends: Sequence[int], committed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that cover all samples up to the last of ``ends``: the committed ranges, and gaps cut at ``ends``.

    Cuts are not part of a fingerprint, so an artifact may be started and finished with different cuts.
    """
    ranges, position, total = list[tuple[int, int]](), 0, ends[-1]
    for start, stop in [*sorted(committed), (total, total)]:
        while position < start:
            cut = min(start, ends[bisect_right(ends, position)])
            ranges.append((position, cut))
            position = cut
        if stop > start >= position:
            ranges.append((start, stop))
            position = stop
    return ranges


def _even(total: int, size: int) -> tuple[int, ...]:
    return (*range(size, total, size), total)


def _shrinking(total: int, ranks: int, *, smallest: int, largest: int, unit: int) -> tuple[int, ...]:
    sizes, left = list[int](), total
    while left > 0:
        half = left // (2 * ranks) // unit * unit
        size = max(smallest, min(half, largest))
        for _ in range(ranks):
            sizes.append(min(size, left))
            left -= sizes[-1]
            if left <= 0:
                break
    return tuple(accumulate(sizes))
