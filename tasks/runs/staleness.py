"""Fresh, stale and missing stages of a run, with causes, root causes first. Reads only records and manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flowmill.configs.fingerprint import canonical_json
from flowmill.configs.load import flatten
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.specs.graph import OF, Node
from flowmill.tasks.specs.identity import StageIdentity
from flowmill.tasks.specs.input_hashes import CONTENTS
from flowmill.tasks.specs.stages import STAGES
from flowmill.tasks.specs.turns import split_turn


class Freshness(Enum):
    """State of an artifact of the run."""

    FRESH = "fresh"
    """Committed, with the current settings and inputs."""
    STALE = "stale"
    """The committed artifact was computed with other settings or inputs."""
    MISSING = "missing"
    """Not computed yet."""

    @property
    def meaning(self) -> str:
        """The state in words."""
        words = {"fresh": "up to date", "stale": "made with other settings or inputs", "missing": "not made yet"}
        return words[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason why an artifact does not count."""

    text: str
    """The change, such as ``rollout.steps 8 -> 10``."""
    upstream: Node | None = None
    """For a changed input: the stage that computed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """One stage of the run."""

    node: Node
    state: Freshness
    artifact: str
    """``kind/id`` of the current or expected artifact."""
    causes: tuple[Cause, ...] = ()
    """Reasons why it is stale."""
    reusable: bool = False
    """Committed in the store by another run, so it will not be computed."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        place = {"epoch": self.node.epoch, "stage": self.node.stage, "slot": self.node.slot}
        state = {"state": self.state.value, "artifact": self.artifact, "reusable": self.reusable}
        return {**place, **state, "causes": [cause.text for cause in self.causes]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An artifact that the run computed but that is not part of it."""

    entry: LineageEntry
    label: str
    """The reason why it is a side result."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        entry = self.entry
        place = {"epoch": entry.epoch, "stage": entry.stage, "slot": entry.slot}
        return {**place, "artifact": entry.artifact, "forced": entry.forced, "label": self.label}


def statuses(chain: Chain) -> list[StageStatus]:
    """Return the status of every stage of the run, in the order of the work."""
    return [status_of(chain, node) for node in chain.nodes()]


def is_complete(chain: Chain) -> bool:
    """Return whether every stage of the run is fresh."""
    return all(status_of(chain, node).state is Freshness.FRESH for node in chain.nodes())


def status_of(chain: Chain, node: Node) -> StageStatus:
    """Return the status of one stage."""
    ref, store = chain.ref(node), chain.store
    grows = ref.kind == "embeddings"
    if chain.find(*node) is not None and (grows or store.manifest(ref) is not None):
        return StageStatus(node=node, state=Freshness.FRESH, artifact=str(ref))
    entries = chain.run.entries_of(*node)
    reusable = not grows and store.manifest(ref) is not None
    if not entries:
        return StageStatus(node=node, state=Freshness.MISSING, artifact=str(ref), reusable=reusable)
    causes = tuple(_causes(chain, chain.identity(node), entries[-1]))
    return StageStatus(node=node, state=Freshness.STALE, artifact=str(ref), causes=causes, reusable=reusable)


def still_read(chain: Chain) -> set[str]:
    """Return the artifacts, ``kind/id``, that the missing and stale stages of a run read when it continues."""
    unfinished = (node for node in chain.nodes() if status_of(chain, node).state is not Freshness.FRESH)
    return {str(chain.ref(each)) for node in unfinished for each in chain.identity(node).upstream()}


def unfinished(chain: Chain) -> set[str]:
    """Return the artifacts, ``kind/id``, that the missing and stale stages of a run make when it continues."""
    return {status.artifact for status in statuses(chain) if status.state is not Freshness.FRESH}


def due(chain: Chain, node: Node) -> list[StageStatus]:
    """Return stale dependents of a stage, direct or indirect."""
    behind, outdated = {node}, []
    for each in chain.nodes():
        if each != node and behind.intersection(chain.identity(each).upstream()):
            behind.add(each)
            current = status_of(chain, each)
            if current.state is not Freshness.FRESH:
                outdated.append(current)
    return outdated


def explain(chain: Chain, node: Node) -> list[str]:
    """Return the reasons for a stage's state, one per line, root causes first."""
    current = status_of(chain, node)
    if current.state is Freshness.FRESH:
        return [f"{node} is fresh: {current.artifact} was made with the run's settings from its recorded inputs."]
    if current.state is Freshness.MISSING:
        source = "; another run made it, so nothing is to be computed" if current.reusable else ""
        return [f"{node} is missing: the run has not made it yet{source}."]
    roots = list(dict.fromkeys(_roots(chain, current)))
    return [*(f"root cause: {root}" for root in roots), *(f"{node} is stale: {cause.text}" for cause in current.causes)]


def side_results(chain: Chain) -> list[Side]:
    """Return side results of the run's lineage, each with its label."""
    nodes, results = set(chain.nodes()), []
    run = chain.run
    for entry in run.entries():
        node = Node(*entry.key)
        label = _label(chain, node, entry, scheduled=node in nodes)
        if label is None:
            continue
        newest = run.entries_of(*node)[-1]
        if not (node in nodes and entry == newest and status_of(chain, node).state is Freshness.STALE):
            results.append(Side(entry=entry, label=label))
    return results


def _roots(chain: Chain, current: StageStatus) -> Iterator[str]:
    waiting, seen = [current], {current.node}
    while waiting:
        at = waiting.pop()
        for cause in at.causes:
            if cause.upstream is None:
                yield f"{at.node}: {cause.text}"
                continue
            above = status_of(chain, cause.upstream)
            if above.state is Freshness.STALE and cause.upstream not in seen:
                seen.add(cause.upstream)
                waiting.append(above)
            elif above.state is not Freshness.STALE:
                yield f"{cause.upstream}: {_remade(chain, above)}"


def _remade(chain: Chain, above: StageStatus) -> str:
    """Return why a fresh or missing stage differs from the one that its dependents read."""
    if above.state is Freshness.MISSING:
        return "missing"
    entry = chain.find(*above.node)
    if entry is not None and entry.forced:
        return "made again with --force, and came out different"
    return f"made again since, as {above.artifact}"


def _causes(chain: Chain, identity: StageIdentity, entry: LineageEntry) -> Iterator[Cause]:
    """Yield differences between a committed artifact and the one the stage would make now."""
    if identity.spec.grows:
        # A cache has no manifest with details.
        above = [node for node in identity.upstream() if status_of(chain, node).state is Freshness.STALE]
        yield from (Cause(text=f"input {node} changed", upstream=node) for node in above)
        yield from () if above else (Cause(text="the encoder's settings changed"),)
        return
    manifest = chain.store.manifest(entry.ref)
    if manifest is None:
        yield Cause(text=f"{entry.artifact} is not complete any more; its files were damaged or removed")
        return
    if manifest.stage_version != identity.spec.version:
        yield Cause(text=f"stage version {manifest.stage_version} -> {identity.spec.version}")
    now = identity.counted([chain.ref(node) for node in identity.upstream()])
    changed = _changed(_without_contents(manifest.options), _without_contents(now))
    others = [node for node in identity.upstream() if str(chain.ref(node)) not in manifest.inputs]
    # Unrecorded contents are the cause only if there is no other.
    unknown = CONTENTS not in manifest.options and not changed and not others
    contents = _other_contents(identity, manifest.options, now, unknown=unknown)
    yield from (Cause(text=text) for text in [*changed, *contents])
    for node in others:
        yield Cause(text=f"input {node} changed", upstream=node)


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, now = flatten(old), flatten(json.loads(canonical_json(new)))
    keys = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in keys]


