"""Tiny models of all families on the ODE beside diffusers' own pipelines, on the device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from flowmill.configs.registry import resolve
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionPolicy, DiffusionSettings
from flowmill.models.quickstart.tiny import build_tiny
from tests.contracts.test_policies import (
    ALL,
    TINY,
    conditioning,
    ode,
    pipeline_call,
    second_guidance,
    small_settings,
)
from tests.support.families import PIPELINES
from tools.gpu.families import SHORT
from tools.gpu.lines import Line, Lines

_STEPS, _GUIDANCE = 4, 4.5
#: Steps of 255 by which a pixel may differ: texts are padded otherwise, and kernels differ with that.
_MOST = 2


def measure(device: torch.device, lines: Lines, *, short: bool) -> None:
    """Add a line for every family, or for a few."""
    for family in SHORT if short else PIPELINES:
        with lines.told(f"{family}: images of the pipeline"), ExitStack() as stack:
            for name, value in small_settings():
                stack.enter_context(mock.patch(name, value))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            build_tiny(family).save_pretrained(folder)
            lines += _beside(family, device, folder)


@torch.no_grad()
def _beside(family: str, device: torch.device, folder: Path) -> Iterator[Line]:
    tiny = TINY[family]
    size = {"height": tiny.size, "width": tiny.size, "frames": tiny.frames}
    settings = DiffusionSettings(**size, guidance_scale=_GUIDANCE, device=device)
    options = {**tiny.options, **second_guidance(family)}
    kind = resolve(POLICIES, family, label="policy")
    policy: DiffusionPolicy = kind.load(folder, settings, ALL, options)
    ours = policy.decode(policy.finished(ode(policy, _STEPS, True), conditioning(policy, False))).cpu().numpy()
    theirs = (np.asarray(pipeline_call(policy, folder, _STEPS)("np")) * 255).round()
    apart = float(np.abs(ours.astype(float) - theirs).max())
    yield Line(
        label=f"{family}: largest difference of a pixel from the pipeline's, of 255",
        predicted=0.0,
        measured=apart,
        ok=apart <= _MOST,
    )
