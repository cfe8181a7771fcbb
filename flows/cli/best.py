"""The epoch of a model that a command names: a number, the best, or the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from flowmill.flows.console import console

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext


def chosen_epoch(context: RunContext, epoch: int | Literal["best"] | None) -> int | None:
    """Return the number of an epoch, None for the last; that of the best is printed with its score."""
    if epoch != "best":
        return epoch
    from flowmill.tasks.metrics.best import best_epoch

    best = best_epoch(context)
    console.print(f"{context.run.name}@best is epoch {best.epoch}: {best}")
    console.print("It was chosen by this score, which is therefore too high on average: report one of other prompts.")
    return best.epoch
