"""Gradients of a reward with respect to final latents, through the decoder, each of the sample's own score.

Legend: B rows, F frames, H W image pixels, ... latent dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from flowmill.configs.errors import RewardError
from flowmill.configs.rewards import RewardSection
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.differentiable import Differentiable, followed
from flowmill.models.rewards.errors import Origin, describe
from flowmill.models.rewards.invocation import declared_needs
from flowmill.tasks.inputs.components import decode_rows
from flowmill.tasks.modalities.gradients import RewardGradientRequest, RewardGradientResult

if TYPE_CHECKING:
    from flowmill.models.policies.diffusion import DiffusionPolicy


def follow(following: RewardGradientRequest, batch: Batch) -> RewardGradientResult:
    """Return scores and gradients of samples, computed in chunks of a fixed number of rows.

    Args:
        following: the reward, and the holder of the decoder.
        batch: the samples; media are their (B, ...) final latents.
    """
    host, section = following.host, following.section
    reward = host.rewards.of(section)
    needs = declared_needs(reward)
    most = decode_rows(following.config)
    size = min(section.batch_size or needs.batch_size or most, most)
    decode: Callable[[Tensor], Tensor] | None = None
    if needs.media != "latents":
        decode = partial(_decoded, cast("DiffusionPolicy", host.decoding()))
    parts = []
    for start in range(0, len(batch), size):
        rows = list(range(start, min(start + size, len(batch))))
        padded = batch.take([*rows, *[rows[-1]] * (size - len(rows))])
        with host.rewards.at_work(reward):
            result = _follow(cast(Differentiable, reward), section, decode, padded, host.device)
        parts.append(RewardGradientResult(values=result.values[: len(rows)], gradients=result.gradients[: len(rows)]))
    return RewardGradientResult(
        values=np.concatenate([part.values for part in parts]),
        gradients=np.concatenate([part.gradients for part in parts]),
    )


def _decoded(policy: DiffusionPolicy, final: Tensor) -> Tensor:
    return policy.decode_smoothly(policy.clean_latents(final))


def _follow(
    reward: Differentiable,
    section: RewardSection,
    decode: Callable[[Tensor], Tensor] | None,
    batch: Batch,
    device: torch.device,
) -> RewardGradientResult:
    with torch.enable_grad():
        latents = torch.from_numpy(np.array(batch.media, np.float32)).to(device).requires_grad_(True)
        media = latents if decode is None else decode(latents)
        values = by_frames(reward, section, media, batch)
        (gradients,) = torch.autograd.grad(values.sum(), latents)
    check_slopes(gradients, section.slot, batch.origin, batch.prompts)
    return RewardGradientResult(values=values.detach().float().cpu().numpy(), gradients=gradients.float().cpu().numpy())


def check_slopes(gradients: Tensor, name: str, origin: Origin | None, prompts: Sequence[str]) -> None:
    """Check that (B, ...) gradients of a reward are finite."""
    bad = (~torch.isfinite(gradients)).flatten(1).any(1).nonzero().flatten().tolist()
    if bad:
        raise RewardError(
            f"The gradient of reward '{name}' is not finite for "
            f"{describe(origin, bad[0], prompts)}, {len(bad)} of {len(gradients)} rows. Mend the reward, or "
            "set its dtype or model.dtype to 'float32'; the rollouts are kept."
        )


def by_frames(reward: Differentiable, section: RewardSection, media: Tensor, batch: Batch) -> Tensor:
    """Return (B,) scores of (B, 3, H, W) images, or of the scored frames of (B, F, 3, H, W) clips."""
    if media.ndim != 5 or declared_needs(reward).media == "latents":
        return followed(reward, section.slot, media, batch)
    chosen = media[:, :1] if section.frames == "first" else media[:, :: int(section.frames)]
    count = chosen.shape[1]
    frames = replace(batch.take([row for row in range(len(batch)) for _ in range(count)]), groups=())
    return followed(reward, section.slot, chosen.flatten(0, 1), frames).reshape(-1, count).mean(1)
