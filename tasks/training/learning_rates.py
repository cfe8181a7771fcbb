"""The learning rate of each update: a pure function of its number, so a restart needs no state."""

from __future__ import annotations

import math

from flowmill.configs.schema import OptimizeSection


def learning_rate(section: OptimizeSection, done: int) -> float:
    """Return the learning rate of the update that follows ``done`` updates of the run.

    During warm-up the factor of the rate is (done + 1) / (W + 1), W = warmup_updates: it is above 0 at the first update
    and 1 at the first one after the warm-up (torch's ``LinearLR(start_factor=1 / (W + 1), total_iters=W)``). Then, with
    progress p = (done - W) / (total_updates - W) up to 1, the factor falls from 1 to ``final``, linearly or as
    (1 + cos(pi p)) / 2 (arXiv 1608.03983, eq. 5; torch's ``CosineAnnealingLR``). After total_updates it is constant.
    """
    schedule = section.schedule
    if schedule is None:
        return section.learning_rate
    warmup = schedule.warmup_updates
    if done < warmup:
        return section.learning_rate * (done + 1) / (warmup + 1)
    if schedule.name == "constant" or schedule.total_updates is None:
        return section.learning_rate
    progress = min(1.0, (done - warmup) / (schedule.total_updates - warmup))
    left = 1 - progress if schedule.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return section.learning_rate * (schedule.final + (1 - schedule.final) * left)
