"""Makes every kind of artifact of a preset; ``python -m tools.chaos.fresh CONFIG ROOT`` in a process of its own."""

from __future__ import annotations

import json
import sys

from flowmill.configs.load import load_config
from flowmill.storage.maintenance.verify import list_artifacts
from flowmill.tasks.stages.stage_run import StageRun
from tests.support.inside import evaluate, make_stage, prepare, run_epoch

_SETTINGS = (
    "run.epochs=1",
    "evaluate.samples=2",
    "evaluate.images=2",
    "rollout.prompts_per_epoch=2",
    "rollout.groups_per_shard=1",
    "rollout.group_size=2",
    "execution.rollout_batch_size=2",
    "execution.micro_batch_size=2",
)


def made(config: str, root: str) -> dict[str, str]:
    """Train one epoch of a preset, evaluate and export it; return the digest of every shard that came of it."""
    context = prepare(load_config(config, [*_SETTINGS, f"store.root={root}"]))
    evaluate(context, 0)
    run_epoch(context, 1)
    evaluate(context, 1)
    StageRun(make_stage(context, "export", 1)).execute()
    store = context.store
    refs = [entry.ref for entry in context.run.entries()]
    digests = {f"{ref}/{record.shard}": record.digest for ref in refs for record in store.records(ref)}
    # A run whose policy writes the prompts has none to encode.
    assert {shard.rpartition("/")[0] for shard in digests} == {item["artifact"] for item in list_artifacts(store)}
    return digests


if __name__ == "__main__":
    sys.stdout.write(json.dumps(made(*sys.argv[1:])))
