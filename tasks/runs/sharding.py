"""Where the samples of a stage are cut into shards: for the processes there are, so that none waits long for another.

Sizes shrink towards the end: half of what is left is dealt out in equal shards, one per process, then half of the rest
(factoring: Hummel, Schonberg and Flynn, CACM 35(8), 1992). What is made does not depend on where it is cut.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from configs.schema import RunConfig
from models.rewards.factory import needs_of

#: Groups of a rollout, or batches of an evaluation, in a shard at most: what a crash can cost.
_LARGEST = 4
#: Prompts that are encoded in a shard: of SD3 they take 700 MB.
_PROMPTS = 256
#: Units in the smallest shard that are tried: more leave less padding, fewer leave nobody waiting.
_SMALLEST = (1, 2, 4)


def rollout_cuts(config: RunConfig) -> tuple[int, ...]:
    """Return where each shard of a rollout ends, in samples; branches of one trunk count as one.

    Groups stay whole where a reward compares their samples, or cutting them saves nothing.
    """
    rollout, execution = config.rollout, config.execution
    size, batch = rollout.group_size, execution.rollout_batch_size
    # A batch is computed as a whole, so a shard without a limit holds at least one.
    largest = (rollout.groups_per_shard or max(_LARGEST, math.ceil(batch / size))) * size
    units = (size,) if execution.ranks == 1 or _compares(config) else (size, batch)
    total = rollout.prompts_per_epoch * size
    return planned_cuts(total, batch=batch, ranks=execution.ranks, units=units, largest=largest)


def evaluation_cuts(config: RunConfig) -> tuple[int, ...]:
    """Return where each shard of one prompt list of an evaluation ends, in samples: batches stay whole."""
    batch = config.execution.rollout_batch_size
    ranks, samples = config.execution.ranks, config.evaluate.samples
    return planned_cuts(samples, batch=batch, ranks=ranks, units=(batch,), largest=_LARGEST * batch)


def encoding_cuts(count: int) -> tuple[int, ...]:
    """Return the end of each shard of prompts to encode; every process that takes one loads the encoders."""
    return _even(count, _PROMPTS) if count else ()


@lru_cache(maxsize=64)
def planned_cuts(total: int, *, batch: int, ranks: int, units: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """Return where each shard ends, so that equally fast processes are done as early as can be.

    Args:
        total: samples.
        batch: samples that are computed at a time; a smaller rest takes as long.
        ranks: processes, which take the next shard whenever they are free.
        units: samples that stay together, the first of these where it makes no difference.
        largest: samples of a shard at most, a multiple of the first unit.
    """
    if ranks == 1:
        return _even(total, largest)
    plans = [
        _shrinking(total, ranks, smallest=smallest * unit, largest=largest // unit * unit, unit=unit)
        for unit in units
        for smallest in _SMALLEST
        if smallest * unit <= largest
    ]
    # Of plans that are done at the same time one that computes fewest batches, which are padded.
    return min(plans, key=lambda ends: _spent(costs(ends, batch), ranks))


def costs(ends: Sequence[int], batch: int) -> list[int]:
    """Return the batches that each shard takes."""
    return [math.ceil((end - start) / batch) for start, end in zip((0, *ends), ends, strict=False)]


def makespan(spent: Sequence[int], ranks: int) -> int:
    """Return when the last of some processes is done that take shards in order, each as soon as it is free."""
    free = [0] * min(ranks, max(1, len(spent)))
    for cost in spent:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def _spent(spent: Sequence[int], ranks: int) -> tuple[int, int]:
    return makespan(spent, ranks), sum(spent)


def idle_share(ends: Sequence[int], *, batch: int, ranks: int, times: int = 1) -> float:
    """Return the share of the time of all processes in which they wait for the last, or compute rows that only pad.

    Args:
        ends: where each shard ends.
        batch: samples that are computed at a time.
        ranks: processes.
        times: how often all of it is done, one after the other.
    """
    took = makespan(costs(ends, batch) * times, ranks)
    return 1 - times * ends[-1] / batch / (ranks * took) if took else 0.0


def cover(ends: Sequence[int], committed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that cover all up to the last of ``ends``: committed ones as they are, gaps cut at ``ends``.

    Cuts are not part of a fingerprint, so an artifact begun with some may be finished with others.
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


def _compares(config: RunConfig) -> bool:
    """Return whether a reward may compare the samples of a group; this is not known of a server's reward."""
    return any(
        section.server is not None or needs_of(section.name, section.options).groupwise for section in config.scored
    )
