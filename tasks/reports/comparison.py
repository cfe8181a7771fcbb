"""Comparison of two runs: different settings, shared artifacts, and scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowmill.configs.load import asks_for, unlike
from flowmill.tasks.inputs.option_paths import config_places
from flowmill.tasks.metrics.evaluations import Figures
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """Two runs."""

    settings: dict[str, tuple[Any, Any]]
    """Settings in which they differ; None where a run lacks the setting."""
    contents: list[str]
    """Files and folders that options of both name but whose contents differed, one sentence each."""
    shared: dict[str, int]
    """By stage: number of artifacts that both have."""
    own: dict[str, tuple[int, int]]
    """By stage: number of artifacts that only the first has, and only the second."""
    parts_at: Node | None
    """The first stage whose artifacts differ; None if there is none."""
    figures: dict[int, tuple[Figures, Figures]]
    """Scores by epoch that either run evaluated; empty where one did not."""


def compare(first: RunContext, second: RunContext) -> RunDifference:
    """Return the common and the different parts of two runs; reads manifests and lineage, no samples."""
    settings = [asks_for(context.config.model_dump(mode="json")) for context in (first, second)]
    by_node = [{Node(*entry.key): entry.artifact for entry in context.chain.entries()} for context in (first, second)]
    apart = [node for node, artifact in by_node[0].items() if by_node[1].get(node, artifact) != artifact]
    one, other = (RunView(context).evaluations for context in (first, second))
    artifacts = [set(each.values()) for each in by_node]
    stages = list(dict.fromkeys(node.stage for each in by_node for node in each))
    counted = {stage: [{a for n, a in each.items() if n.stage == stage} for each in by_node] for stage in stages}
    return RunDifference(
        settings={key: (a, b) for key, (a, b) in unlike(*settings).items() if key != "run.name"},
        contents=_other_contents(first, second),
        shared={stage: len(a & b) for stage, (a, b) in counted.items()},
        own={stage: (len(a - artifacts[1]), len(b - artifacts[0])) for stage, (a, b) in counted.items()},
        parts_at=apart[0] if apart else None,
        figures={epoch: (one.get(epoch, {}), other.get(epoch, {})) for epoch in sorted({*one, *other})},
    )


def _other_contents(first: RunContext, second: RunContext) -> list[str]:
    one, other = first.contents.recorded, second.contents.recorded
    apart = {path for path, digest in one.items() if other.get(path, digest) != digest}
    read = (place for places in config_places(first.config).values() for place in places if place.path in apart)
    return list(dict.fromkeys(f"{place} had other contents for each of the two runs." for place in read))
