"""The epoch that a schedule selects, and runs that grow with each scheduled start."""

from __future__ import annotations

from typing import Literal

from configs.load import override_config
from tasks.runs.context import RunContext
from tasks.runs.epoch_count import remember_length
from tasks.runs.opening import recorded
from tasks.specs.graph import Node, policy_after
from tasks.specs.stages import STAGES


def chosen_epoch(context: RunContext, stage: str, asked: int | Literal["next", "latest"]) -> int:
    """Return the epoch that a number, 'next' or 'latest' selects.

    ``next`` is the first epoch without the stage, which may be one more than the run has; ``latest`` is the newest
    epoch with a rollout. For stages that read a policy both are the newest trained epoch.
    """
    if isinstance(asked, int):
        return asked
    context.run.refresh()
    done = trained(context)
    if STAGES[stage].scope == "run":
        return 0
    if STAGES[stage].scope != "epoch":
        return done
    if asked == "latest":
        return max(1, _last(context, "rollout", done))
    return _last(context, stage, done) + 1


def trained(context: RunContext) -> int:
    """Return the newest epoch whose training is done and counts; 0 if there is none."""
    newest = max((entry.epoch for entry in context.run.entries() if entry.stage == "optimize"), default=0)
    return next((epoch for epoch in range(newest, 0, -1) if context.chain.find(*policy_after(epoch))), 0)


def grown(context: RunContext, epochs: int | None) -> RunContext:
    """Return the run's context for training that many further epochs; None: the number of its config."""
    if epochs is None:
        return context
    context.run.refresh()
    return _with_epochs(context, trained(context) + epochs)


def extend(context: RunContext, epochs: int) -> None:
    """Give a run at least that many epochs."""
    if epochs > context.config.run.epochs:
        _with_epochs(context, epochs)


def _with_epochs(context: RunContext, epochs: int) -> RunContext:
    config = override_config(context.config, [f"run.epochs={epochs}"])
    context.run.add("configs", recorded(config))
    remember_length(context.run, epochs)
    return RunContext(context.store, config, context.run, reporter=context.reporter)


def _last(context: RunContext, stage: str, done: int) -> int:
    """Return the newest epoch, from the last trained one on, that has a stage for all rewards."""
    slots = [node.slot for node in context.plan.of_stage(done + 1, stage)] or [""]
    epoch = done
    while all(context.chain.find(*Node(epoch + 1, stage, slot)) is not None for slot in slots):
        epoch += 1
    return epoch
