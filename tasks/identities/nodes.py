"""The stages a run consists of, told from its config alone: which there are, of which epochs, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from configs.schema import RunConfig
from tasks.advantages.estimators import has_values

#: Stages that belong to the run as a whole.
ONCE = ("base", "encode", "preprocess", "policy")
#: Stages of which an epoch may have several.
SLOTTED = ("score", "evaluate", "judge")
#: Stages that make sense for epoch 1 and later only.
TRAINING = ("rollout", "score", "value", "advantage", "optimize")
#: Between the reward and the evaluation in the slot of a judge: ``digits@drawbench``.
OF = "@"


class Node(NamedTuple):
    """A stage of an epoch."""

    epoch: int
    stage: str
    slot: str = ""

    def __str__(self) -> str:
        slot = f"[{self.slot}]" if self.slot else ""
        return f"{self.stage}{slot}@{self.epoch}"


def policy_after(epoch: int) -> Node:
    """Return what makes the policy after an epoch; epoch 0 is the base policy."""
    return Node(epoch, "optimize" if epoch else "policy")


def policy_of(config: RunConfig, epoch: int) -> Node:
    """Return what makes the policy that an epoch is rolled out with: the one before, with ``execution.ahead`` older."""
    return policy_after(max(0, epoch - 1 - config.execution.ahead))


def rolled_out_by(config: RunConfig, epoch: int) -> range:
    """Return the epochs that can be rolled out when one begins: it, and with ``execution.ahead`` some after it."""
    return range(epoch, min(epoch + config.execution.ahead, config.run.epochs) + 1)


def is_evaluated(config: RunConfig, epoch: int) -> bool:
    """Return whether the policy after an epoch is evaluated: every so many, and the last."""
    return epoch == config.run.epochs or epoch % config.evaluate.every == 0


def run_nodes(config: RunConfig) -> Iterator[Node]:
    """Yield every stage a run of this config consists of, each after those it reads."""
    yield from (Node(0, name) for name in ONCE)
    yield from evaluation_nodes(config, 0)
    for epoch in range(1, config.run.epochs + 1):
        yield Node(epoch, "rollout")
        yield from (Node(epoch, "score", reward.slot) for reward in config.scored)
        yield from training_nodes(config, epoch)
        if is_evaluated(config, epoch):
            yield from evaluation_nodes(config, epoch)
    yield Node(config.run.epochs, "export")


def training_nodes(config: RunConfig, epoch: int) -> Iterator[Node]:
    """Yield the stages from an epoch's scores to its policy."""
    if has_values(config):
        yield Node(epoch, "value")
    yield Node(epoch, "advantage")
    yield Node(epoch, "optimize")


def evaluation_nodes(config: RunConfig, epoch: int, name: str = "") -> Iterator[Node]:
    """Yield the stages of one evaluation; ``name`` is that of one beside the run's own."""
    yield Node(epoch, "evaluate", name)
    for reward in (*config.rewards, *config.evaluate.judges):
        yield Node(epoch, "judge", f"{reward.slot}{OF}{name}" if name else reward.slot)
