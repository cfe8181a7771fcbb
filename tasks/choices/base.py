"""The interface of samplers of prompts: their knowledge of each prompt, and their choices. Pure.

A sampler knows rewards of earlier epochs only as far as they are committed when the epoch's rollout may start, so its
choice is the same on any ranks, after any kill, and with ``execution.ahead``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from flowmill.tasks.runs.seeds import permutation, source_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A prompt of the train list, with the rewards of its last groups."""

    id: str
    """Identity of the prompt."""
    source: str = ""
    """Its prompt source; empty where there is one list."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of its source."""
    drawn: int = 0
    """The last epoch that drew it; 0: none."""
    scored: int = 0
    """The last epoch with rewards of it; 0: none."""
    mean: float | None = None
    """Mean weighted reward of its group in that epoch."""
    spread: float | None = None
    """Standard deviation of these rewards."""
    streak: int = 0
    """Its last groups in a row with that mean and a spread of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The question of an epoch: ``count`` of the candidates."""

    candidates: Sequence[Candidate]
    """All train prompts, in the order of their list."""
    count: int
    """Prompts to choose."""
    seed: int
    """Seed of the run."""
    epoch: int
    """The epoch, from 1."""
    weights: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    """Configured share of each source."""
    means: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Mean reward of each source in each epoch that drew it and has rewards, oldest first."""


class Choice(NamedTuple):
    """A chosen prompt."""

    place: int
    """Index of the candidate."""
    reason: str
    """Why it was chosen."""


class PromptSampler(Protocol):
    """Chooses the prompts of an epoch."""

    def choose(self, draw: Draw) -> Sequence[Choice]:
        """Return ``draw.count`` different candidates; the same for the same draw."""


class BySource:
    """Base of samplers that choose within each source, by the configured shares unless they have other ``weights``."""

    def choose(self, draw: Draw) -> list[Choice]:
        """Return the choices of each source in turn."""
        names = list(draw.weights)
        own = {name: [i for i, each in enumerate(draw.candidates) if each.source == name] for name in names}
        places = permutation(len(draw.candidates), draw.seed, "choices", draw.epoch).tolist()
        counts = source_counts(self.weights(draw), [len(own[name]) for name in names], draw.count, epoch=draw.epoch)
        choices: list[Choice] = []
        for name, count in zip(names, counts, strict=True):
            # Ties are broken at random: prompts in the order of a permutation of the epoch.
            choices += self.pick(sorted(own[name], key=places.__getitem__), count, draw)
        return choices

    def weights(self, draw: Draw) -> Sequence[float]:
        """Return the share of each source, with any sum."""
        return list(draw.weights.values())

    @abstractmethod
    def pick(self, own: Sequence[int], count: int, draw: Draw) -> Sequence[Choice]:
        """Return ``count`` of the candidates of one source.

        Args:
            own: their indices, in random order.
            count: number to choose, at most all of them.
            draw: the question.
        """


def oldest_first(indices: Sequence[int], draw: Draw) -> list[int]:
    """Return candidates in the order in which they were drawn last, those that never were first."""
    return sorted(indices, key=lambda index: draw.candidates[index].drawn)


def since(candidate: Candidate) -> str:
    """Return in words when a candidate was drawn last."""
    return f"drawn last in epoch {candidate.drawn}" if candidate.drawn else "not drawn before"
