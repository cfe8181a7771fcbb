"""Addresses of artifacts for users: ``RUN/stage@epoch``, or ``kind/id`` as in the store."""

from __future__ import annotations

import re

from configs.errors import ConfigError
from storage.artifacts.commit import ArtifactStore
from storage.artifacts.lineage import RunFolder
from storage.layout import ArtifactRef
from storage.maintenance.verify import find_ref
from tasks.runs.opening import open_run
from tasks.specs.graph import TURN, Node
from tasks.specs.stages import stage_spec

_ADDRESS = re.compile(r"(?P<run>[^/]+)/(?P<stage>\w+)(\[(?P<slot>.+)\])?@(?P<epoch>\d+)")


def model_address(text: str) -> tuple[str, int | None]:
    """Return run and epoch of a model named ``RUN`` or ``RUN@EPOCH``; None means the last epoch.

    Raises:
        ConfigError: the text has neither form.
    """
    run, at, epoch = text.partition("@")
    if at and not (epoch.isascii() and epoch.isdecimal()):
        raise ConfigError(f"'{text}' is no address of a model: '{epoch}' is no epoch. Write RUN, or RUN@EPOCH.")
    return run, int(epoch) if at else None


def find_artifact(store: ArtifactStore, name: str) -> ArtifactRef:
    """Return an artifact by ``RUN/stage@epoch``, ``RUN/stage[slot]@epoch``, or ``kind/id``, which may be shortened.

    The default slot is that of the first reward.

    Raises:
        StoreError: there is no such run or artifact.
        ConfigError: the run has no such stage.
        NotCommittedError: the artifact is not committed yet.
    """
    found = _ADDRESS.fullmatch(name)
    if found is None or RunFolder(store, found["run"]).describe() is None:
        return find_ref(store, name)
    chain = open_run(store.root.uri, found["run"], reads=True).chain
    epoch, stage = int(found["epoch"]), found["stage"]
    node = Node(epoch, stage, found["slot"] or "")
    if not node.slot and stage_spec(stage).slotted:
        node = next((each for each in chain.nodes() if each[:2] == (epoch, stage) and TURN not in each.slot), node)
    chain.identity(node)
    return chain.require(*node).ref
