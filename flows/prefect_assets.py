"""Opt-in: reports committed artifacts to Prefect as assets."""

from __future__ import annotations

import re

from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize
from prefect.cache_policies import NO_CACHE

from flowmill.storage.artifacts.records import Manifest
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.stage_run import StageRun


def report_asset(run: StageRun, manifest: Manifest) -> None:
    """Report the artifact of a stage to Prefect."""
    stage, context = run.stage, run.stage.context
    key = _key(run, stage.node)
    description = f"{stage.name} of run {context.run.name}, in {context.store.root.uri}"
    properties = AssetProperties(
        name=f"{context.run.name} {manifest.kind} {stage.slot}".strip(), description=description
    )

    @materialize(
        Asset(key=key, properties=properties),
        asset_deps=[_key(run, node) for node in stage.upstream()],
        name=f"asset {stage.node}",
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def committed() -> None:
        figures = {"artifact": str(run.ref), "epoch": stage.epoch, "rows": manifest.rows, "bytes": manifest.size}
        add_asset_metadata(key, {**figures, "digest": manifest.digest, "inputs": list(manifest.inputs)})

    committed()


def _key(run: StageRun, node: Node) -> str:
    """Return the asset key of a stage's artifact; all epochs share it, and each materializes it again."""
    identity = run.stage.context.chain.identity(node)
    parts = [run.stage.context.run.name, identity.spec.artifact, *([node.slot] if node.slot else [])]
    return "flowmill://" + "/".join(re.sub("[^A-Za-z0-9_.-]+", "-", part) for part in parts)
