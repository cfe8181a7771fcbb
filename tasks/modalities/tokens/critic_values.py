"""Values and base model log-probs of stored texts, computed as in training.

Legend: B rows, W positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from models.policies.causal_lm import TrainableLM
from models.policies.critic_lm import TrainableCritic
from storage.trajectories.base import TrajectoryShard
from tasks.inputs.components import tokens_of
from tasks.inputs.weight_sources import Weights
from tasks.modalities.tokens.run_prompts import read_prompts
from tasks.modalities.tokens.text_sampling import padded_rows

if TYPE_CHECKING:
    from tasks.modalities.modality import ValueRequest


@torch.no_grad()
def values_of(valuing: ValueRequest, shard: TrajectoryShard) -> Mapping[str, list[np.ndarray] | None]:
    """Return values and reference log-probs of the chosen tokens, a row per sample, float32.

    Micro-batches have a fixed size, so results do not depend on the division of samples into shards.
    """
    host, config = valuing.host, valuing.context.config
    size, temperature = config.execution.micro_batch_size, tokens_of(config).temperature
    policy = cast(TrainableLM, host.trainable(valuing.policy, Weights.TRAINED))
    critic = cast(TrainableCritic, host.critic.of(valuing.policy)) if valuing.values else None
    if valuing.reference:
        host.give_reference(policy)
    values: list[np.ndarray] = []
    reference: list[np.ndarray] = []
    count, read = shard.table.num_rows, read_prompts(valuing.context, policy.policy)
    names = shard.table.column("prompt_id").to_pylist()
    for start in range(0, count, size):
        rows = list(range(start, min(start + size, count)))
        filled = [*rows, *[rows[-1]] * (size - len(rows))]
        tokens = [read.with_images(names[row], shard.array("tokens", row)) for row in filled]
        ids = padded_rows(tokens, host.device, read.widths)
        masks = [shard.array("token_mask", row).astype(bool) for row in rows]
        if critic is not None:
            hidden = policy.log_probs_and_hidden(ids, temperature)[2] if critic.reads_policy else None
            values += _chosen(critic.values(ids, hidden), masks)
        if valuing.reference:
            reference += _chosen(policy.reference_log_probs(ids, temperature), masks)
    return {
        "values": values if valuing.values else None,
        "reference_log_probs": reference if valuing.reference else None,
    }


def _chosen(found: torch.Tensor, masks: list[np.ndarray]) -> list[np.ndarray]:
    """Return the values of chosen tokens, per row."""
    table = found.float().cpu().numpy()
    return [table[row, : len(mask)][mask] for row, mask in enumerate(masks)]
