"""Leaves out prompts that are solved, and brings each back now and then for a check.

A group of equal rewards has no advantage (DAPO, arXiv 2503.14476, section 3.2): a prompt that is always solved costs
rollouts and teaches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from flowmill.tasks.choices.base import BySource, Candidate, Choice, Draw, oldest_first, since


@dataclass(frozen=True, kw_only=True)
class Informative(BySource):
    """Prompts are drawn in turn, in a random order in each pass, without those that are solved."""

    solved: float = 1.0
    """Mean weighted reward from which a group of equal rewards is solved."""
    times: PositiveInt = 2
    """A prompt is left out after this many solved groups in a row."""
    again: PositiveInt = 8
    """Epochs after which a prompt that is left out is drawn for a check."""

    def pick(self, own: Sequence[int], count: int, draw: Draw) -> list[Choice]:
        """Return the prompts that wait longest; solved ones that are not due only where the others do not suffice."""
        candidates = draw.candidates
        solved = {index: self._is_solved(candidates[index]) for index in own}
        due = {index for index in own if solved[index] and draw.epoch - candidates[index].drawn >= self.again}
        first = oldest_first([index for index in own if not solved[index] or index in due], draw)
        others = oldest_first([index for index in own if solved[index] and index not in due], draw)

        def reason(index: int) -> str:
            state = ", solved: a check" if index in due else ", solved: too few others" if solved[index] else ""
            return f"{since(candidates[index])}{state}"

        return [Choice(index, reason(index)) for index in [*first, *others][:count]]

    def _is_solved(self, candidate: Candidate) -> bool:
        if candidate.mean is None or candidate.streak < self.times:
            return False
        # Rewards are stored as float32.
        return bool(np.float32(candidate.mean) >= np.float32(self.solved))
