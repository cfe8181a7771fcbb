"""A reward whose models the ranks hold together: every call is made by all of them, each of its own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from models.rewards.base import Batch, Needs, Reward, Scores
from models.rewards.invocation import Handling, needs_of_made, score
from tasks.runtime.ranks import Ranks


class SpreadReward:
    """For ranks that each take shards of their own, as many as they get to.

    Before a call the ranks agree whether one of them needs it. All then make it: a rank without work calls
    with samples whose scores do not count. So they need not make equally many calls.
    """

    #: Who failed cannot be found by calling with each sample alone: the other ranks would not call.
    alone = False

    def __init__(self, reward: Reward, ranks: Ranks) -> None:
        """Bind to a reward that is spread over these ranks."""
        self._reward: Any = reward
        self._ranks = ranks

    @property
    def needs(self) -> Needs:
        """The reward's needs."""
        return needs_of_made(self._reward)

    def score(self, *given: Any) -> Any:
        """Return the reward's scores, computed collectively with the other ranks."""
        self._wanted(own=True)
        return self._reward.score(*given)

    def rest(self, idle: Callable[[], Sequence[Any]]) -> None:
        """Take part in the others' calls until none has work left.

        Args:
            idle: gives samples to call with, as ``Reward.score`` takes them; asked once, and only where it is needed.
        """
        given: Sequence[Any] | None = None
        while self._wanted(own=False):
            given = idle() if given is None else given
            self._reward.score(*given)

    def _wanted(self, *, own: bool) -> bool:
        """Return whether some rank makes a call now; all ranks must ask together."""
        return bool(self._ranks.largest(torch.tensor([own], dtype=torch.uint8)).item())


class _Heard:
    """Takes note of the first call a reward would get."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.given: Sequence[Any] = ()

    def score(self, media: np.ndarray, *others: Any) -> Scores:
        self.given = self.given or (media, *others)
        return Scores(np.zeros(len(media), np.float32))


def first_call(needs: Needs, name: str, batch: Batch, handling: Handling) -> Sequence[Any]:
    """Return the inputs of a reward's first call on samples."""
    heard = _Heard(needs)
    score(heard, name, batch, handling)
    return heard.given
