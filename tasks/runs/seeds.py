"""Every random draw of a run, derived from its purpose: results do not depend on shards, workers or restarts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from json.encoder import encode_basestring

import numpy as np
import torch

from configs.fingerprint import canonical_json

_GOLDEN = (5**0.5 - 1) / 2


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed for ``parts``: (run seed, purpose, epoch, prompt, replica, step, ...)."""
    digest = hashlib.blake2b(_as_json(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _as_json(parts: Sequence[int | str]) -> str:
    """Return the canonical JSON of integers and texts, in half the time: an epoch of texts has many draws."""
    if all(type(part) is int or type(part) is str for part in parts):
        return f"[{','.join(str(part) if type(part) is int else encode_basestring(str(part)) for part in parts)}]"
    return canonical_json(list(parts))


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator; noise is drawn on the CPU so that it is the same on every device."""
    return torch.Generator().manual_seed(seed)


def permutation(count: int, *parts: int | str) -> np.ndarray:
    """Return a (count,) permutation for ``parts``."""
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

    Each source is passed through in permutations of its own; no prompt appears twice in an epoch.

    Args:
        sizes: prompts of each source, at least as many as ``most_of_each`` says.
        weights: share of each, to any sum.
        per_epoch: groups of an epoch.
        seed: of the run.
        epoch: from 1.
    """
    sources = _source_of_groups(weights, epoch * per_epoch)
    before, now = np.split(sources, [len(sources) - per_epoch])
    drawn = {
        source: iter(_next_of(sizes[source], int((before == source).sum()), int((now == source).sum()), seed, source))
        for source in sorted(set(now.tolist()))
    }
    return [(source, next(drawn[source])) for source in now.tolist()]


def most_of_each(weights: Sequence[float], per_epoch: int, epochs: int) -> list[int]:
    """Return the most groups that any of so many epochs has of each source."""
    sources = _source_of_groups(weights, max(1, epochs) * per_epoch).reshape(-1, per_epoch)
    return [int((sources == number).sum(1).max()) for number in range(len(weights))]


def _source_of_groups(weights: Sequence[float], count: int) -> np.ndarray:
    """Return the source of each of a run's first groups, (count,).

    It follows from a group's number alone, spread evenly by the golden ratio: every stretch of groups has close to the
    wanted shares.
    """
    bounds = np.cumsum(weights) / np.sum(weights)
    places = (np.arange(count, dtype=np.float64) + 0.5) * _GOLDEN % 1.0
    return np.minimum(np.searchsorted(bounds, places, side="right"), len(weights) - 1)


def _next_of(size: int, used: int, wanted: int, seed: int, source: int) -> list[int]:
    """Return the next indices of a source of which so many were used; one just taken waits for a later pass."""
    found: list[int] = []
    number, position = divmod(used, size)
    while len(found) < wanted:
        order = permutation(size, seed, "prompts", source, number)[position:]
        found += [index for index in order.tolist() if index not in found][: wanted - len(found)]
        number, position = number + 1, 0
    return found
