"""Results of a run, read from its committed artifacts: scores, image grids and texts of evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_shard
from flowmill.tasks.metrics.image_grids import GRID
from flowmill.tasks.metrics.texts import TEXTS, Text, read_texts
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.specs.graph import OF, TURN

#: Evaluated prompt lists, in order of execution.
SPLITS = ("heldout", "train")
#: {prompt list: {reward: {figure: value}}}
Figures = dict[str, dict[str, dict[str, float]]]


def flat(figures: Figures) -> dict[tuple[str, str, str], float]:
    """Return the values of figures by (prompt list, reward, figure), in their order."""
    return {
        (split, slot, figure): value
        for split, rewards in figures.items()
        for slot, values in rewards.items()
        for figure, value in values.items()
    }


def split_of(shard: str) -> str:
    """Return the prompt list of a shard of an evaluation, or of its scores."""
    return shard.partition("-")[0]


def named_range(shard: str, total: int) -> tuple[int, int]:
    """Return the sample range in a shard's name, within its prompt list; the whole list if the name has none."""
    _, *ends = shard.split("-")
    start, stop = map(int, ends) if ends else (0, total)
    return start, stop


def evaluation_figures(chain: Chain, epoch: int) -> Figures:
    """Return the scores of the scheduled evaluation of an epoch; empty if it has none.

    The prompt lists are 'heldout' and 'train'. Each reward has a 'mean', and 'exact' if it defines a perfect score.
    With several prompt sources each source has the same, as 'SOURCE_mean'. 'failed' counts the samples that could not
    be scored; if all failed, there is no mean. 'coverage' is the share of the samples that the reward is for, if it is
    not for all. A reward without samples of a list is left out.
    """
    config = chain.config
    slots = [section.slot for section in (*config.rewards, *config.evaluate.judges)]
    entries = {slot: chain.find(epoch, "judge", slot) for slot in slots}
    return _by_split(chain, {slot: entry.ref for slot, entry in entries.items() if entry is not None})


def named_evaluations(chain: Chain) -> dict[tuple[int, str], dict[str, ArtifactRef]]:
    """Return the additional evaluations: (epoch, name) -> rewards artifacts by reward, the newest of each."""
    evaluations: dict[tuple[int, str], dict[str, ArtifactRef]] = {}
    for entry in chain.run.entries():
        slot, _, name = entry.slot.partition(OF)
        if entry.stage == "judge" and name and TURN not in name:
            evaluations.setdefault((entry.epoch, name), {})[slot] = entry.ref
    return evaluations


def named_figures(chain: Chain, epoch: int, name: str) -> Figures:
    """Return the scores of an additional evaluation."""
    return _by_split(chain, named_evaluations(chain).get((epoch, name), {}))


def scores_by_prompt(store: ArtifactStore, ref: ArtifactRef, split: str | None = None) -> dict[str, float]:
    """Return the mean score of each prompt of a rewards artifact; NaN if none of its samples has a score.

    Args:
        split: a prompt list; all of them when absent.
    """
    shards = [record for record in store.shards(ref) if split in (None, split_of(record.shard))]
    tables = (read_shard(store, ref, record) for record in shards)
    return mean_by_prompt((row["prompt_id"], row["reward"]) for table in tables for row in table.to_pylist())


