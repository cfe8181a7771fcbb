"""Values from the tables of rewards and advantages: mean rewards, optimized parts, group numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from flowmill.configs.rewards import RewardSection
from flowmill.tasks.advantages.groups import composed
from flowmill.tasks.metrics.evaluations import rollout_reward
from flowmill.tasks.runs.chain import Chain


def earned(chain: Chain, epoch: int) -> str:
    """Return the mean weighted reward of an epoch's samples in words; for ingested samples the mean loss."""
    if chain.plan.has_data:
        losses = [
            update["loss"] for update in chain.store.require(chain.require(epoch, "optimize").ref).summary["updates"]
        ]
        return f"loss {sum(losses) / len(losses):.4f}" if losses else ""
    rewards, mean = chain.config.rewards, rollout_reward(chain, epoch)
    plain = len(rewards) == 1 and rewards[0].weight == 1
    return "" if mean is None else f"reward {rewards[0].slot if plain else 'sum'} {mean:.3f}"


def optimized_parts(sections: Sequence[RewardSection], tables: Sequence[pa.Table]) -> list[Tensor]:
    """Return the unweighted summand of each reward, (N,) float64; NaN where scoring failed, 0 where not applicable."""
    parts = []
    for section, table in zip(sections, tables, strict=True):
        scores = torch.tensor(table.column("reward").to_numpy(), dtype=torch.float64)
        # No lists of Python objects: an epoch may have very many samples.
        noted = pc.fill_null(pc.not_equal(table.column("note"), ""), False)
        failed = torch.tensor(noted.to_numpy(), dtype=torch.bool) & scores.isnan()
        values = composed(scores, threshold=section.threshold, standardize=section.standardize)
        parts.append(torch.where(values.isnan() & ~failed, 0.0, values))
    return parts


def group_numbers(samples: pa.Table) -> tuple[Tensor, list[str]]:
    """Return each row's group number, (N,) int64 in order of first appearance, and the groups' names."""
    encoded = samples.column("group_id").combine_chunks().dictionary_encode()
    return torch.tensor(encoded.indices.to_numpy(), dtype=torch.int64), encoded.dictionary.to_pylist()