def _without_contents(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != CONTENTS}


def _other_contents(
    identity: StageIdentity, old: Mapping[str, Any], new: Mapping[str, Any], *, unknown: bool
) -> list[str]:
    """Return the files and folders named by options whose contents changed, one sentence each; not for new paths."""
    before, now = old.get(CONTENTS, {}), new.get(CONTENTS, {})
    places = [place for place in identity.places() if place.path in now]
    if unknown:
        causes = [f"{place} changed since, and its contents were not recorded" for place in places]
    else:
        other = (place for place in places if before.get(place.path, now[place.path]) != now[place.path])
        causes = [f"{place} has other contents" for place in other]
    return list(dict.fromkeys(causes))


def _label(chain: Chain, node: Node, entry: LineageEntry, *, scheduled: bool) -> str | None:
    """Return the reason why an entry is a side result, None if it is part of the run."""
    if node.stage not in STAGES:
        return f"stage '{node.stage}' no longer exists"
    slot, _ = split_turn(node.slot)
    name = slot.partition(OF)[2] if node.stage == "judge" else slot
    if name and STAGES[node.stage].scope == "evaluation":
        return f"evaluation '{name}'"
    if not chain.has(node):
        return f"reward '{node.slot}' is not in the run's config"
    if not scheduled:
        epochs = chain.config.run.epochs
        return f"beyond run.epochs {epochs}" if node.epoch > epochs else "not scheduled by the run's config"
    ref = chain.ref(node)
    if entry.ref.fingerprint != ref.fingerprint:
        return "; ".join(cause.text for cause in _causes(chain, chain.identity(node), entry)) or "other settings"
    attempts = [each for each in chain.run.entries_of(*node) if each.ref.fingerprint == ref.fingerprint]
    if entry.ref == ref:
        return None
    return (
        f"attempt {entry.ref.number}, equal to {ref}"
        if entry == attempts[-1]
        else f"attempt {entry.ref.number}, redone"
    )
