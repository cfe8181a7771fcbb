"""Every random draw of a run, derived from what it is for: results do not depend on shards, workers or restarts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from configs.fingerprint import canonical_json

_GOLDEN = (5**0.5 - 1) / 2


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed for what ``parts`` name: (run seed, purpose, epoch, prompt, replica, step, ...)."""
    digest = hashlib.blake2b(canonical_json(list(parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator; noise is drawn on the CPU so that it is the same on every device."""
    return torch.Generator().manual_seed(seed)


def permutation(count: int, *parts: int | str) -> np.ndarray:
    """Return a (count,) permutation for what ``parts`` name."""
    return np.random.Generator(np.random.PCG64(derive(*parts))).permutation(count)


def epoch_prompts(count: int, per_epoch: int, *, seed: int, epoch: int) -> list[int]:
    """Return the indices of an epoch's prompts: slices of one seeded permutation per pass over the list.

    No prompt appears twice in an epoch. When ``per_epoch`` does not divide ``count``, each pass leaves out some
    prompts, others every time.
    """
    epochs_per_pass = count // per_epoch
    number, position = divmod(epoch - 1, epochs_per_pass)
    order = permutation(count, seed, "prompts", number)
    return [int(index) for index in order[position * per_epoch : (position + 1) * per_epoch]]


def mixed_prompts(
    sizes: Sequence[int], weights: Sequence[float], per_epoch: int, *, seed: int, epoch: int
) -> list[tuple[int, int]]:
    """Return the prompts of an epoch that mixes sources, as (source, index within it).

    Which source a group of the run is of follows from its number alone, spread evenly by the golden ratio, so that
    every stretch of groups has close to the wanted shares. Each source is passed through in permutations of its own;
    no prompt appears twice in an epoch.

    Args:
        sizes: prompts of each source.
        weights: share of each, to any sum.
        per_epoch: groups of an epoch.
        seed: of the run.
        epoch: from 1.

    Raises:
        ValueError: an epoch needs more prompts of a source than it has.
    """
    numbers = np.arange(epoch * per_epoch, dtype=np.float64)
    bounds = np.cumsum(weights) / np.sum(weights)
    sources = np.minimum(np.searchsorted(bounds, (numbers + 0.5) * _GOLDEN % 1.0, side="right"), len(sizes) - 1)
    before, now = sources[: -per_epoch or None], sources[-per_epoch:]
    chosen: dict[int, list[int]] = {}
    for source in sorted(set(now.tolist())):
        wanted = int((now == source).sum())
        if wanted > sizes[source]:
            raise ValueError(f"an epoch takes {wanted} prompts of a source that has {sizes[source]}")
        used = int((before == source).sum()) if epoch > 1 else 0
        chosen[source] = _distinct(sizes[source], used, wanted, seed, source)
    return [(source, chosen[source].pop(0)) for source in now.tolist()]


def _distinct(size: int, used: int, wanted: int, seed: int, source: int) -> list[int]:
    """Return the next indices of a source of which so many were used; one just taken waits for a later pass."""
    found: list[int] = []
    while len(found) < wanted:
        number, position = divmod(used, size)
        index = int(permutation(size, seed, "prompts", source, number)[position])
        if index not in found:
            found.append(index)
        used += 1
    return found
