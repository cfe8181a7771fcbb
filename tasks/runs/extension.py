"""The epoch that a schedule selects, and runs that grow with each scheduled start."""

from __future__ import annotations

from typing import Literal

from flowmill.configs.load import override_config
from flowmill.configs.schema import RunConfig
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.epoch_count import advance_begun, remember_length
from flowmill.tasks.runs.locks import holding
from flowmill.tasks.runs.opening import recorded
from flowmill.tasks.runs.state import last_state
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.stages import STAGES


def chosen_epoch(context: RunContext, stage: str, requested: int | Literal["next", "latest"]) -> int:
    """Return the epoch that a number, 'next' or 'latest' selects.

    ``next`` is the first epoch without the stage, which may be one more than the run has; ``latest`` is the newest
    epoch with a rollout. For stages that read a policy both are the newest trained epoch.
    """
    if isinstance(requested, int):
        return requested
    context.run.refresh()
    done = context.chain.trained()
    if STAGES[stage].scope == "run":
        return 0
    if STAGES[stage].scope != "epoch":
        return done
    if requested == "latest":
        return max(1, _last(context, "rollout", done))
    return _last(context, stage, done) + 1


def grown(context: RunContext, epochs: int | None) -> RunContext:
    """Return the run's context for training that many further epochs; None: the number of its config."""
    if epochs is None:
        return context
    context.run.refresh()
    return _with_epochs(context, advanced(context, epochs), advance=epochs)


def advanced(context: RunContext, epochs: int) -> int:
    """Return the number of epochs that a run has after so many further ones.

    A request that was stopped before its end is the same request when it is repeated: it leads to the same number.
    """
    begun = advance_begun(context.run, epochs)
    if begun is not None and last_state(context.run) != "done":
        chain = RunContext(context.store, _longer(context, begun), context.run).chain
        if any(chain.find(*node) is None for node in chain.nodes()):
            return begun
    return context.chain.trained() + epochs


def advance_note(context: RunContext, epochs: int, total: int) -> str | None:
    """Return a note if a request for further epochs goes on with one that was stopped, else None."""
    done = context.chain.trained()
    if done + epochs == total:
        return None
    return f"Run '{context.run.name}' has {done} epochs: this goes on with the same request, which ends after {total}."


def extend(context: RunContext, epochs: int) -> None:
    """Give a run at least that many epochs."""
    if epochs > context.config.run.epochs:
        _with_epochs(context, epochs)


def extend_for(context: RunContext, node: Node) -> None:
    """Give a run at least the epochs that a stage needs, once it can run.

    Args:
        node: the stage; of all rewards without a slot.

    Raises:
        NotCommittedError: an input of the stage is missing; the run keeps its epochs.
    """
    if node.epoch > context.config.run.epochs:
        chain = RunContext(context.store, _longer(context, node.epoch), context.run).chain
        slots = [] if node.slot else chain.plan.of_stage(node.epoch, node.stage)
        for each in slots or [node]:
            for before in chain.identity(each).upstream():
                chain.require(*before)
        extend(context, node.epoch)


def _with_epochs(context: RunContext, epochs: int, *, advance: int | None = None) -> RunContext:
    config = _longer(context, epochs)
    with holding(context.store, context.run.name):
        context.run.add("configs", recorded(config))
        remember_length(context.run, epochs, advance=advance)
    return RunContext(context.store, config, context.run, reporter=context.reporter)


def _longer(context: RunContext, epochs: int) -> RunConfig:
    return override_config(context.config, [f"run.epochs={epochs}"])


def _last(context: RunContext, stage: str, done: int) -> int:
    """Return the newest epoch of the run, from the last trained one on, that has a stage for all rewards."""
    slots = [node.slot for node in context.plan.of_stage(done + 1, stage)] or [""]
    epoch = done
    while epoch < context.config.run.epochs and all(
        context.chain.find(*Node(epoch + 1, stage, slot)) is not None for slot in slots
    ):
        epoch += 1
    return epoch
