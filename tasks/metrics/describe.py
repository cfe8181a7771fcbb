"""A run as plain data: the output of ``flowmill status``, and the stored result of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.weight_sources import PIPELINE
from flowmill.tasks.metrics.alerts import alerts
from flowmill.tasks.metrics.evaluations import named_evaluations, named_figures, split_of
from flowmill.tasks.metrics.image_grids import GRID
from flowmill.tasks.metrics.speed import epoch_speeds
from flowmill.tasks.metrics.texts import TEXTS
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.staleness import Freshness, side_results, statuses
from flowmill.tasks.runs.state import state_of
from flowmill.tasks.specs.graph import Node


def describe_run(context: RunContext) -> dict[str, Any]:
    """Return config, figures, artifacts and state of a run."""
    view, chain, run = RunView(context), context.chain, context.run
    context.store.remember(map(chain.ref, chain.nodes()))
    finished, stages, rewards = max(view.trained, default=0), statuses(chain), dict[str, dict[str, Any]]()
    for epoch, slot, summary in view.summaries("score"):
        rewards.setdefault(str(epoch), {})[slot] = summary
    return {
        "run": run.name,
        "root": run.store.root.uri,
        "state": state_of(context, complete=all(each.state is Freshness.FRESH for each in stages)),
        "epochs": context.config.run.epochs,
        "finished_epochs": finished,
        "start": context.starts_from,
        "tracking": run.newest("tracking"),
        "evaluations": {str(epoch): figures for epoch, figures in view.evaluations.items()},
        "named_evaluations": [
            {"epoch": epoch, "name": name, "figures": named_figures(chain, epoch, name)}
            for epoch, name in sorted(named_evaluations(chain))
        ],
        "losses": {str(epoch): summary for epoch, _, summary in view.summaries("validate")},
        "data": _given_counts(view),
        "rewards": rewards,
        "warnings": [alert.text for alert in alerts(chain)],
        "advantages": {str(epoch): summary for epoch, _, summary in view.summaries("advantage")},
        "speed": {"epoch": finished, "stages": epoch_speeds(chain, finished)} if finished else None,
        "artifacts": [
            {"epoch": e.epoch, "stage": e.stage, "slot": e.slot, "artifact": e.artifact, "forced": e.forced}
            for e in chain.entries()
        ],
        "stages": [each.as_dict() for each in stages],
        "side_results": _side_results(chain),
        "config": context.config.model_dump(mode="json"),
    }


def _given_counts(view: RunView) -> dict[str, Any] | None:
    """Return the numbers of samples, of rows, and of those left out, whether they were refused on reading or later."""
    summary = next((summary for _, slot, summary in view.summaries("ingest") if not slot), None)
    if summary is None:
        return None
    # The stored number of rows lacks those refused on reading.
    used = summary["samples"] // (2 if view.config.data and view.config.data.paired else 1)
    return {**summary, "rows": used + summary["refused"]}


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of a stage, computed or already committed."""

    node: Node
    artifact: str
    """``kind/id``."""
    means: Mapping[str, float]
    """Mean score by prompt list ('' where there are none); empty unless it holds rewards."""
    reused: bool = False
    """Whether it was already committed and not computed again."""

    def __str__(self) -> str:
        means = [f"{split} mean {mean:.3f}".strip() for split, mean in self.means.items()]
        shown = [f"({', '.join(means)})"] if means else []
        return " ".join(
            [str(self.node), self.artifact, *shown, *(["found, not computed again"] if self.reused else [])]
        )


def describe_stage(context: RunContext, node: Node, ref: ArtifactRef, *, reused: bool = False) -> StageResult:
    """Return the result of a stage, with the mean scores of rewards."""
    means = {split: values["mean"] for split, values in _scores(context.store, ref).items() if "mean" in values}
    return StageResult(node, str(ref), means, reused)


def _scores(store: ArtifactStore, ref: ArtifactRef) -> dict[str, Any]:
    """Return the figures of a rewards artifact by prompt list ('' where it has none); empty for other artifacts."""
    manifest = store.manifest(ref) if ref.kind == "rewards" else None
    if manifest is None:
        return {}
    if "mean" in manifest.summary:
        return {"": manifest.summary}
    return {split: values for split, values in manifest.summary.items() if isinstance(values, Mapping) and values}


def _side_results(chain: Chain) -> list[dict[str, Any]]:
    results = []
    for side in side_results(chain):
        figures = _scores(chain.store, side.entry.ref)
        results.append({**side.as_dict(), "figures": figures.get("", figures)})
    return results


def describe_result(context: RunContext) -> dict[str, Any]:
    """Return the result of a finished run: its evaluations, and the paths of samples and model below the root."""
    chain, config = context.chain, context.config
    evaluations = RunView(context).evaluations
    first = chain.find(max(evaluations, default=0), "judge", config.rewards[0].slot)
    export = _places(chain.find(config.run.epochs, "export"), context, PIPELINE)
    return {
        "run": context.run.name,
        "evaluations": {str(epoch): figures for epoch, figures in evaluations.items()},
        "warnings": [alert.text for alert in alerts(chain)],
        "images": _places(first, context, GRID),
        "texts": _places(first, context, TEXTS),
        "export": next(iter(export.values()), None),
    }


def _places(entry: LineageEntry | None, context: RunContext, name: str) -> dict[str, str]:
    """Return the paths, below the root, of an artifact's file or folder ``name`` by prompt list."""
    records = [] if entry is None else context.store.shards(entry.ref)
    return {
        split_of(record.shard): f"{layout.shard_folder(entry.ref, record.shard, record.digest)}/{name}"
        for record in records
        if entry is not None and any(file.name.split("/")[0] == name for file in record.files)
    }
