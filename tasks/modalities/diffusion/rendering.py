"""Renders texts as images with a frozen model, by the ODE from seeded noise.

Legend: B texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.sampling import Sampler, ode_plan, sample
from flowmill.models.maths.solvers import Euler
from flowmill.models.maths.transitions import ODE
from flowmill.models.policies.diffusion import DiffusionPolicy, Images
from flowmill.models.policies.nan_checks import finite
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.modalities.diffusion.evaluation_sampling import no_noise
from flowmill.tasks.modalities.diffusion.final_samples import Finals
from flowmill.tasks.runs.seeds import generator

if TYPE_CHECKING:
    from flowmill.tasks.runtime.renderer import Renderer


def draw(renderer: Renderer, texts: Sequence[str], seeds: Sequence[int], images: Images) -> np.ndarray:
    """Return (B, H, W, 3) uint8 images; batches are padded to a fixed size, so the same kernels run for any B.

    Args:
        renderer: the model.
        texts: at most ``execution.rollout_batch_size``.
        seeds: seeds of the initial noise, one each.
        images: source images of each text's prompt, (H, W, 3) uint8; none where the model reads none.
    """
    config, size = renderer.config, renderer.config.execution.rollout_batch_size
    padding = [*range(len(texts)), *[len(texts) - 1] * (size - len(texts))]
    policy = cast(DiffusionPolicy, renderer.policy())
    started = [images[row] for row in padding]
    positive = _encoded(renderer, [texts[row] for row in padding], started)
    negative = _encoded(renderer, [config.model.negative_prompt] * size, started) if uses_guidance(config) else None
    conditioning = Conditioning(positive, negative)
    rollout = sample(
        policy,
        conditioning,
        policy.initial_latents([generator(seeds[row]) for row in padding]),
        policy.sigmas(config.rollout.steps),
        sampler=Sampler(kernel=ODE(), solver=Euler()),
        plans=[ode_plan()] * size,
        noise=no_noise,
    )
    with torch.no_grad():
        media = Finals.of(policy, rollout.final, config, conditioning).media
    assert media is not None
    return media[: len(texts)]


@torch.no_grad()
def _encoded(renderer: Renderer, texts: Sequence[str], images: Images) -> Mapping[str, Tensor]:
    policy = cast(DiffusionPolicy, renderer.policy())
    # A language model wrote the texts: control tokens in them must not stop the run.
    pictures = [images] if any(images) else []
    tensors: dict[str, Tensor] = policy.encode([policy.as_plain(text) for text in texts], *pictures)
    for name, rows in tensors.items():
        finite(rows, f"embeddings '{name}'")
    # Positions, lengths and masks stay integers.
    return {
        name: rows.to(renderer.device, renderer.dtype if rows.is_floating_point() else rows.dtype)
        for name, rows in tensors.items()
    }
