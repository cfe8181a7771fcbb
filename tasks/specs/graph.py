"""The graph of a run, derived from its config alone: which stages it has, in which epochs and order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from configs.rewards import RewardSection
from configs.schema import RunConfig
from tasks.advantages.estimators import has_values
from tasks.inputs.components import algorithm_needs
from tasks.inputs.renderer import reads_images
from tasks.specs.stages import names_of

#: Between the reward and the evaluation in the slot of a judge: ``digits@drawbench``.
OF = "@"
#: The slot of the base model that renders texts.
RENDERER = "renderer"


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


def policy_of(config: RunConfig, epoch: int) -> Node:
    """Return the stage that makes the policy of an epoch's rollout: the one before, older with ``execution.ahead``."""
    return policy_after(max(0, epoch - 1 - config.execution.ahead))


def rolled_out_by(config: RunConfig, epoch: int) -> range:
    """Return the epochs that can be rolled out when one begins: it, and with ``execution.ahead`` some after it."""
    return range(epoch, min(epoch + config.execution.ahead, config.run.epochs) + 1)


def is_evaluated(config: RunConfig, epoch: int) -> bool:
    """Return whether the policy after an epoch is evaluated: every so many, and the last."""
    return epoch == config.run.epochs or epoch % config.evaluate.every == 0


def run_nodes(config: RunConfig) -> Iterator[Node]:
    """Yield every stage a run of this config consists of, each after those it reads."""
    yield from first_nodes(config)
    yield from evaluation_nodes(config, 0)
    for epoch in range(1, config.run.epochs + 1):
        yield from scored_nodes(config, epoch)
        yield from training_nodes(config, epoch)
        if is_evaluated(config, epoch):
            yield from evaluation_nodes(config, epoch)
    yield Node(config.run.epochs, "export")


def first_nodes(config: RunConfig) -> Iterator[Node]:
    """Yield the stages that belong to the run as a whole, before all others."""
    yield Node(0, "base")
    if config.render is not None:
        yield Node(0, "base", RENDERER)
    yield from (Node(0, name) for name in names_of("run") if name != "base")


def scored_nodes(config: RunConfig, epoch: int) -> Iterator[Node]:
    """Yield the stages from an epoch's policy to its scores."""
    yield Node(epoch, "rollout")
    if config.render is not None:
        yield Node(epoch, "render")
    yield from (Node(epoch, "score", reward.slot) for reward in config.scored)


def drawn_nodes(config: RunConfig, epoch: int) -> Iterator[Node]:
    """Yield the stages that render an epoch's texts and score the images; none in runs without ``render``."""
    if config.render is not None:
        yield Node(epoch, "render")
        yield from (Node(epoch, "score", each.slot) for each in config.scored if reads_images(config, each))


def drawn_of(config: RunConfig, epoch: int, *, evaluation: bool) -> Node:
    """Return the stage with the media of an epoch's samples, or of its evaluation."""
    if config.render is not None:
        return Node(epoch, "depict" if evaluation else "render")
    return Node(epoch, "evaluate" if evaluation else "rollout")


def samples_of(config: RunConfig, reward: RewardSection, epoch: int) -> Node:
    """Return the stage whose artifact a reward scores in an epoch: the samples, or their renders."""
    return Node(epoch, "render" if reads_images(config, reward) else "rollout")


def shown_of(config: RunConfig, reward: RewardSection, epoch: int, name: str = "") -> Node:
    """Return the stage whose artifact a reward scores in an evaluation, see ``samples_of``; "" names the run's own."""
    return Node(epoch, "depict" if reads_images(config, reward) else "evaluate", name)


def training_nodes(config: RunConfig, epoch: int) -> Iterator[Node]:
    """Yield the stages from an epoch's scores to its policy."""
    if has_values(config):
        yield Node(epoch, "value")
    yield from gradient_nodes(config, epoch)
    yield Node(epoch, "advantage")
    yield Node(epoch, "optimize")


def has_gradients(config: RunConfig) -> bool:
    """Return whether a run has stages of gradients: one per reward, where its algorithm trains on them."""
    return algorithm_needs(config).gradients


def gradient_nodes(config: RunConfig, epoch: int) -> Iterator[Node]:
    """Yield the stages that follow the rewards of an epoch back to its samples, if any."""
    if has_gradients(config):
        yield from (Node(epoch, "gradient", reward.slot) for reward in config.rewards)


def nodes_of(config: RunConfig, epoch: int, stage: str) -> list[Node]:
    """Return the nodes of an epoch of a stage that training has, several of one that has slots."""
    return [node for node in (*scored_nodes(config, epoch), *training_nodes(config, epoch)) if node.stage == stage]


def evaluation_nodes(config: RunConfig, epoch: int, name: str = "") -> Iterator[Node]:
    """Yield the stages of one evaluation; ``name`` is empty for the run's own."""
    yield Node(epoch, "evaluate", name)
    if config.render is not None:
        yield Node(epoch, "depict", name)
    for reward in (*config.rewards, *config.evaluate.judges):
        yield Node(epoch, "judge", f"{reward.slot}{OF}{name}" if name else reward.slot)
