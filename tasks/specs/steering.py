"""Branches of a run: the policy that an epoch starts from, as the stage ``steer`` of the epoch before decided.

Decisions are read from the run's lineage, so a branch is part of it and outlives any kill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.schema import RunConfig
from tasks.specs.graph import Node, policy_after

if TYPE_CHECKING:
    from tasks.specs.run_inputs import RunInputs

#: Kind of the artifacts of decisions.
DECISIONS = "decisions"


class Start(NamedTuple):
    """The start of an epoch's training."""

    policy: Node
    """The stage that makes the policy."""
    rate: float
    """Factor of the learning rate."""


def steering_options(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decisions depend on."""
    return {"rules": config.watch.rules("back"), "rate": config.watch.rate}


def start_of(facts: RunInputs, epoch: int) -> Start:
    """Return the start of an epoch: the policy after the epoch before, unless that epoch's decision goes back.

    A decision that is not made yet does not go back. Only the newest attempt with the run's settings counts; the chain
    is not asked, because the decision's own place in it depends on the starts of all epochs before.
    """
    for node in facts.plan.steering(epoch - 1) if epoch > 1 else ():
        for entry in reversed(facts.run.made(*node)):
            decision = decided(facts, entry.ref)
            if decision is not None:
                return Start(policy_after(int(decision["policy"])), float(decision["rate"]))
    return Start(policy_after(epoch - 1), 1.0)


def decided(facts: RunInputs, ref: Any) -> Mapping[str, Any] | None:
    """Return a decision; None if it is incomplete or made with other settings."""
    manifest = facts.store.manifest(ref)
    wanted = steering_options(facts.config)
    if manifest is None or {name: manifest.options.get(name) for name in wanted} != wanted:
        return None
    return manifest.summary
