"""Watches over rewards: what each contributes, and whether they are gained at the cost of what should rise with them.

Monitors are rewards that are scored and never optimized. One that falls while the optimized sum rises says that the
policy has found another way to please the reward than the one that was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.errors import CorruptError
from configs.rewards import RewardSection
from storage.tables import read_rows
from tasks.runs.chain import Chain

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorAlert:
    """A monitor that fell while the optimized sum rose."""

    monitor: str
    """Its label."""
    epoch: int
    """The first epoch after which it showed."""
    since: int
    """The first epoch of the window."""
    reward: tuple[float, float]
    """Mean of the optimized sum over the first and over the last fourth of the window."""
    value: tuple[float, float]
    """Mean of the monitor there."""

    def text(self) -> str:
        """Return it in words."""
        return (
            f"from epoch {self.since} to {self.epoch} the reward rose from {self.reward[0]:.4g} to "
            f"{self.reward[1]:.4g} while the monitor '{self.monitor}' fell from {self.value[0]:.4g} to "
            f"{self.value[1]:.4g}: the policy may please the reward in a way that was not meant. Look at the images, "
            "and consider another reward or a KL."
        )


def monitor_alerts(chain: Chain) -> list[MonitorAlert]:
    """Return when each monitor that ever fell while the optimized sum rose first did so; reads manifests only."""
    if not chain.config.monitors:
        return []
    from tasks.algorithms.trends import first_opposed

    found = []
    for slot, rewards, values in _monitored(chain, range(1, chain.config.run.epochs + 1)):
        epoch = first_opposed(rewards, values)
        if epoch is not None:
            found += _shown(slot, rewards[:epoch], values[:epoch], epoch)
    return found


@dataclass(frozen=True, slots=True)
class Scored:
    """What the samples of an epoch earned, by slot; a monitor that was not scored is not there."""

    advantages: pa.Table | None
    """The table of advantages; None before they are made."""
    rewards: Mapping[str, pa.Table]
    """That of each reward, if there are several."""
    monitors: Mapping[str, pa.Table]
    """That of each monitor."""


def read_scored(chain: Chain, epoch: int) -> Scored:
    """Read what is compared of an epoch; nothing where there is nothing to compare.

    Raises:
        NotCommittedError: a reward of several has not been scored.
    """
    config, store = chain.config, chain.store
    several = config.rewards if len(config.rewards) > 1 else ()
    rewards = {section.slot: chain.require(epoch, "score", section.slot).ref for section in several}
    monitors = {section.slot: chain.find(epoch, "score", section.slot) for section in config.monitors}
    advantage = chain.find(epoch, "advantage") if monitors else None
    return Scored(
        advantages=None if advantage is None else read_rows(store, advantage.ref),
        rewards={slot: read_rows(store, ref) for slot, ref in rewards.items()},
        monitors={slot: read_rows(store, entry.ref) for slot, entry in monitors.items() if entry is not None},
    )


def correlations(scored: Scored) -> dict[str, float]:
    """Return by monitor the correlation of its scores with the optimized sum over an epoch's samples.

    Raises:
        CorruptError: they are not of the same samples.
    """
    optimized, found = scored.advantages, {}
    if optimized is None:
        return {}
    import torch

    from tasks.algorithms.trends import correlation

    for slot, monitored in scored.monitors.items():
        if optimized.column("sample_id") != monitored.column("sample_id"):
            raise CorruptError(f"The monitor '{slot}' scores other samples than the advantages are of.")
        both = [torch.tensor(table.column("reward").to_numpy()) for table in (optimized, monitored)]
        known = ~(both[0].isnan() | both[1].isnan())
        value = correlation(both[0][known], both[1][known])
        if value is not None:
            found[slot] = value
    return found


def shares(scored: Scored, sections: Sequence[RewardSection]) -> dict[str, float]:
    """Return by reward its share in what the sum of several distinguishes within groups, see ``contributions``."""
    tables = list(scored.rewards.values())
    if not tables:
        return {}
    import torch

    from tasks.advantages.groups import contributions
    from tasks.metrics.reward_tables import group_numbers, optimized_parts

    groups, _ = group_numbers(tables[0])
    parts = [section.weight * part for section, part in zip(sections, optimized_parts(sections, tables), strict=True)]
    known = ~torch.stack(parts).isnan().any(0)
    found = contributions([part[known] for part in parts], groups[known].unique(return_inverse=True)[1])
    return {} if found is None else dict(zip(scored.rewards, found, strict=True))


def _monitored(chain: Chain, epochs: range) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each monitor, with the means of the optimized sum and its own of these epochs as far as they are made."""
    rewards = _means(chain, "advantage", "", "reward_mean", epochs)
    for section in chain.config.monitors:
        values = _means(chain, "score", section.slot, "mean", epochs)
        known = min(len(rewards), len(values))
        yield section.slot, rewards[:known], values[:known]


def _means(chain: Chain, stage: str, slot: str, figure: str, epochs: range) -> Tensor:
    """Return a figure of epochs, float64, as far as they are complete."""
    import torch

    values = []
    for epoch in epochs:
        entry = chain.find(epoch, stage, slot)
        manifest = None if entry is None else chain.store.manifest(entry.ref)
        if manifest is None or figure not in manifest.summary:
            break
        values.append(float(manifest.summary[figure]))
    return torch.tensor(values, dtype=torch.float64)


def _shown(slot: str, rewards: Tensor, values: Tensor, epoch: int) -> list[MonitorAlert]:
    """Return what the last means up to an epoch show, if anything."""
    from tasks.algorithms.trends import ends, opposed_window

    size = opposed_window(rewards, values, epochs=epoch)
    if size is None:
        return []
    reward, value = ends(rewards[-size:]), ends(values[-size:])
    return [MonitorAlert(monitor=slot, epoch=epoch, since=epoch - size + 1, reward=reward, value=value)]
