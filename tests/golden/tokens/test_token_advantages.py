"""Advantages of Dr.GRPO and RLOO equal those of the public trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowmill.tasks.advantages.groups import Normalizer, group_advantages

NORMALIZERS = {
    "verl_grpo_": Normalizer(unbiased=True, epsilon=1e-6),
    "trl_grpo_group_": Normalizer(unbiased=True),
    "trl_grpo_batch_": Normalizer(std="global", unbiased=True),
    "openrlhf_group_norm_": Normalizer(unbiased=True, epsilon=1e-9),
    "verl_dr_grpo_": Normalizer(std="none"),
    "trl_grpo_none_": Normalizer(std="none"),
    "verl_rloo_": Normalizer(std="none", mean="leave_one_out"),
    "trl_rloo_": Normalizer(std="none", mean="leave_one_out"),
}


@pytest.fixture(scope="module")
def content(request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = Path(request.config.getoption("--golden-tokens") or Path(__file__).parent / "data")
    with np.load(folder / "advantages.npz") as found:
        return {name: found[name] for name in found.files}


@pytest.mark.parametrize("peer", NORMALIZERS)
def test_advantages_of_peers(content: dict[str, Any], peer: str) -> None:
    names = [name for name in json.loads(str(content["meta"])) if name.startswith(peer)]
    assert names
    for name in names:
        score = torch.from_numpy(content[f"{name}.score"])
        _, groups = torch.from_numpy(content[f"{name}.group"]).unique(return_inverse=True)
        wanted = torch.from_numpy(content[f"{name}.advantage"]).double()
        found = group_advantages(score, groups, NORMALIZERS[peer])
        # Peers that compute in float32 are right to its last digits.
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6, msg=name)


def test_leave_one_out_is_the_mean_of_the_others_and_the_group_mean_scaled() -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3])
    found = group_advantages(rewards, groups, Normalizer(std="none", mean="leave_one_out"))
    centered = group_advantages(rewards, groups, Normalizer(std="none"))
    for row, group in enumerate(groups.tolist()):
        others = [float(rewards[i]) for i in range(12) if i != row and int(groups[i]) == group]
        wanted = float(rewards[row]) - sum(others) / len(others) if others else 0.0
        assert float(found[row]) == pytest.approx(wanted, abs=1e-12), "one alone has no others, and says nothing"
        n = len(others) + 1
        assert float(found[row]) == pytest.approx(float(centered[row]) * n / max(1, n - 1), abs=1e-12)
