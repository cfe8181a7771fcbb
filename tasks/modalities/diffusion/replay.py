"""Rows of older policies, recomputed with the policy an epoch starts from.

Legend: B rows of a micro-batch, D latent dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flowmill.models.maths.sampling import replay
from flowmill.tasks.algorithms.base import expect
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, TransitionBatch
from flowmill.tasks.modalities.proximal import Key, Proximal, RowFile
from flowmill.tasks.modalities.rows import Units, micro_batches


@torch.no_grad()
def recompute(
    stale: Units,
    batches: Callable[[Units], DiffusionBatch],
    models: DiffusionModels,
    *,
    micro_batch_size: int,
    means: RowFile | None,
    idle: Sequence[Units] = (),
) -> Proximal:
    """Replay rows under the policy's current weights; ``means`` is filled if not None.

    Args:
        stale: the rows.
        batches: units -> micro-batch, padded.
        models: the policy and its sampler.
        micro_batch_size: maximum rows per micro-batch.
        means: stores the means of the rows' steps.
        idle: micro-batches to compute and discard, if ranks run in lockstep.
    """
    log_probs: dict[Key, float] = {}
    for units in idle:
        models.velocity(batches(units))
    for units in micro_batches(stale, micro_batch_size):
        batch = expect(batches(units), TransitionBatch)
        step, values = replay(models.kernel, batch.latents, models.velocity(batch), batch.next_latents, batch.grid)
        keys = batch.keys[: len(units.rows)]
        log_probs.update(zip(keys, values[: len(keys)].tolist(), strict=True))
        if means is not None:
            for key, mean in zip(keys, step.mean[: len(keys)].cpu().numpy(), strict=True):
                means.add(key, mean)
    return Proximal(log_probs=log_probs, means=means)
