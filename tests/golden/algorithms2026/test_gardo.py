"""GARDO: advantages weighed by diversity, and its gate with either sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowmill.models.rewards.diversity import nearest_other
from flowmill.tasks.advantages.groups import Normalizer, diversity_weighted, group_advantages
from flowmill.tasks.advantages.uncertainty import uncertain, win_rates
from tests.golden.vectors import Vectors

Open = Callable[[str], tuple[Vectors, dict[str, Any]]]


def distances_of(features: Tensor, groups: Tensor) -> Tensor:
    """Return each sample's cosine distance to the nearest other of its group."""
    found, unit = torch.zeros(len(features), dtype=torch.float64), torch.nn.functional.normalize(features, dim=1)
    for group in groups.unique():
        rows = groups == group
        found[rows] = torch.from_numpy(nearest_other((1 - unit[rows] @ unit[rows].T).numpy())).double()
    return found


def test_advantages(vectors: Open) -> None:
    data, _ = vectors("gardo.npz")
    groups, rewards = data.tensor("group"), data.tensor("reward")
    distances = distances_of(data.tensor("features"), groups)
    centered = group_advantages(rewards, groups, Normalizer(std="none"))
    ours = diversity_weighted(centered, groups, distances)
    # Theirs are the same for every step. Scores are stored in float32.
    for key, found in (("gardo", ours), ("grpo", group_advantages(rewards, groups, Normalizer(std="global")))):
        expected = data[f"{key}_advantage"]
        np.testing.assert_allclose(np.broadcast_to(found[:, None], expected.shape), expected, rtol=1e-5, atol=1e-7)


def test_the_gate(vectors: Open) -> None:
    """The paper's gap is ours; the public code sorts the other way round, and gates where we do of negated rewards."""
    data, meta = vectors("gardo.npz")
    optimized, *others = (data.tensor(key) for key in ("main", "aesthetic", "imagereward"))
    gap = win_rates(optimized) - torch.stack([win_rates(other) for other in others]).mean(0)
    np.testing.assert_allclose(gap, data["intended_gap"], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(-gap * (len(gap) - 1), data["published_u"], rtol=1e-12, atol=1e-12)
    reversed_gate = uncertain(-optimized, [-other for other in others], meta["beta"])
    assert reversed_gate.tolist() == data["published_gated"].tolist()
    gated = uncertain(optimized, others, meta["beta"])
    assert bool((gap[gated] > 0).all())
    assert not bool((gated & reversed_gate).any())
