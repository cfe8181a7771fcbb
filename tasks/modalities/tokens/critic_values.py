"""Values and base model log-probs of stored texts, computed as in training.

Legend: B rows, W positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from flowmill.models.policies.causal_lm import TrainableLM
from flowmill.models.policies.critic_lm import TrainableCritic
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.metrics.samples import about_sample
from flowmill.tasks.modalities.tokens.forwards import chosen_rows, forwards
from flowmill.tasks.modalities.tokens.run_prompts import read_prompts

if TYPE_CHECKING:
    from flowmill.tasks.modalities.modality import ValueRequest


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
    values: dict[int, np.ndarray] = {}
    reference: dict[int, np.ndarray] = {}
    read, names = read_prompts(valuing.context, policy.policy), shard.table.column("prompt_id").to_pylist()
    rows = [
        read.with_images(name, shard.array("tokens", row), partial(about_sample, shard, row))
        for row, name in enumerate(names)
    ]
    masks = [shard.array("token_mask", row).astype(bool) for row in range(len(rows))]
    prompts = [int(mask.argmax()) for mask in masks]
    parts = forwards(rows, prompts, host.device, size=size, widths=read.widths, shared=read.shared)
    for numbers, ids, packed in parts:
        if critic is not None:
            hidden = policy.log_probs_and_hidden(ids, temperature, packed)[2] if critic.reads_policy else None
            sampled = None
            if critic.reads_log_probs:
                drawn = [shard.array("sampled_log_probs", number) for number in numbers]
                sampled = chosen_rows(ids.shape[1], [masks[number] for number in numbers], drawn, ids.device)
            values |= _chosen(critic.values(ids, hidden, packed, sampled), numbers, masks)
        if valuing.reference:
            reference |= _chosen(policy.reference_log_probs(ids, temperature, packed), numbers, masks)
    order = range(len(rows))
    return {
        "values": [values[row] for row in order] if valuing.values else None,
        "reference_log_probs": [reference[row] for row in order] if valuing.reference else None,
    }


def _chosen(values: torch.Tensor, numbers: list[int], masks: list[np.ndarray]) -> dict[int, np.ndarray]:
    """Return the values of chosen tokens, by number of the row."""
    table = values.float().cpu().numpy()
    return {number: table[place, : len(masks[number])][masks[number]] for place, number in enumerate(numbers)}
