"""Seeds derived from the purpose of each random draw: results do not depend on shards, workers or restarts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from json.encoder import encode_basestring

import numpy as np
import torch

from flowmill.configs.fingerprint import canonical_json

_GOLDEN = (5**0.5 - 1) / 2


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed for ``parts``: (run seed, purpose, epoch, prompt, replica, step, ...)."""
    digest = hashlib.blake2b(_as_json(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _as_json(parts: Sequence[int | str]) -> str:
    """Return the canonical JSON of integers and texts, twice as fast: an epoch of texts has many draws."""
    if all(type(part) is int or type(part) is str for part in parts):
        return f"[{','.join(str(part) if type(part) is int else encode_basestring(str(part)) for part in parts)}]"
    return canonical_json(list(parts))


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator; noise is drawn on the CPU so that it is equal on every device."""
    return torch.Generator().manual_seed(seed)


def drawn(*parts: int | str) -> np.random.Generator:
    """Return the generator of numbers for ``parts``."""
    return np.random.Generator(np.random.PCG64(derive(*parts)))


def permutation(count: int, *parts: int | str) -> np.ndarray:
    """Return a (count,) permutation for ``parts``."""
    return drawn(*parts).permutation(count)


def epoch_prompts(count: int, per_epoch: int, *, seed: int, epoch: int) -> list[int]:
    """Return the indices of an epoch's prompts: slices of one seeded permutation per pass over the list.

    No prompt appears twice in an epoch. If ``per_epoch`` does not divide ``count``, each pass leaves out some prompts,
    different ones in each pass.
    """
    epochs_per_pass = count // per_epoch
    number, position = divmod(epoch - 1, epochs_per_pass)
    order = permutation(count, seed, "prompts", number)
    return [int(index) for index in order[position * per_epoch : (position + 1) * per_epoch]]


def mixed_prompts(
    sizes: Sequence[int], weights: Sequence[float], per_epoch: int, *, seed: int, epoch: int
) -> list[tuple[int, int]]:
    """Return the prompts of an epoch that mixes sources, as (source, index within it).

    Each source has its own permutations; no prompt appears twice in an epoch.

    Args:
        sizes: number of prompts of each source, at least ``most_of_each``.
        weights: share of each source, with any sum.
        per_epoch: groups per epoch.
        seed: seed of the run.
        epoch: the epoch, from 1.
    """
    sources = _source_of_groups(weights, epoch * per_epoch)
    before, now = np.split(sources, [len(sources) - per_epoch])
    drawn = {
        source: iter(_next_of(sizes[source], int((before == source).sum()), int((now == source).sum()), seed, source))
        for source in sorted(set(now.tolist()))
    }
    return [(source, next(drawn[source])) for source in now.tolist()]


def source_counts(weights: Sequence[float], sizes: Sequence[int], per_epoch: int, *, epoch: int) -> list[int]:
    """Return the number of an epoch's groups of each source; a source gives all its prompts at most.

    Args:
        weights: share of each source, with any sum.
        sizes: number of prompts of each source.
        per_epoch: groups per epoch, at most all prompts.
        epoch: the epoch, from 1.
    """
    shares = np.bincount(_source_of_groups(weights, epoch * per_epoch)[-per_epoch:], minlength=len(weights))
    counts: list[int] = np.minimum(shares, sizes).tolist()
    for source, size in enumerate(sizes):
        counts[source] += min(per_epoch - sum(counts), size - counts[source])
    return counts


def most_of_each(weights: Sequence[float], per_epoch: int, epochs: int) -> list[int]:
    """Return for each source the largest number of its groups in any epoch."""
    sources = _source_of_groups(weights, max(1, epochs) * per_epoch).reshape(-1, per_epoch)
    return [int((sources == number).sum(1).max()) for number in range(len(weights))]


def _source_of_groups(weights: Sequence[float], count: int) -> np.ndarray:
    """Return the source of each of a run's first groups, (count,).

    It depends only on a group's number. The golden ratio spreads sources evenly, so every range of groups has
    approximately the required shares.
    """
    bounds = np.cumsum(weights) / np.sum(weights)
    places = (np.arange(count, dtype=np.float64) + 0.5) * _GOLDEN % 1.0
    return np.minimum(np.searchsorted(bounds, places, side="right"), len(weights) - 1)


def _next_of(size: int, used: int, count: int, seed: int, source: int) -> list[int]:
    """Return the next indices of a source after ``used`` ones; no index appears twice in the result."""
    indices: list[int] = []
    number, position = divmod(used, size)
    while len(indices) < count:
        order = permutation(size, seed, "prompts", source, number)[position:]
        indices += [index for index in order.tolist() if index not in indices][: count - len(indices)]
        number, position = number + 1, 0
    return indices
