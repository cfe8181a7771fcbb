"""A stage is one file and one entry of the table: options, inputs and work together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowmill.storage.maintenance.verify import verify_store
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.runs.staleness import Freshness, status_of
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.stages import STAGES, StageSpec, names_of
from flowmill.tasks.stages.stage import Output, Shard, Stage
from tests.support.inside import Make, prepare, run_epoch, stage_rows, stage_run

BEST = Node(1, "best")


class BestStage(Stage):
    """The sample with the largest advantage of an epoch."""

    def options(self) -> Mapping[str, Any]:
        return {"count": 1}

    def upstream(self) -> tuple[Node, ...]:
        return (Node(self.epoch, "advantage"),)

    def shards(self) -> list[Shard]:
        return [Shard("best")]

    def run(self, shard: Shard, folder: Path) -> Output:
        rows = read_rows(self.context.store, self.inputs()[0]).to_pylist()
        best = max(rows, key=lambda row: row["advantage"])
        (folder / "best.json").write_text(json.dumps(best["sample_id"]))
        return Output(rows=1)


def test_a_new_stage_is_one_class_and_one_entry(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StageSpec(name="best", stage=f"{__name__}:BestStage", artifact="rewards", scope="epoch")
    monkeypatch.setitem(STAGES, "best", spec)
    assert names_of("epoch")[-1] == "best"
    context = prepare(make_config("run.epochs=1"))
    run_epoch(context, 1)
    assert status_of(context.chain, BEST).state is not Freshness.FRESH
    run = stage_run(context, "best", 1)
    run.execute()
    assert status_of(context.chain, BEST).state is Freshness.FRESH
    assert context.chain.require(*BEST).ref == run.ref
    advantages = stage_rows(context, 1, "advantage")
    first = max(advantages.to_pylist(), key=lambda row: row["advantage"])["sample_id"]
    (record,) = context.store.shards(run.ref)
    assert json.loads(context.store.files(run.ref, record).path("best.json").read_bytes()) == first
    assert verify_store(context.store, deep=True)["problems"] == []
    assert not stage_run(context, "best", 1).pending(), "a second time nothing is due"
