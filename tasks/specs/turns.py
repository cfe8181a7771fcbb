"""The stages of the turns of a sample, in runs with ``render.turns``: texts, their images, and the comments on these.

The last turn has the nodes of a run without turns, so that training, scores, reports and exports read whole samples.
Its texts hold the whole conversation with a mask of the tokens that the policy chose, in the form of any sampled text:
losses and estimators, which weigh chosen tokens, cross the comments between them without knowing of turns, and a group
has one advantage per conversation, whatever its number of turns. Turns before it are the same stages in numbered slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flowmill.configs.render import TurnsSection
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.renderer import reads_images
from flowmill.tasks.specs.graph import OF, TURN, Node


class TurnNodes(NamedTuple):
    """The stages of one turn."""

    texts: Node
    """Texts of all samples up to this turn."""
    images: Node
    """The newest image of each."""
    comment: Node
    """Scores of the images that are new, for a comment; the last turn has none."""


def turns_of(config: RunConfig) -> TurnsSection | None:
    """Return the settings of turns; None: samples have one text."""
    return None if config.render is None else config.render.turns


def last_turn(config: RunConfig) -> int:
    """Return the number of the last turn, 1 without turns."""
    turns = turns_of(config)
    return 1 if turns is None else turns.count


def split_turn(slot: str) -> tuple[str, str]:
    """Return a slot without its turn, and the turn as it is written there, such as ``#1``; empty for the last."""
    base = slot.partition(TURN)[0]
    return base, slot[len(base) :]


def has_turn(config: RunConfig, slot: str) -> bool:
    """Return whether a run has the turn of a slot; every run has the last."""
    return split_turn(slot)[1] in ("", *(f"{TURN}{number}" for number in range(1, last_turn(config))))


def commenter_of(config: RunConfig) -> RewardSection:
    """Return the reward or monitor that comments on images, in a run with turns that was checked."""
    turns = turns_of(config)
    assert turns is not None
    return next(each for each in config.scored if reads_images(config, each) and turns.by in (None, each.slot))


def turn_nodes(config: RunConfig, epoch: int, number: int, name: str = "", *, evaluation: bool) -> TurnNodes:
    """Return the stages of a turn.

    Args:
        config: the run's config.
        number: the turn, from 1.
        name: the name of an additional evaluation.
        evaluation: the turn belongs to an evaluation, not to a rollout.
    """
    texts, images, scores = ("evaluate", "depict", "judge") if evaluation else ("rollout", "render", "score")
    turn = "" if number == last_turn(config) else f"{TURN}{number}"
    comment = Node(epoch, scores, f"{commenter_of(config).slot}{OF if name else ''}{name}{turn}")
    return TurnNodes(Node(epoch, texts, name + turn), Node(epoch, images, name + turn), comment)


def episode(config: RunConfig, epoch: int, name: str = "", *, evaluation: bool) -> Iterator[Node]:
    """Yield the stages of a run's samples in order, up to their texts and, with ``render``, their images."""
    texts, images = ("evaluate", "depict") if evaluation else ("rollout", "render")
    for number in range(1, last_turn(config)):
        yield from turn_nodes(config, epoch, number, name, evaluation=evaluation)
    yield Node(epoch, texts, name)
    if config.render is not None:
        yield Node(epoch, images, name)
