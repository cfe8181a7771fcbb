"""Monitoring of rewards: the contribution of each, and monitors that fall while the optimized sum rises.

Monitors are rewards that are scored and never optimized. A monitor that falls while the optimized sum rises indicates
reward hacking.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowmill.configs.errors import CorruptError
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.metrics.evaluations import rollout_reward
from flowmill.tasks.runs.chain import Chain


def fallen_monitors(chain: Chain) -> Iterator[tuple[str, int, str]]:
    """Yield each monitor that fell while the optimized sum rose, the first epoch after which it shows, and both in
    words; reads manifests only."""
    if not chain.config.monitors:
        return
    import torch

    from flowmill.tasks.algorithms.trends import ends, first_opposed, opposed_window

    # Standardized or estimated rewards have the same mean in every epoch.
    rewards = {epoch: rollout_reward(chain, epoch) for epoch in range(1, chain.config.run.epochs + 1)}
    for section in chain.config.monitors:
        # An epoch may have no sample of a monitor's sources.
        both = [
            (epoch, earned, mean)
            for epoch, earned in rewards.items()
            if earned is not None and (mean := _mean(chain, section.slot, epoch)) is not None
        ]
        epochs, sums, values = torch.tensor(both, dtype=torch.float64).reshape(-1, 3).T
        count = first_opposed(sums, values)
        size = None if count is None else opposed_window(sums[:count], values[:count])
        if count is None or size is None:
            continue
        # Means over the first and over the last fourth of the window.
        reward, value = (ends(each[count - size : count]) for each in (sums, values))
        first, epoch = int(epochs[count - size]), int(epochs[count - 1])
        text = (
            f"from epoch {first} to {epoch} the reward rose from {reward[0]:.4g} to {reward[1]:.4g} while "
            f"the monitor '{section.slot}' fell from {value[0]:.4g} to {value[1]:.4g}: the policy may please the "
            "reward in a way that was not meant. Look at the images, and consider another reward or a KL."
        )
        yield section.slot, epoch, text


def correlations(chain: Chain, epoch: int) -> dict[str, float]:
    """Return the correlation of each monitor's scores with the optimized sum over an epoch's samples, as far as both
    exist."""
    advantage = chain.find(epoch, "advantage") if chain.config.monitors else None
    if advantage is None:
        return {}
    import torch

    from flowmill.tasks.algorithms.trends import correlation

    optimized, values = read_rows(chain.store, advantage.ref), dict[str, float]()
    for section in chain.config.monitors:
        entry = chain.find(epoch, "score", section.slot)
        if entry is None:
            continue
        monitored = read_rows(chain.store, entry.ref)
        if optimized.column("sample_id") != monitored.column("sample_id"):
            raise CorruptError(f"The monitor '{section.slot}' scores other samples than the advantages are of.")
        both = [torch.tensor(table.column("reward").to_numpy()) for table in (optimized, monitored)]
        valid = ~(both[0].isnan() | both[1].isnan())
        value = correlation(both[0][valid], both[1][valid])
        if value is not None:
            values[section.slot] = value
    return values


def shares(chain: Chain, epoch: int) -> dict[str, float]:
    """Return the share of each reward in the spread of their sum within groups, see ``contributions``; empty for one
    reward."""
    sections = chain.config.rewards
    if len(sections) < 2 or chain.plan.has_data:
        return {}
    import torch

    from flowmill.tasks.advantages.groups import contributions
    from flowmill.tasks.metrics.reward_tables import group_numbers, optimized_parts

    tables = [read_rows(chain.store, chain.require(epoch, "score", section.slot).ref) for section in sections]
    groups, _ = group_numbers(tables[0])
    parts = [section.weight * part for section, part in zip(sections, optimized_parts(sections, tables), strict=True)]
    valid = ~torch.stack(parts).isnan().any(0)
    contributed = contributions([part[valid] for part in parts], groups[valid].unique(return_inverse=True)[1])
    slots = [section.slot for section in sections]
    return {} if contributed is None else dict(zip(slots, contributed, strict=True))


def _mean(chain: Chain, slot: str, epoch: int) -> float | None:
    entry = chain.find(epoch, "score", slot)
    manifest = None if entry is None else chain.store.manifest(entry.ref)
    return None if manifest is None else manifest.summary.get("mean")
