"""Stages to run again for damaged artifacts: those of the artifacts, and those of removed inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.quarantine import revive
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.stages import STAGES


def makers(
    store: ArtifactStore, damaged: Mapping[ArtifactRef, str], *, trusted: bool = False
) -> list[tuple[str, str, int]]:
    """Return the (run, stage, epoch) that regenerate damaged artifacts, in the order of each run.

    Removed inputs are regenerated too; their remains are set aside.

    Args:
        damaged: artifact -> the run to regenerate it for.
        trusted: see ``open_run``.
    """
    order = list(STAGES)
    stages: set[tuple[str, int, int]] = set()
    for run in sorted(set(damaged.values())):
        refs = {ref for ref, name in damaged.items() if name == run}
        nodes = {
            Node(*entry.key) for entry in RunFolder(store, run).entries() if entry.ref in refs and entry.stage in order
        }
        chain = open_run(store.root.uri, run, reads=True, trusted=trusted).chain
        stages |= {(run, node.epoch, order.index(node.stage)) for node in {*nodes, *_revived(chain, nodes)}}
    return [(run, order[number], epoch) for run, epoch, number in sorted(stages)]


def _revived(chain: Chain, nodes: Collection[Node]) -> Iterator[Node]:
    """Revive and yield the removed inputs of some stages, direct or indirect."""
    waiting, seen = [*nodes], set(nodes)
    while waiting:
        node = waiting.pop()
        if not chain.has(node):
            continue
        for each in chain.identity(node).upstream():
            ref = chain.ref(each)
            if each not in seen and chain.store.removed(ref):
                seen.add(each)
                waiting.append(each)
                revive(chain.store, ref)
                yield each
