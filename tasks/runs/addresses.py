"""Addresses of artifacts for users: ``RUN/stage@epoch``, or ``kind/id`` as in the store."""

from __future__ import annotations

import re
from typing import Literal

from flowmill.configs.errors import ConfigError
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.verify import find_ref
from flowmill.tasks.runs.opening import open_run
from flowmill.tasks.specs.graph import TURN, Node
from flowmill.tasks.specs.stages import stage_spec

#: Instead of an epoch: the one with the best held-out score.
BEST: Literal["best"] = "best"
_ADDRESS = re.compile(r"(?P<run>[^/]+)/(?P<stage>\w+)(\[(?P<slot>.+)\])?@(?P<epoch>\d+)")


def model_address(text: str) -> tuple[str, int | Literal["best"] | None]:
    """Return run and epoch of a model named ``RUN``, ``RUN@EPOCH`` or ``RUN@best``; None means the last epoch."""
    run, at, epoch = text.partition("@")
    if epoch == BEST:
        return run, BEST
    if at and not (epoch.isascii() and epoch.isdecimal()):
        raise ConfigError(
            f"'{text}' is no address of a model: '{epoch}' is no epoch. Write RUN, RUN@EPOCH, or RUN@best."
        )
    return run, int(epoch) if at else None


def find_artifact(store: ArtifactStore, name: str, *, trusted: bool = False) -> ArtifactRef:
    """Return an artifact by ``RUN/stage@epoch``, ``RUN/stage[slot]@epoch``, or ``kind/id``, which may be shortened.

    The default slot is that of the first reward. ``trusted``: see ``open_run``.
    """
    match = _ADDRESS.fullmatch(name)
    if match is None or RunFolder(store, match["run"]).describe() is None:
        return find_ref(store, name)
    chain = open_run(store.root.uri, match["run"], reads=True, trusted=trusted).chain
    epoch, stage = int(match["epoch"]), match["stage"]
    node = Node(epoch, stage, match["slot"] or "")
    if not node.slot and stage_spec(stage).slotted:
        node = next((each for each in chain.nodes() if each[:2] == (epoch, stage) and TURN not in each.slot), node)
    chain.identity(node)
    return chain.require(*node).ref
