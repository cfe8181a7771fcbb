"""Watches over a reward: whether what is optimized is gained at the cost of what should rise with it.

Monitors are rewards that are scored and never optimized. One that falls while the optimized sum rises says that the
policy has found another way to please the reward than the one that was meant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from configs.errors import CorruptError
from tasks.algorithms.advantages import contributions
from tasks.algorithms.trends import correlation, opposed
from tasks.chain import Chain
from tasks.stages.advantage import read_advantages, read_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A monitor that fell while the optimized sum rose."""

    monitor: str
    """Its label."""
    epoch: int
    """The first epoch after which it showed."""
    since: int
    """The first epoch of the window."""
    reward: tuple[float, float]
    """Mean of the optimized sum at both ends of the window."""
    value: tuple[float, float]
    """Mean of the monitor at both ends."""

    def text(self) -> str:
        """Return it in words."""
        return (
            f"from epoch {self.since} to {self.epoch} the reward rose from {self.reward[0]:.4g} to "
            f"{self.reward[1]:.4g} while the monitor '{self.monitor}' fell from {self.value[0]:.4g} to "
            f"{self.value[1]:.4g}: the policy may please the reward in a way that was not meant. Look at the images, "
            "and consider another reward or a KL."
        )


def suspicions(chain: Chain) -> list[Suspicion]:
    """Return when each monitor that ever fell while the optimized sum rose first did so; reads manifests only."""
    rewards = _means(chain, "advantage", "", "reward_mean")
    found = []
    for section in chain.context.config.monitors:
        values = _means(chain, "score", section.slot, "mean")
        known = min(len(rewards), len(values))
        found_at = opposed(*(torch.tensor(series[:known], dtype=torch.float64) for series in (rewards, values)))
        if found_at is not None:
            start, stop = found_at
            ends = [(series[start], series[stop]) for series in (rewards, values)]
            found.append(
                Suspicion(monitor=section.slot, epoch=stop + 1, since=start + 1, reward=ends[0], value=ends[1])
            )
    return found


def correlations(chain: Chain, epoch: int) -> dict[str, float]:
    """Return by monitor the correlation of its scores with the optimized sum over an epoch's samples.

    Raises:
        CorruptError: they are not of the same samples.
    """
    store, advantage, found = chain.context.store, chain.find(epoch, "advantage"), {}
    for section in chain.context.config.monitors:
        scored = chain.find(epoch, "score", section.slot)
        if advantage is None or scored is None:
            continue
        optimized, monitored = read_advantages(store, advantage.ref), read_rewards(store, scored.ref)
        if optimized.column("sample_id") != monitored.column("sample_id"):
            raise CorruptError(f"{scored.ref} scores other samples than {advantage.ref} is of.")
        pair = [torch.tensor(table.column("reward").to_numpy()) for table in (optimized, monitored)]
        value = correlation(*pair)
        if value is not None:
            found[section.slot] = value
    return found


def shares(chain: Chain, epoch: int) -> dict[str, float]:
    """Return by reward its share in what the sum of several distinguishes within groups, see ``contributions``."""
    config, store = chain.context.config, chain.context.store
    scored = [chain.find(epoch, "score", section.slot) for section in config.rewards]
    tables = [read_rewards(store, entry.ref) for entry in scored if entry is not None]
    if len(tables) < max(2, len(config.rewards)):
        return {}
    names = tables[0].column("group_id").to_pylist()
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    groups = torch.tensor([numbers[name] for name in names])
    parts = [
        section.weight * torch.tensor(table.column("reward").to_numpy())
        for section, table in zip(config.rewards, tables, strict=True)
    ]
    found = contributions(parts, groups)
    return {} if found is None else dict(zip((section.slot for section in config.rewards), found, strict=True))


def _means(chain: Chain, stage: str, slot: str, figure: str) -> list[float]:
    """Return a figure of epochs 1, 2, ... as far as they are complete."""
    values = []
    for epoch in range(1, chain.context.config.run.epochs + 1):
        entry = chain.find(epoch, stage, slot)
        manifest = None if entry is None else chain.context.store.manifest(entry.ref)
        if manifest is None:
            break
        values.append(float(manifest.summary[figure]))
    return values
