"""Explains one sample: its origin, its rewards, the optimizer updates that used it, and its decoded states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowmill.configs.errors import StoreError, TrustError
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.inputs.components import open_trajectory_store
from flowmill.tasks.inputs.store_trust import check_trusted
from flowmill.tasks.metrics.samples import arrays_of, stored_as
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runtime.host import ModelHost
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.turns import turns_of
from flowmill.tasks.training.data import TrainingData


def trace_sample(
    store: ArtifactStore, ref: ArtifactRef, sample_id: str, runs: Sequence[RunContext], *, trusted: bool = False
) -> dict[str, Any]:
    """Return a sample's columns and, for each run that uses it, its rewards, advantage and updates.

    Args:
        ref: a trajectories artifact.
        runs: runs whose lineage names the artifact.
        trusted: allow importing a custom algorithm that only the store names: the algorithm decides which rows of a
            sample enter which update.
    """
    if ref.kind != "trajectories":
        raise StoreError(f"{ref} holds no samples; only trajectories do. 'flowmill store ls' lists them.")
    for run in [] if trusted else runs:
        check_trusted(run.config, run.config, run=run.run.name, only=("optimize.algorithm",))
    opener = open_trajectory_store(_stored_as(store, ref, runs))
    for record in store.shards(ref):
        shard = opener.open(store.files(ref, record))
        row = pc.index(shard.table.column("sample_id"), sample_id).as_py()
        if row >= 0:
            selected, text = shard.table.slice(row, 1), shard.text(row)
            written = {} if text is None else {"text": text}
            sample = {**selected.drop_columns(["arrays"]).to_pylist()[0], **written}
            sample["arrays"] = selected.column("arrays").to_pylist()[0]
            used = {run.run.name: _uses(run, ref, sample_id) for run in runs}
            return {"artifact": str(ref), "shard": record.shard, "sample": sample, "runs": used}
    raise StoreError(f"{ref} has no sample '{sample_id}'.")


def _stored_as(store: ArtifactStore, ref: ArtifactRef, runs: Sequence[RunContext]) -> str:
    """Return the trajectory store of an artifact's samples; a custom class only if one of the runs names it too."""
    name = stored_as(store.require(ref).options)
    if ":" in name and name not in {run.config.rollout.store for run in runs}:
        raise TrustError(
            f"{ref} names '{name}' as the reader of its samples, but no run it belongs to does: not imported."
        )
    return name


def _uses(context: RunContext, ref: ArtifactRef, sample_id: str) -> dict[str, Any]:
    entries = context.chain.entries()
    epoch = next((entry.epoch for entry in entries if entry.ref == ref), None)
    if epoch is None:
        return {"note": "a side result of this run: nothing was trained on it"}
    if context.plan.has_data:
        rating = _row(read_rows(context.store, ref, "rewards"), sample_id) or {}
        fields = {"rating": rating.get("reward"), "row": rating.get("note")}
        return {"given": fields, "updates": _updates(context, entries, epoch, sample_id)}
    row = _row(RunView(context).scores(epoch), sample_id) or {}
    start = {} if context.starts_from is None else {"start": context.starts_from}
    scores = {
        section.slot: {name: row[f"{name}.{section.slot}"] for name in ("reward", "note")}
        for section in context.config.scored
        if f"reward.{section.slot}" in row
    }
    turns: dict[str, Any] = {}
    if turns_of(context.config) is not None:
        table = RunView(context).turns(epoch)
        turns["turns"] = table.filter(pc.equal(table["sample_id"], sample_id)).drop_columns("sample_id").to_pylist()
    of_epoch = {entry.slot: entry for entry in entries if entry.epoch == epoch and entry.stage == "gradient"}
    gradients = {slot: _row(read_rows(context.store, entry.ref), sample_id) for slot, entry in of_epoch.items()}
    followed = {slot: {"value": each["value"], "rms": each["rms"]} for slot, each in gradients.items() if each}
    return {
        "epoch": epoch,
        **start,
        **turns,
        "rewards": scores,
        **({"gradients": followed} if followed else {}),
        "advantage": row.get("advantage"),
        "updates": _updates(context, entries, epoch, sample_id),
    }


def _updates(context: RunContext, entries: Sequence[LineageEntry], epoch: int, sample_id: str) -> list[dict[str, Any]]:
    """Return the updates that used a sample: in its own epoch and those that replayed it; of ``data``, in any."""
    replay = context.config.optimize.replay
    reach = context.config.run.epochs if context.plan.has_data else epoch + (replay.epochs if replay else 0)
    updates = []
    for entry in entries:
        if entry.stage != "optimize" or not epoch <= entry.epoch <= reach:
            continue
        metrics = context.store.require(entry.ref).summary["updates"]
        inputs = [context.chain.require(*node).ref for node in context.chain.identity(Node(*entry.key)).upstream()]
        data = TrainingData(context, context.plan.modality, entry.epoch, inputs)
        for number in data.updates_of(sample_id):
            if number < len(metrics):  # the others are left out
                update = int(metrics[number]["update"])
                updates.append({"epoch": entry.epoch, "update": update, "policy": entry.artifact})
    return updates


def _row(table: pa.Table, sample_id: str) -> dict[str, Any] | None:
    rows = table.filter(pc.equal(table.column("sample_id"), sample_id)).to_pylist()
    return dict(rows[0]) if rows else None


class States:
    """Shows the intermediate states of samples: stored latents, decoded by the base model's decoder."""

    def __init__(self, context: RunContext) -> None:
        """Load the decoder.

        Args:
            context: the run; not a read-only one, as its record may name code.
        """
        self._store = context.store
        self._decode: Callable[[np.ndarray], np.ndarray] = context.plan.modality.decoder(
            context.config, ModelHost(context)
        )

    def of(self, ref: ArtifactRef, sample: str) -> np.ndarray:
        """Return the decoded image of every stored state of a sample, (N, H, W, 3) or (N, F, H, W, 3) uint8."""
        return self._decode(arrays_of(self._store, ref, "latents", [sample])[sample])
