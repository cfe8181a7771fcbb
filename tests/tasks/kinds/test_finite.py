"""Samples that are not finite stop a run where they appear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from configs.errors import SamplingError
from configs.schema import RunConfig
from tasks.kinds.diffusion.finals import Finals


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_decoded(make_config: Callable[..., RunConfig], value: float) -> None:
    policy: Any = None
    final = torch.zeros(3, 4, 2, 2)
    final[1, 0, 0, 0] = value
    with pytest.raises(SamplingError, match="final latents of 1 of 3 rows are not finite"):
        Finals.of(policy, final, make_config())
