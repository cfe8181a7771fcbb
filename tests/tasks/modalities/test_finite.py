"""Samples that are not finite stop a run where they appear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowmill.configs.errors import ConfigError, SamplingError
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies.nan_checks import noise_levels
from flowmill.tasks.modalities.diffusion.final_samples import Finals


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_decoded(make_config: Callable[..., RunConfig], value: float) -> None:
    policy: Any = None
    final = torch.zeros(3, 4, 2, 2)
    final[1, 0, 0, 0] = value
    with pytest.raises(SamplingError, match="final latents of 1 of 3 rows are not finite"):
        Finals.of(policy, final, make_config(), Conditioning({}))


@pytest.mark.parametrize("levels", [[1.0, float("nan"), 0.0], [1.0, 0.5, 0.5, 0.0], [0.0, 1.0], [1.5, 0.5, 0.0]])
def test_noise_that_does_not_fall_to_nothing_is_never_sampled_with(levels: list[float]) -> None:
    class Policy:
        def sigmas(self, steps: int) -> torch.Tensor:
            return torch.tensor(levels)

    policy: Any = Policy()
    with pytest.raises(ConfigError, match="They have to fall from 1 or less to 0 or more"):
        noise_levels(policy, len(levels) - 1)
