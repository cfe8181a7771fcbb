"""Conditioning of models: rows of the embedding cache, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flowmill.models.devices import moved
from flowmill.models.maths.conditioning import Conditioning
from flowmill.storage.trajectories.embeddings import EmbeddingCache
from flowmill.tasks.inputs.prompts import StoredPrompt, condition_key, uses_guidance

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext
    from flowmill.tasks.runtime.host import ModelHost


def read_conditioning(
    context: RunContext, prompts: Sequence[StoredPrompt], *, device: torch.device, dtype: torch.dtype
) -> Conditioning:
    """Return one row per prompt, each with its negative when guidance is on.

    Args:
        prompts: B prompts; the row of equal prompts is read and moved once.
        device: target device.
        dtype: the model's dtype; integers keep their own.
    """
    text = context.config.model.negative_prompt
    keys = [[prompt.condition for prompt in prompts]]
    if uses_guidance(context.config):
        keys.append([condition_key(text, prompt.metadata) for prompt in prompts])
    positive, *negative = (_tensors(context.embeddings, conditions, device, dtype) for conditions in keys)
    return Conditioning(positive, negative[0] if negative else None)


def _tensors(
    cache: EmbeddingCache, conditions: Sequence[str], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    places = {condition: place for place, condition in enumerate(dict.fromkeys(conditions))}
    loaded = cache.load(list(places))
    index = moved(torch.tensor([places[condition] for condition in conditions]), device)
    tensors = {}
    for name, array in loaded.arrays.items():
        rows = torch.from_numpy(array)
        rows = rows.view(torch.bfloat16) if loaded.dtypes.get(name) == "bfloat16" else rows
        # Positions, lengths and masks are integers, which bfloat16 represents exactly only up to 256.
        kind = dtype if rows.is_floating_point() else rows.dtype
        tensors[name] = moved(rows, device).to(kind)[index]
    return tensors


def conditioning_of(context: RunContext, host: ModelHost, prompts: Sequence[StoredPrompt]) -> Conditioning:
    """Return one row per prompt on the device of the process's models, each with its negative if guidance is on."""
    return read_conditioning(context, prompts, device=host.device, dtype=host.dtype)
