"""The program each torchrun rank runs: its share of one stage of one epoch.

``torchrun ... -m tasks.worker CONFIG.json STAGE EPOCH SLOT ARTIFACT``
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from configs.load import parse_config
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.lineage import RunFolder
from tasks.launch import die_with_parent
from tasks.ranks import Ranks, torchrun_ranks
from tasks.runs import run_name
from tasks.stage import Shard, Stage, StageRun
from tasks.stages import DECODING, make_stage
from tasks.workspace import Workspace

#: Lines that start with this carry one JSON object for the parent.
PREFIX = "@flowmill "


class LineReporter:
    """Sends progress to the parent process, one JSON line each."""

    def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
        """Send progress."""
        _send({"progress": [stage, epoch, done, total, detail]})

    def message(self, text: str) -> None:
        """Send a message."""
        _send({"message": text})


def run_share(stage: Stage, ranks: Ranks) -> None:
    """Run this rank's share of a stage's pending shards; rank 0 commits what all ranks made together."""
    run = StageRun(stage)
    if not stage.collective:
        for shard in deal(ranks, run.pending):
            run.run_shard(shard)
            _send({"committed": shard.name})
        return
    stage.ranks = ranks
    for shard in listed(ranks, run.pending):
        if ranks.first:
            run.run_shard(shard)
            _send({"committed": shard.name})
        else:
            with run.store.root.staging() as folder:
                stage.run(shard, folder)
        ranks.barrier()


def deal(ranks: Ranks, pending: Callable[[], Sequence[Shard]]) -> Iterator[Shard]:
    """Yield the shards this rank takes: whoever is free takes the next, so a slow rank idles nobody."""
    shards = listed(ranks, pending)
    while (number := _board().add("flowmill/next", 1) - 1) < len(shards):
        yield shards[number]


def listed(ranks: Ranks, pending: Callable[[], Sequence[Shard]]) -> list[Shard]:
    """Return rank 0's list of pending shards on every rank.

    A rank that lists later would miss what others have committed by then, and the ranks would work on different lists.
    """
    if ranks.first:
        _board().set("flowmill/shards", json.dumps([astuple(shard) for shard in pending()]))
    return [Shard(*shard) for shard in json.loads(_board().get("flowmill/shards"))]


def _board() -> Any:
    """Return the key-value store through which the ranks of this process group have met."""
    return dist.distributed_c10d._get_default_store()


@record
def main() -> None:
    """Join the other ranks and run the share."""
    die_with_parent()
    config_path, name, epoch, slot, artifact = sys.argv[1:]
    config = parse_config(json.loads(Path(config_path).read_text()), where=config_path)
    store = ArtifactStore(config.store)
    first = os.environ.get("RANK", "0") == "0"
    run, reporter = RunFolder(store, run_name(config)), LineReporter() if first else None
    workspace = Workspace(store, config, run, reporter=reporter, epoch=int(epoch))
    workspace.decodes = name in DECODING
    workspace.use_threads()
    with torchrun_ranks() as ranks:
        stage = make_stage(workspace, name, int(epoch), slot)
        stage.adopt(ArtifactRef.parse(artifact))
        run_share(stage, ranks)
        ranks.barrier()


def _send(data: dict[str, object]) -> None:
    sys.stdout.write(PREFIX + json.dumps(data) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
