"""Two runs beside each other: where their settings part, what they share, and what came of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.load import asks_for
from tasks.inputs.option_paths import config_places
from tasks.metrics.evaluations import Figures, evaluated_epochs, evaluation_figures
from tasks.runs.context import RunContext
from tasks.specs.graph import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs."""

    settings: dict[str, tuple[Any, Any]]
    """Settings in which they differ; None where a run has none of the name."""
    contents: list[str]
    """Files and folders that options of both name and that held something else for each, a sentence each."""
    shared: dict[str, int]
    """By stage: how many artifacts both have."""
    own: dict[str, tuple[int, int]]
    """By stage: how many only the first has, and only the second."""
    parts_at: Node | None
    """The first stage both have made differently; None if there is none."""
    figures: dict[int, tuple[Figures, Figures]]
    """Scores by epoch that either has evaluated; empty where one has not."""


def compare(first: RunContext, second: RunContext) -> Comparison:
    """Return what two runs have in common and in what they differ; manifests and lineage are read, no samples."""
    asked = [asks_for(context.config.model_dump(mode="json")) for context in (first, second)]
    keys = sorted({*asked[0], *asked[1]} - {"run.name"})
    made = [{Node(*entry.key): entry.artifact for entry in context.chain.entries()} for context in (first, second)]
    apart = [node for node, artifact in made[0].items() if made[1].get(node, artifact) != artifact]
    artifacts = [set(each.values()) for each in made]
    stages = list(dict.fromkeys(node.stage for each in made for node in each))
    counted = {stage: [{a for n, a in each.items() if n.stage == stage} for each in made] for stage in stages}
    return Comparison(
        settings={
            key: (asked[0].get(key), asked[1].get(key)) for key in keys if asked[0].get(key) != asked[1].get(key)
        },
        contents=_other_contents(first, second),
        shared={stage: len(a & b) for stage, (a, b) in counted.items()},
        own={stage: (len(a - artifacts[1]), len(b - artifacts[0])) for stage, (a, b) in counted.items()},
        parts_at=apart[0] if apart else None,
        figures={
            epoch: (evaluation_figures(first.chain, epoch), evaluation_figures(second.chain, epoch))
            for epoch in sorted({*evaluated_epochs(first.chain), *evaluated_epochs(second.chain)})
        },
    )


def _other_contents(first: RunContext, second: RunContext) -> list[str]:
    one, other = first.contents.recorded, second.contents.recorded
    apart = {path for path, digest in one.items() if other.get(path, digest) != digest}
    read = (place for places in config_places(first.config).values() for place in places if place.path in apart)
    return list(dict.fromkeys(f"{place} had other contents for each of the two runs." for place in read))