def mean_by_prompt(scores: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Return the mean of the scores of each prompt, in order; NaN for prompts of which no sample has a score."""
    values: dict[str, list[float]] = {}
    for prompt, score in scores:
        values.setdefault(prompt, []).extend([] if score is None else [score])
    return {prompt: fmean(each) if each else nan for prompt, each in values.items()}


def weighted_reward(config: RunConfig, figures: Figures) -> float | None:
    """Return the weighted mean reward on held-out prompts, or on the train prompts if there are none; None if
    ``weighted_rewards`` has none."""
    return weighted_rewards(config, {"": figures.get("heldout") or figures.get("train", {})}).get("")


def weighted_rewards(config: RunConfig, figures: Figures) -> dict[str, float]:
    """Return the mean over samples of the weighted sum of scores, for each prompt list; scores are those of rewards,
    before ``threshold`` and ``standardize``, and a sample that a reward is not for adds 0 to its mean.

    Lists of which a reward failed on all samples are left out, as the sum of the others does not compare with other
    evaluations.
    """
    weighted = {}
    for split, scores in figures.items():
        scored = [section for section in config.rewards if section.slot in scores]
        if scored and all("mean" in scores[section.slot] for section in scored):
            each = ((section.weight, scores[section.slot]) for section in scored)
            weighted[split] = float(sum(weight * one["mean"] * one.get("coverage", 1.0) for weight, one in each))
    return weighted


def rollout_reward(chain: Chain, epoch: int) -> float | None:
    """Return the same of an epoch's rollout; None before all its scores, and if ``weighted_rewards`` has none."""
    scores: dict[str, dict[str, float]] = {}
    for section in chain.config.rewards:
        entry = chain.find(epoch, "score", section.slot)
        manifest = None if entry is None else chain.store.manifest(entry.ref)
        if entry is None or manifest is None:
            return None
        figures = _with_coverage(chain.store, entry.ref, {"": manifest.summary}, section)[""]
        # A reward whose sources the epoch draws no prompt of has none.
        scores |= {section.slot: figures} if figures else {}
    return weighted_rewards(chain.config, {"": scores}).get("")


def _with_coverage(
    store: ArtifactStore, ref: ArtifactRef, summary: Mapping[str, Any], section: RewardSection
) -> dict[str, dict[str, float]]:
    """Return the figures of a rewards artifact by prompt list, '' for a rollout, with those of coverage, which earlier
    versions did not record."""
    if not section.sources or any("coverage" in values for values in summary.values()):
        return {split: dict(values) for split, values in summary.items()}
    from flowmill.tasks.metrics.scores import mean_figures

    parts: dict[str, list[tuple[int, Mapping[str, Any]]]] = {split: [] for split in summary}
    for record in store.shards(ref):
        parts["" if "" in parts else split_of(record.shard)].append((record.rows, record.summary))
    return {split: mean_figures(each) for split, each in parts.items()}


def section_bounds(section: RewardSection) -> tuple[float, float]:
    """Return the lowest and the highest score that a reward declares, infinite where it declares none or is custom."""
    from flowmill.models.rewards.factory import bounds_of

    # To read a run imports no custom code.
    return (None if ":" in section.name else bounds_of(section.name)) or (-math.inf, math.inf)


def weighted_bounds(config: RunConfig) -> tuple[float, float]:
    """Return the lowest and the highest weighted reward, infinite where a reward declares no bounds."""
    ends = [sorted(each.weight * end for end in section_bounds(each)) for each in config.rewards if each.weight]
    return sum(low for low, _ in ends), sum(high for _, high in ends)


def grids(store: ArtifactStore, ref: ArtifactRef) -> dict[str, Path]:
    """Return the image grid of each prompt list in a rewards artifact of an evaluation."""
    return _files(store, ref, GRID)


def texts(store: ArtifactStore, ref: ArtifactRef) -> dict[str, list[Text]]:
    """Return the first texts of each prompt list in a rewards artifact of an evaluation."""
    return {split: read_texts(path) for split, path in _files(store, ref, TEXTS).items()}


def evaluation_grids(chain: Chain, epoch: int) -> dict[str, Path]:
    """Return the grids of the scheduled evaluation of an epoch, with the scores of its first reward."""
    entry = chain.find(epoch, "judge", chain.config.rewards[0].slot)
    return {} if entry is None else grids(chain.store, entry.ref)


def _files(store: ArtifactStore, ref: ArtifactRef, name: str) -> dict[str, Path]:
    records = [record for record in store.shards(ref) if any(file.name == name for file in record.files)]
    return {split_of(record.shard): store.folder(ref, record) / name for record in records}


def evaluated_epochs(chain: Chain) -> list[int]:
    """Return the epochs with a complete evaluation that is up to date."""
    return sorted({entry.epoch for entry in chain.entries() if entry.stage == "judge" and TURN not in entry.slot})


def finished_evaluations(chain: Chain) -> list[int]:
    """Return the epochs with a complete evaluation that is, or once was, scheduled.

    A run that is extended with ``evaluate.every`` above 1 no longer schedules the evaluation of its former last epoch.
    That evaluation remains a result of the run.
    """
    judged = {entry.epoch for entry in chain.run.entries() if entry.stage == "judge" and OF not in entry.slot}
    reached = [epoch for epoch in sorted(judged) if epoch <= chain.config.run.epochs]
    return [epoch for epoch in reached if all(chain.find(*node) for node in chain.plan.evaluation(epoch))]


def _by_split(chain: Chain, rewards: Mapping[str, ArtifactRef]) -> Figures:
    figures: Figures = {}
    sections = {section.slot: section for section in (*chain.config.rewards, *chain.config.evaluate.judges)}
    for slot, ref in rewards.items():
        manifest = chain.store.manifest(ref)
        summary = {} if manifest is None else manifest.summary
        if summary and slot in sections:
            summary = _with_coverage(chain.store, ref, summary, sections[slot])
        # Train first.
        for split, values in sorted(summary.items(), key=lambda item: item[0] != "train"):
            if values:
                figures.setdefault(split, {})[slot] = dict(values)
    return figures
