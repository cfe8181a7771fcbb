"""The logged content of a run, read from its committed artifacts, independent of MLflow.

Steps: ``optimize/*`` but ``optimize/left_out`` are logged by optimizer update, everything else by epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowmill.configs.fingerprint import fingerprint
from flowmill.storage.artifacts.records import Manifest
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.prompts import list_name
from flowmill.tasks.metrics.evaluations import (
    Figures,
    flat,
    grids,
    named_evaluations,
    named_figures,
    rollout_reward,
    split_of,
    texts,
    weighted_reward,
    weighted_rewards,
)
from flowmill.tasks.metrics.evaluations import evaluation_figures as figures_of
from flowmill.tasks.metrics.image_grids import CLIPS
from flowmill.tasks.metrics.ingested import ingested_figures
from flowmill.tasks.metrics.monitors import correlations, shares
from flowmill.tasks.metrics.speed import ROWS, committed_at, seconds_of, speed_of
from flowmill.tasks.metrics.texts import Text
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import TURN, Node
from flowmill.tasks.specs.turns import split_turn

#: Section of the rewards that compare runs. MLflow sorts sections by name, so this name must sort first.
ACHIEVED = "achieved"
#: Sections of scores, in the order of MLflow's tables; times come last.
_SCORES, _TIMES = (ACHIEVED, "eval", "reward", "monitor"), "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of one curve."""

    key: str
    """Name of the curve."""
    value: float
    step: int
    """Epoch, or optimizer update."""
    split: str | None = None
    """Prompt list of a score."""


