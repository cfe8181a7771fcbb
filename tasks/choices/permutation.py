"""Seeded permutations: the default, which reads no rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowmill.tasks.choices.base import Choice, Draw
from flowmill.tasks.runs.seeds import epoch_prompts, mixed_prompts


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """Every prompt once per pass over the list, in another order in each pass."""

    def choose(self, draw: Draw) -> list[Choice]:
        """Return the next prompts of the pass."""
        sources = [each.source for each in draw.candidates]
        chosen = permuted(sources, draw.weights, draw.count, seed=draw.seed, epoch=draw.epoch)
        return [Choice(index, "next of the permutation") for index in chosen]


def permuted(sources: Sequence[str], weights: Mapping[str, float], count: int, *, seed: int, epoch: int) -> list[int]:
    """Return the indices of an epoch's prompts.

    Args:
        sources: source of each prompt.
        weights: share of each source; empty where there is one list.
        count: prompts per epoch.
        seed: seed of the run.
        epoch: the epoch, from 1.
    """
    if set(weights) <= {""}:
        return epoch_prompts(len(sources), count, seed=seed, epoch=epoch)
    lists = [[i for i, each in enumerate(sources) if each == name] for name in weights]
    chosen = mixed_prompts(list(map(len, lists)), list(weights.values()), count, seed=seed, epoch=epoch)
    return [lists[source][index] for source, index in chosen]
