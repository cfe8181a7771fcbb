"""The best epoch of a run by the scores of its own evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowmill.configs.errors import NotCommittedError
from flowmill.configs.escaping import command
from flowmill.configs.roots import root_option
from flowmill.configs.schema import RunConfig
from flowmill.tasks.metrics.evaluations import Figures, weighted_rewards

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The evaluated epoch with the highest weighted mean reward, the earliest of equal ones; 0 is before training."""

    epoch: int
    reward: float
    count: int
    """Number of evaluations that it was chosen from."""
    figure: str
    """The reward and the prompts, in words."""
    failed: int = 0
    """Number of its scores that failed: its mean leaves them out."""

    def __str__(self) -> str:
        text = f"{self.figure} {self.reward:.3f}, the highest of {self.count} evaluations"
        return f"{text}; {self.failed} of its scores failed, and its mean leaves them out" if self.failed else text


def best_of(config: RunConfig, evaluations: Mapping[int, Figures]) -> Best | None:
    """Return the best of the evaluations of a run by epoch; None if none has a score of an optimized reward."""
    scores = {epoch: weighted_rewards(config, figures) for epoch, figures in evaluations.items()}
    split = next((name for name in ("heldout", "train") if any(name in each for each in scores.values())), None)
    rewards = {epoch: each[split] for epoch, each in sorted(scores.items()) if split is not None and split in each}
    if not rewards:
        return None
    epoch = max(rewards, key=lambda each: rewards[each])
    name = " + ".join(each.weighted for each in config.rewards)
    prompts = "held-out prompts" if split == "heldout" else "train prompts"
    chosen = evaluations[epoch][str(split)]
    return Best(
        epoch=epoch,
        reward=rewards[epoch],
        count=len(rewards),
        figure=f"mean {name} on {prompts}",
        failed=sum(int(chosen.get(each.slot, {}).get("failed", 0)) for each in config.rewards),
    )


def best_epoch(context: RunContext) -> Best:
    """Return the best epoch of a run; raise NotCommittedError without evaluations, or if it is epoch 0."""
    from flowmill.tasks.metrics.view import RunView

    best, name = best_of(context.config, RunView(context).evaluations), context.run.name
    if best is None:
        evaluate = command("flowmill", "run", "CONFIG", "--name", name, *root_option(context.store.root.uri))
        raise NotCommittedError(
            f"'{name}@best' has the best score of the run's evaluations, and run '{name}' has no evaluation that is up "
            f"to date. Name an epoch, {name}@EPOCH, or complete the run, which evaluates it: {evaluate}"
        )
    if best.epoch == 0:
        raise NotCommittedError(
            f"'{name}@best': no evaluated epoch of run '{name}' is better than epoch 0, before training ({best}). Name "
            f"an epoch, {name}@EPOCH, or train it further."
        )
    return best