def scores_first(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return points with scores first, held-out prompts before others, and times last.

    MLflow's table of a run, and the initial axes of its run comparison, keep the order in which metrics were first
    logged.
    """

    def place(point: Point) -> tuple[int, bool]:
        section, _, name = point.key.partition("/")
        number = _SCORES.index(section) if section in _SCORES else len(_SCORES) + (section == _TIMES)
        return number, not name.startswith("heldout")

    return tuple(sorted(points, key=place))


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """An epoch: its training, or one of its evaluations."""

    epoch: int
    identity: str
    """Changes when any of its artifacts does."""
    time_ms: int
    """Completion time of the last of them, in milliseconds since 1970."""
    points: tuple[Point, ...]
    """Its values, scores first."""

    @property
    def key(self) -> str:
        """Its key among logged epochs and evaluations."""
        return str(self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationContent(Content):
    """An evaluation of the policy after an epoch."""

    name: str
    """Its name; empty for scheduled evaluations."""
    policy: str
    images: Mapping[str, Path]
    """Image grid of each prompt list."""
    clips: Sequence[tuple[str, Path]]
    """Folders of clips, each with its prompt list."""
    texts: Mapping[str, Sequence[Text]]
    """The first texts of each prompt list."""
    reward: float | None
    """Weighted held-out reward, if there is one."""

    @property
    def key(self) -> str:
        """Its key among logged epochs and evaluations."""
        return f"{self.epoch}:{self.name}"


def epoch_content(chain: Chain, epoch: int) -> Content | None:
    """Return the logged content of an epoch; None while its training is not up to date."""
    manifests = _manifests(chain, epoch)
    if manifests is None:
        return None
    figures = _epoch_figures(chain, manifests)
    points = [Point(key=key, value=value, step=epoch) for key, value in figures.items()]
    if (reward := rollout_reward(chain, epoch)) is not None:
        points.append(Point(key=f"{ACHIEVED}/rollout", value=reward, step=epoch))
    points += [
        Point(key=f"monitor/{slot}_correlation", value=value, step=epoch)
        for slot, value in correlations(chain, epoch).items()
    ]
    points += [
        Point(key=f"reward/{slot}_share", value=value, step=epoch) for slot, value in shares(chain, epoch).items()
    ]
    for update in _updates(manifests[epoch, "optimize", ""].summary):
        step = int(update["update"])
        points += [Point(key=f"optimize/{k}", value=v, step=step) for k, v in update.items() if k != "update"]
    identity = fingerprint([[*key[1:], manifest.digest] for key, manifest in manifests.items()])[:8]
    time_ms = committed_at(chain, [ArtifactRef(manifest.kind, manifest.id) for manifest in manifests.values()])
    return Content(epoch=epoch, identity=identity, time_ms=time_ms, points=scores_first(points))


def evaluation_content(chain: Chain, epoch: int) -> EvaluationContent | None:
    """Return the logged content of an epoch's scheduled evaluation; None while it is missing or not up to date."""
    nodes = list(chain.plan.evaluation(epoch))
    entries = [chain.find(*node) for node in nodes]
    if any(entry is None for entry in entries):
        return None
    refs = [entry.ref for entry in entries if entry is not None]
    content = _evaluation(chain, epoch, "", refs[0], refs[1:], figures_of(chain, epoch))
    losses = (chain.store.require(ref).summary for ref in refs if ref.kind == "losses")
    points = [Point(key=f"heldout/{name}", value=value, step=epoch) for each in losses for name, value in each.items()]
    return replace(content, points=scores_first((*content.points, *points)))


def side_contents(chain: Chain) -> list[EvaluationContent]:
    """Return the logged content of all additional evaluations."""
    contents = (side_content(chain, *key) for key in named_evaluations(chain))
    return [each for each in contents if each is not None]


def side_content(chain: Chain, epoch: int, name: str) -> EvaluationContent | None:
    """Return the logged content of an additional evaluation, None without images."""
    images, rewards = chain.run.entries_of(epoch, "evaluate", name), named_evaluations(chain)[epoch, name]
    if not images:
        return None
    figures = named_figures(chain, epoch, name)
    return _evaluation(chain, epoch, name, images[-1].ref, list(rewards.values()), figures)


def paragraphs(context: RunContext, *, done: bool) -> list[str]:
    """Return a description of a run: model, prompts, rewards and results.

    The first paragraph continues a sentence that begins with the run's name.
    """
    config, chain = context.config, context.chain
    model = config.model
    base = model.base_name if model.path else f"the built-in '{model.base_name}'"
    rewards = " + ".join(reward.weighted for reward in config.rewards)
    sources = config.prompts.lists("train").values() if config.data is None else [config.data.train]
    prompts = " + ".join(Path(list_name(source)).name for source in sources)
    aim = "for" if config.data is None else "judged by"
    lines = [
        f"trains {base} ({model.policy}) with {config.optimize.algorithm.name} on {prompts}{_size(context)} {aim} "
        f"{rewards}, {config.run.epochs} epochs."
    ]
    first, last = figures_of(chain, 0), figures_of(chain, config.run.epochs) if done else {}
    for split, rewards_of in last.items():
        changes = [
            f"{slot} {first[split][slot]['mean']:.3f} → {values['mean']:.3f}"
            for slot, values in rewards_of.items()
            if "mean" in values and "mean" in first.get(split, {}).get(slot, {})
        ]
        if not changes:
            continue
        lines.append(f"Result on {'held-out' if split == 'heldout' else split} prompts: {', '.join(changes)}.")
    return lines


def _size(context: RunContext) -> str:
    """Return the numbers of samples and prompts in parentheses; empty before they are counted."""
    section, chain, store = context.config.data, context.chain, context.store
    counts = store.manifest(chain.ref(Node(0, "preprocess")))
    if counts is None:
        return ""
    data, train = "", counts.summary["train"]
    ref = None if section is None else chain.ref(chain.plan.samples_of(0))
    if section is not None and ref is not None and store.manifest(ref) is not None:
        # Rows that are refused after reading count among the prompts of the run, but not among those of its samples.
        ingested = ingested_figures(store, ref, section)
        data, train = f"{ingested.samples} samples, {len(ingested.refused)} rows left out, ", ingested.prompts
    return f" ({data}{train} prompts, {counts.summary['heldout']} held out)"


def _evaluation(
    chain: Chain, epoch: int, name: str, images: ArtifactRef, rewards: list[ArtifactRef], figures: Figures
) -> EvaluationContent:
    store = chain.store
    prefix = f"eval-{name}" if name else "eval"
    points = [
        Point(key=f"{prefix}/{split}/{slot}_{figure}", value=value, step=epoch, split=split)
        for (split, slot, figure), value in flat(figures).items()
    ]
    if not name:
        points += [
            Point(key=f"{ACHIEVED}/{split}", value=value, step=epoch, split=split)
            for split, value in weighted_rewards(chain.config, figures).items()
        ]
    points.append(Point(key=f"time/{prefix}_s", value=seconds_of(chain, images), step=epoch))
    folders = [(split_of(record.shard), store.folder(images, record) / CLIPS) for record in store.shards(images)]
    manifests = [store.require(ref) for ref in (images, *rewards)]
    return EvaluationContent(
        epoch=epoch,
        name=name,
        identity=fingerprint([manifest.digest for manifest in manifests])[:8],
        time_ms=committed_at(chain, [images, *rewards]),
        policy=manifests[0].inputs[0],
        points=scores_first(points),
        images=grids(store, rewards[0]),
        clips=tuple((split, folder) for split, folder in folders if folder.exists()),
        texts=texts(store, rewards[0]),
        reward=weighted_reward(chain.config, figures) if not name else None,
    )


def _manifests(chain: Chain, epoch: int) -> dict[tuple[int, str, str], Manifest] | None:
    """Return the manifests of an epoch's training; None while it is not up to date."""
    nodes = [*chain.plan.scored(epoch), *chain.plan.training(epoch)]
    entries = [chain.find(*node) for node in nodes]
    if any(entry is None for entry in entries):
        return None
    return {entry.key: chain.store.require(entry.ref) for entry in entries if entry is not None}


def _epoch_figures(chain: Chain, manifests: Mapping[tuple[int, str, str], Manifest]) -> dict[str, float]:
    figures: dict[str, float] = {}
    monitors = {section.slot for section in chain.config.monitors}
    for (_, stage, slot), manifest in manifests.items():
        key, seconds = f"time/{stage}_s", seconds_of(chain, ArtifactRef(manifest.kind, manifest.id))
        figures[key] = figures.get(key, 0.0) + seconds
        if stage in ROWS:
            figures |= {f"time/{stage}_{name}": value for name, value in speed_of(chain, manifest).items()}
        if stage == "score":
            # Of images before the last turn's: reward/digits_turn1_mean.
            label, of = slot.replace(TURN, "_turn"), split_turn(slot)[0]
            figures[f"time/score_{label}_s"] = seconds
            kind = "monitor" if of in monitors else "reward"
            figures.update({f"{kind}/{label}_{name}": value for name, value in manifest.summary.items()})
        if stage == "gradient":
            figures |= {f"gradient/{slot}_{name}": value for name, value in manifest.summary.items()}
        if stage == "render":
            figures["render/empty_ratio"] = manifest.summary["empty"] / max(1, manifest.rows)
        if "left_out" in manifest.summary:
            figures["optimize/left_out"] = manifest.summary["left_out"]
        if stage == "advantage":
            names = {"reward_mean": "reward/mean", "reward_std": "reward/std"}
            figures |= {names.get(name, f"advantage/{name}"): value for name, value in manifest.summary.items()}
    return figures


def _updates(summary: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the figures of each update of an epoch; the last has how far all of them moved the policy."""
    updates = [dict(update) for update in summary["updates"]]
    if updates:
        updates[-1] |= {name: summary[name] for name in ("kl_epoch", "kl_base") if name in summary}
    return updates
