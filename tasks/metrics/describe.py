"""A run as plain data: the output of ``flowmill status``, and the stored result of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage import layout
from storage.artifacts.commit import ArtifactStore
from storage.artifacts.lineage import LineageEntry
from storage.layout import ArtifactRef
from tasks.inputs.weight_sources import PIPELINE
from tasks.metrics.alerts import alerts
from tasks.metrics.evaluations import named_evaluations, named_figures, split_of
from tasks.metrics.image_grids import GRID
from tasks.metrics.speed import epoch_speeds
from tasks.metrics.texts import TEXTS
from tasks.metrics.view import RunView
from tasks.runs.staleness import State, side_results, standings
from tasks.runs.state import state_of

if TYPE_CHECKING:
    from tasks.runs.chain import Chain
    from tasks.runs.context import RunContext
    from tasks.specs.graph import Node

#: Series of a run's records for the results of a benchmark, with the benchmark's title.
BENCHMARK = "benchmark"


def describe_run(context: RunContext) -> dict[str, Any]:
    """Return config, figures, artifacts and state of a run."""
    view, chain, run = RunView(context), context.chain, context.run
    context.store.remember(map(chain.ref, chain.nodes()))
    finished, standing, rewards = max(view.trained, default=0), standings(chain), dict[str, dict[str, Any]]()
    for epoch, slot, summary in view.summaries("score"):
        rewards.setdefault(str(epoch), {})[slot] = summary
    return {
        "run": run.name,
        "root": run.store.root.uri,
        "state": state_of(context, complete=all(each.state is State.FRESH for each in standing)),
        "epochs": context.config.run.epochs,
        "finished_epochs": finished,
        "start": context.starts_from,
        "tracking": run.newest("tracking"),
        "benchmark": (run.newest(BENCHMARK) or {}).get("title"),
        "evaluations": {str(epoch): figures for epoch, figures in view.evaluations.items()},
        "named_evaluations": [
            {"epoch": epoch, "name": name, "figures": named_figures(chain, epoch, name)}
            for epoch, name in sorted(named_evaluations(chain))
        ],
        "losses": {str(epoch): summary for epoch, _, summary in view.summaries("validate")},
        "data": _given_counts(view),
        "rewards": rewards,
        "warnings": [alert.text for alert in alerts(chain)],
        "branches": [str(made["reason"]) for _, _, made in view.summaries("steer") if made["reason"]],
        "advantages": {str(epoch): summary for epoch, _, summary in view.summaries("advantage")},
        "speed": {"epoch": finished, "stages": epoch_speeds(chain, finished)} if finished else None,
        "artifacts": [
            {"epoch": e.epoch, "stage": e.stage, "slot": e.slot, "artifact": e.artifact, "forced": e.forced}
            for e in chain.entries()
        ],
        "stages": [each.as_dict() for each in standing],
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
class Made:
    """The result of a stage, computed or found committed."""

    node: Node
    """The stage."""
    artifact: str
    """``kind/id``."""
    means: Mapping[str, float]
    """Mean score by prompt list ('' where there are none); empty unless it holds rewards."""
    found: bool = False
    """Whether it was already committed and not computed again."""

    def __str__(self) -> str:
        means = [f"{split} mean {mean:.3f}".strip() for split, mean in self.means.items()]
        shown = [f"({', '.join(means)})"] if means else []
        return " ".join([str(self.node), self.artifact, *shown, *(["found, not computed again"] if self.found else [])])


def describe_made(context: RunContext, node: Node, ref: ArtifactRef, *, found: bool = False) -> Made:
    """Return the result of a stage, with the mean scores of rewards."""
    means = {split: values["mean"] for split, values in _scores(context.store, ref).items()}
    return Made(node, str(ref), means, found)


def _scores(store: ArtifactStore, ref: ArtifactRef) -> dict[str, Any]:
    """Return the figures of a rewards artifact by prompt list ('' where it has none); empty for other artifacts."""
    manifest = store.manifest(ref) if ref.kind == "rewards" else None
    if manifest is None:
        return {}
    if "mean" in manifest.summary:
        return {"": manifest.summary}
    return {split: values for split, values in manifest.summary.items() if isinstance(values, Mapping) and values}


def _side_results(chain: Chain) -> list[dict[str, Any]]:
    found = []
    for side in side_results(chain):
        figures = _scores(chain.store, side.entry.ref)
        found.append({**side.as_dict(), "figures": figures.get("", figures)})
    return found


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
