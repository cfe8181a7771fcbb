"""Every random draw of a run, derived from what it is for: results do not depend on shards, workers or restarts."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from configs.fingerprint import canonical_json


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
