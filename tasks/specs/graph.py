"""Nodes of a run's graph: a stage of an epoch."""

from __future__ import annotations

from typing import NamedTuple

#: Between the reward and the evaluation in the slot of a judge: ``digits@drawbench``.
OF = "@"
#: Between the slot and the number of a turn before the last: ``#1``, ``digits#1``, ``digits@drawbench#1``.
TURN = "#"
#: The slot of the base model that renders texts.
RENDERER = "renderer"
#: The slot of ingested samples that are held out.
HELD_OUT = "heldout"


class Node(NamedTuple):
    """A stage of an epoch."""

    epoch: int
    stage: str
    slot: str = ""

    def __str__(self) -> str:
        slot = f"[{self.slot}]" if self.slot else ""
        return f"{self.stage}{slot}@{self.epoch}"


def policy_after(epoch: int) -> Node:
    """Return the stage that makes the policy after an epoch; epoch 0 is the base policy."""
    return Node(epoch, "optimize" if epoch else "policy")
