"""Sweeps: variants of one config that share all common artifacts."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from flowmill.configs.errors import ConfigError
from flowmill.configs.escaping import command
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.load import load_config
from flowmill.configs.override_quoting import text_override
from flowmill.configs.overrides import read_yaml, with_resolved_paths
from flowmill.configs.roots import root_option
from flowmill.configs.schema import RunConfig
from flowmill.tasks.metrics.evaluations import (
    evaluated_epochs,
    evaluation_figures,
    named_figures,
    section_bounds,
    weighted_reward,
)

if TYPE_CHECKING:
    from flowmill.tasks.runs.context import RunContext

_Value = TypeVar("_Value")
#: Name of the evaluation of the best variant on prompts that took no part in the selection.
FINAL = "final"
#: The setting of which a sweep may have several values to show how much results vary.
SEED = "run.seed"
#: Maximum characters of a value in a run's name; longer values are replaced with their fingerprint.
_LONGEST = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One run of a sweep."""

    name: str
    settings: dict[str, Any]
    """Values that differ from the base config, by setting."""

    @property
    def overrides(self) -> list[str]:
        """The same as ``section.key=value`` strings."""
        return [text_override(key, value) for key, value in self.settings.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a variant so far."""

    variant: Variant
    epoch: int
    """The last evaluated epoch; 0 before training."""
    reward: float | None
    """Mean reward of that evaluation on held-out prompts, under weights that all variants share; None before any, if
    scoring failed, and if the variants do not compare."""
    figures: dict[str, float]
    """Scores on held-out prompts, or on the train prompts if there are none."""
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The lowest and the highest value that each of these can have, infinite where none is declared."""
    split: str = "heldout"
    """The list of these prompts: heldout or train."""
    final: dict[str, float] = field(default_factory=dict)
    """Scores of the best variant on prompts that took no part in the selection, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How the variants of a sweep compare."""

    weights: RunConfig | None
    """The config by whose weights of rewards all of them are ranked; None if they do not compare."""
    why_none: str = ""
    """Why they do not compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSummary:
    """Results of the variants that differ in ``run.seed`` alone."""

    settings: dict[str, Any]
    """Their other settings."""
    count: int
    """Number of seeds with a result."""
    figures: dict[str, tuple[float, float, float]]
    """Mean over seeds, and lower and upper end of its 95 % interval, by figure."""


def over_seeds(outcomes: Sequence[Outcome]) -> list[SeedSummary]:
    """Return the means over seeds with Student's intervals, m +- t s / sqrt(n) with n - 1 degrees of freedom.

    They say how much results vary from seed to seed. Settings with results of one seed alone are left out.
    """
    from scipy.special import stdtrit

    groups: dict[str, list[Outcome]] = {}
    for each in outcomes:
        if SEED in each.variant.settings and each.figures:
            groups.setdefault(fingerprint(_without_seed(each.variant)), []).append(each)
    summaries = []
    for members in groups.values():
        count, summary = len(members), dict[str, tuple[float, float, float]]()
        if count < 2:
            continue
        for figure in members[0].figures:
            values = [each.figures[figure] for each in members if figure in each.figures]
            if len(values) == count:
                mean = fmean(values)
                half = float(stdtrit(count - 1, 0.975)) * stdev(values) / math.sqrt(count)
                low, high = members[0].bounds.get(figure, (-math.inf, math.inf))
                summary[figure] = (mean, max(low, mean - half), min(high, mean + half))
        summaries.append(SeedSummary(settings=_without_seed(members[0].variant), count=count, figures=summary))
    return summaries


def _without_seed(variant: Variant) -> dict[str, Any]:
    return {key: value for key, value in variant.settings.items() if key != SEED}


def variants(name: str, grids: Sequence[str], lists: Sequence[str]) -> list[Variant]:
    """Return the variants of a sweep: every combination of grids, for each line of lists if there are any.

    Args:
        name: name of the sweep, and prefix of the names of its runs.
        grids: ``section.key=value,value`` strings.
        lists: lines of ``section.key=value`` strings, split like shell arguments.
    """
    if not grids and not lists:
        raise ConfigError("A sweep needs --grid key=value,value, or --list FILE.")
    axes = [_axis(grid) for grid in grids]
    rows = [_row(line) for line in lists] or [()]
    by_settings: dict[str, Variant] = {}
    for row in rows:
        for chosen in itertools.product(*axes):
            pairs = [*row, *chosen]
            twice = [key for number, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:number]]]
            if twice:
                raise ConfigError(f"'{twice[0]}' is given twice in one variant. Leave one of them out.")
            variant = Variant(name="-".join([name, *(_part(*pair) for pair in pairs)]), settings=dict(pairs))
            if (settings := fingerprint(variant.settings)) in by_settings:
                raise ConfigError(f"Two variants are the same: {' '.join(variant.overrides)}.")
            by_settings[settings] = variant
    # Names leave out signs, and the sections of settings.
    counts = Counter(each.name for each in by_settings.values())
    return [
        each if counts[each.name] == 1 else replace(each, name=f"{each.name}-{settings[:8]}")
        for settings, each in by_settings.items()
    ]


def read_list(file: Path) -> list[str]:
    """Return the lines of a list of variants, without empty ones and those that begin with #."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--list '{file}' cannot be read: {error}") from None
    return [line for line in lines if line and not line.startswith("#")]


def ranking(config: str, overrides: Sequence[str], varied: Sequence[RunConfig], *, final: str | None) -> Ranking:
    """Return how variants compare: by the weights that all have, or by those of the config without the grid.

    A sum under weights of its own would rank a variant by its weights, not by its samples.

    Args:
        config: the config that is varied, as ``load_config`` takes it.
        overrides: settings of all variants.
        varied: the configs of the variants.
        final: the list on which the best variant is to be evaluated, if any.

    Raises:
        ConfigError: there is no best to evaluate on ``final``.
    """
    weights, why = varied[0], ""
    if len({fingerprint(_rewards(each)) for each in varied}) > 1:
        why = "the variants differ in their rewards, and sums of different rewards do not compare"
    elif len({fingerprint(_weights(each)) for each in varied}) > 1:
        common = _without_grid(config, overrides)
        if common is None or _rewards(common) != _rewards(weights):
            why = f"the variants weigh their rewards differently, and without the grid '{config}' has no such weights"
        weights = common or weights
    if not why and len({fingerprint(_evaluated(each)) for each in varied}) > 1:
        why = "the variants are evaluated on different prompts or noise, and means of these do not compare"
    if why and final is not None:
        raise ConfigError(
            f"--final '{final}': {why}, so there is no best to evaluate. Leave --final out, and evaluate variants "
            "with 'flowmill stage evaluate --run RUN --name final --set prompts.heldout=FILE'."
        )
    return Ranking(weights=None if why else weights, why_none=why)


def _without_grid(config: str, overrides: Sequence[str]) -> RunConfig | None:
    """Return the config that variants vary; None where it is complete with the grid only."""
    try:
        return load_config(config, overrides)
    except ConfigError:
        return None


def sum_of_rewards(config: RunConfig) -> str:
    """Return the weighted sum of rewards in words, and a fingerprint: words leave options out and round weights."""
    words = " + ".join(each.weighted for each in sorted(config.rewards, key=lambda each: each.slot))
    # MLflow takes short texts only.
    return f"{words[:1000]} ({fingerprint([_weights(config), _rewards(config)])[:8]})"


def _weights(config: RunConfig) -> dict[str, float]:
    return {section.slot: section.weight for section in config.rewards}


def _rewards(config: RunConfig) -> dict[str, Any]:
    """Return what the scores depend on, by slot."""
    read = {"name", "options", "frames", "reads", "sources"}
    return {section.slot: section.model_dump(mode="json", include=read) for section in config.rewards}


def _evaluated(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the prompts and the noise of evaluations."""
    prompts, given = config.prompts, None if config.data is None else config.data.train
    return {
        "lists": prompts.lists("heldout") or [given, prompts.lists("train")],
        "prompts": prompts.model_dump(mode="json", include={"column", "image", "split"}),
        "evaluate": config.evaluate.model_dump(mode="json", include={"samples", "seed"}),
    }


def outcome(context: RunContext, variant: Variant, weights: RunConfig | None) -> Outcome:
    """Return the result of a variant so far; ``weights`` is that of the ranking."""
    evaluated = evaluated_epochs(context.chain)
    if not evaluated:
        return Outcome(variant=variant, epoch=0, reward=None, figures={})
    figures = evaluation_figures(context.chain, evaluated[-1])
    split = "heldout" if figures.get("heldout") else "train"
    return Outcome(
        variant=variant,
        epoch=evaluated[-1],
        reward=None if weights is None else weighted_reward(weights, figures),
        figures=_flat(figures.get(split, {})),
        bounds=_flat({slot: _bounds(context.config, slot, each) for slot, each in figures.get(split, {}).items()}),
        split=split,
    )


def _bounds(config: RunConfig, slot: str, figures: Iterable[str]) -> dict[str, tuple[float, float]]:
    section = next(each for each in (*config.rewards, *config.evaluate.judges) if each.slot == slot)
    kinds = {"mean": section_bounds(section), "failed": (0.0, math.inf)}
    return {figure: kinds.get(figure.rpartition("_")[2], (0.0, 1.0)) for figure in figures}


def with_final(best: Outcome, context: RunContext) -> Outcome:
    """Return the best outcome with its scores on prompts that took no part in the selection."""
    figures = named_figures(context.chain, best.epoch, FINAL)
    return replace(best, final=_flat(figures.get("heldout", {})))


def final_settings(config: RunConfig, prompts: str) -> list[str]:
    """Return the overrides of the evaluation on prompts that took no part in the selection."""
    if config.prompts.sources:
        raise ConfigError(
            f"--final '{prompts}': prompts.sources has separate lists for each source, so one list cannot take their "
            "place. Leave --final out, and evaluate the best with 'flowmill stage evaluate --name final --set "
            "prompts.sources=...'."
        )
    return with_resolved_paths([text_override("prompts.heldout", prompts)])


def _flat(scores: Mapping[str, Mapping[str, _Value]]) -> dict[str, _Value]:
    return {f"{slot} {name}": value for slot, values in scores.items() for name, value in values.items()}


def scored_on(outcomes: Iterable[Outcome]) -> str:
    """Return the lists of the prompts that outcomes were scored on; '' before any result."""
    names = {"heldout": "held-out prompts", "train": "train prompts"}
    return " and ".join(dict.fromkeys(names[each.split] for each in outcomes if each.figures))


def selection_note(outcomes: Sequence[Outcome], *, prompts: str | None, root: str) -> str:
    """Return a note on the selection bias of the best of several outcomes; '' if fewer than two have a reward."""
    scored = [each for each in outcomes if each.reward is not None]
    if len(scored) < 2:
        return ""
    best = scored[0]
    note = (
        f"The best of {len(scored)} was chosen by its scores on the {scored_on(scored)} that the table shows: the more "
        "variants there are, the more of its lead is chance."
    )
    if best.final and prompts is not None:
        figures = ", ".join(f"{figure} {value:.4g}" for figure, value in best.final.items())
        return f"{note} On {prompts}, which chose nothing, {best.variant.name} has {figures}."
    which = ["--run", best.variant.name, "--epoch", str(best.epoch), *root_option(root)]
    stage = command("flowmill", "stage", "evaluate", *which, "--name", FINAL, "--set", "prompts.heldout=FILE")
    return f"{note} For a figure to report, evaluate it on prompts that chose nothing: --final FILE, or {stage}"


def best_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes sorted by reward, the best first; those without one come last, by name."""
    return sorted(outcomes, key=lambda each: (each.reward is None, -(each.reward or 0.0), each.variant.name))


def check_varied(variant: Variant) -> None:
    """Check that a variant does not change settings that all runs of a sweep share."""
    for key in variant.settings:
        if key.startswith(("run.name", "store.", "tracking.")):
            raise ConfigError(f"--grid '{key}': all runs of a sweep share it. Set it with --set, --name or --root.")


def _axis(grid: str) -> list[tuple[str, Any]]:
    key, separator, text = grid.partition("=")
    try:
        values = read_yaml(f"[{text}]") if separator and text.strip() else None
    except yaml.YAMLError:
        values = None
    if not key or not values:
        raise ConfigError(f"--grid '{grid}' is not of the form section.key=value,value.")
    return [(key, value) for value in values]


def _row(line: str) -> tuple[tuple[str, Any], ...]:
    try:
        parts = [part.partition("=") for part in shlex.split(line)]
        settings = tuple((key, read_yaml(value)) for key, separator, value in parts if key and separator)
    except (ValueError, yaml.YAMLError):
        settings, parts = (), [("", "", "")]
    if len(settings) != len(parts):
        raise ConfigError(f"--list: '{line}' is not of the form section.key=value section.key=value.")
    return settings


def _part(key: str, value: Any) -> str:
    text = re.sub(r"[^A-Za-z0-9_.]+", "-", str(value)).strip("-")
    if isinstance(value, dict | list) or not 0 < len(text) <= _LONGEST:
        text = fingerprint([value])[:8]
    return f"{key.rpartition('.')[2]}-{text}"
