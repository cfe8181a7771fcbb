"""Policies that make another size for a while: what they then draw is what one of that size draws."""

from __future__ import annotations

import pytest
import torch

from flowmill.configs.model_families import most_images, spec_of
from flowmill.models.policies.diffusion import DiffusionPolicy
from tests.contracts.test_policies import (  # noqa: F401 - fixtures
    TINY,
    Load,
    conditioning,
    family,
    folder,
    load,
    loaded,
    noise,
    small_references,
    tiny_folders,
)


def test_a_policy_that_is_sized_is_one_of_that_size(family: str, load: Load) -> None:  # noqa: F811
    tiny = TINY[family]
    if most_images(family, tiny.options):
        pytest.skip("its prompts come with images, whose size is that of rollouts")
    size = {
        "height": tiny.size,
        "width": 2 * tiny.size,
        "frames": tiny.frames + (clips.every if (clips := spec_of(family).clips) else 0),
    }
    sized, other = load(), load(**size)

    def drawn(policy: DiffusionPolicy) -> list[torch.Tensor]:
        latents, cond = noise(policy), conditioning(policy, False)
        velocity = policy.velocity(latents, torch.full((4,), 0.5), cond)
        return [latents, policy.sigmas(4), velocity, policy.decode(latents)]

    before = drawn(sized)
    with sized.sized(**size):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn(sized), drawn(other), strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn(sized), before, strict=True))
    assert before[0].shape != drawn(other)[0].shape
