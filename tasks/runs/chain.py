"""The artifacts that make up a run: derived from its config, never "the last one written".

Every stage of every epoch has one expected artifact: the fingerprint of its options under the config and of the
expected artifacts upstream. A lineage record counts only if it names that artifact; every other record is a side
result. Attempts at the same work with equal rows count as one artifact, the first of them. So a forced repetition with
an equal result makes no dependent stage stale.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from configs.errors import NotCommittedError
from configs.escaping import command
from configs.fingerprint import fingerprint
from storage.artifacts.lineage import LineageEntry
from storage.artifacts.records import same_content
from storage.layout import ArtifactRef
from tasks.specs.graph import OF, RENDERER, Node, policy_after
from tasks.specs.identity import StageIdentity, identity_of
from tasks.specs.run_inputs import RunInputs
from tasks.specs.stages import STAGES
from tasks.specs.turns import has_turn, split_turn


class Chain:
    """The artifacts of one run under one config."""

    def __init__(self, facts: RunInputs, *, run: Chain | None = None, epoch: int = 0) -> None:
        """Bind to a run and a config.

        Args:
            facts: run and config.
            run: the chain of the run's own config, if ``facts`` have another config for one stage. That stage reads
                all artifacts of other epochs from this chain, and those of its own epoch that were not made with the
                other config.
            epoch: the epoch of that stage.
        """
        self._facts = facts
        self.config, self.plan, self.store, self.run = facts.config, facts.plan, facts.store, facts.run
        self.own = run
        """The chain of the run's own config, if this chain has another config."""
        self._epoch = epoch
        self._refs: dict[Node, ArtifactRef] = {}
        # The basis of each derivation, see ``_basis``.
        self._bases: dict[Node, tuple[int, tuple[Node, ...]]] = {}
        self._lock = threading.RLock()

    def nodes(self) -> Iterator[Node]:
        """Yield every stage of the run, each after its inputs."""
        return self.plan.nodes()

    def ref(self, node: Node) -> ArtifactRef:
        """Return the artifact a stage is expected to make, or has made."""
        with self._lock:
            waiting = [] if self._is_settled(node) else [node]
            while waiting:
                # No recursion: with a thousand epochs the chain is thousands of stages deep.
                missing = [each for each in self._upstream(waiting[-1]) if each not in self._refs]
                if missing:
                    waiting += missing
                else:
                    found = waiting.pop()
                    self._bases[found] = self._basis(found)
                    self._refs[found] = self._settle(found)
            return self._refs[node]

    def target(self, node: Node) -> ArtifactRef:
        """Return the artifact a stage makes with this config, even if the run has another one in its place."""
        identity = self.identity(node)
        return self._canonical(node, identity.work([self.ref(each) for each in identity.upstream()]))

    def made_of(self, node: Node, inputs: Sequence[ArtifactRef]) -> ArtifactRef:
        """Return the artifact a stage makes from given inputs, which may differ from those of the chain."""
        return self._canonical(node, self.identity(node).work(inputs))

    def find(self, epoch: int, stage: str, slot: str = "") -> LineageEntry | None:
        """Return the record of a stage if it has run and counts, else None."""
        node = Node(epoch, stage, slot)
        if not self.has(node):
            return None
        ref = self.ref(node)
        made = self._made(node, ref)
        if made:
            # An equal attempt is the same artifact with another name.
            return LineageEntry(epoch=epoch, stage=stage, slot=slot, artifact=str(ref), forced=made[-1].forced)
        return None

    def require(self, epoch: int, stage: str, slot: str = "") -> LineageEntry:
        """Return the record of a stage that must have run.

        Raises:
            NotCommittedError: it has not.
        """
        found = self.find(epoch, stage, slot)
        if found is None:
            label, last = f"{stage} of '{slot}'" if slot else stage, self.config.run.epochs
            # A stage of the next epoch makes a run longer.
            if epoch > last + (STAGES[stage].scope == "epoch"):
                more = command("flowmill", "run", "CONFIG", "--name", self.run.name, "--set", f"run.epochs={epoch}")
                raise NotCommittedError(
                    f"Run '{self.run.name}' has no {label} for epoch {epoch}: it has epochs 0 to {last}. Name one of "
                    f"them, or train it further: {more}"
                )
            how = command("flowmill", "stage", stage, "--run", self.run.name, *(["--epoch", epoch] if epoch else []))
            state = " with these settings" if self.run.made(epoch, stage, slot) else ""
            raise NotCommittedError(
                f"Run '{self.run.name}' has no {label} for epoch {epoch}{state} yet. Run '{how}' first."
            )
        return found

    def entries(self) -> list[LineageEntry]:
        """Return the records that count, in the order of the work."""
        found = (self.find(*node) for node in self.nodes())
        return [entry for entry in found if entry is not None]

    def digest(self) -> str:
        """Return one hash of the content of all committed artifacts of the run, without times or hosts."""
        parts: list[list[int | str]] = []
        for entry in sorted(self.entries(), key=lambda entry: entry.key):
            if entry.ref.kind == "embeddings":
                # The cache serves many runs; the prompts artifact hashes the entries that this run uses.
                continue
            manifest = self.store.manifest(entry.ref)
            # Shard boundaries are not part of the content.
            content = "incomplete" if manifest is None else manifest.content or manifest.digest
            parts.append([*entry.key, content])
        return fingerprint(parts)

    def note(self, node: Node, made: ArtifactRef) -> None:
        """Record the artifact a stage made; if it is not the expected one, derive its dependents again."""
        with self._lock:
            # If this one is not derived yet, its dependents are not derived either.
            if self._refs.get(node, made) != made or STAGES[node.stage].directs:
                self._refs.clear()

    def identity(self, node: Node) -> StageIdentity:
        """Return a stage under this config, with its options and inputs.

        Raises:
            ConfigError: there is no such stage, or it does not exist for this epoch or slot.
        """
        return identity_of(self._facts, node, lambda other: self.find(*other))

    def has(self, node: Node) -> bool:
        """Return whether the config includes a stage, for example the stage of a reward that it names."""
        config, (slot, turn) = self.config, split_turn(node.slot)
        reward = slot.partition(OF)[0]
        if not has_turn(config, node.slot):
            return False
        if STAGES[node.stage].renders or (node.stage, node.slot) == ("base", RENDERER):
            return config.render is not None
        if not self.plan.has(node.stage):
            return False
        if node.stage == "validate" or (node.stage == "ingest" and node.slot):
            return self.plan.has_losses
        if node.stage == "score":
            return slot in {section.slot for section in config.scored}
        if node.stage == "gradient":
            return self.plan.has_gradients and node.slot in {section.slot for section in config.rewards}
        if node.stage == "judge":
            judges = config.monitors if turn else config.evaluate.judges
            return reward in {section.slot for section in (*config.rewards, *judges)}
        return True

    def _is_settled(self, node: Node) -> bool:
        return node in self._refs and self._bases[node] == self._basis(node)

    def _basis(self, node: Node) -> tuple[int, tuple[Node, ...]]:
        """Return the number of a stage's records and its inputs; a change of either requires another derivation."""
        return len(self.run.made(*node)), self._upstream(node)

    def _upstream(self, node: Node) -> tuple[Node, ...]:
        return () if self._is_the_runs(node) else self.identity(node).upstream()

    def _is_the_runs(self, node: Node) -> bool:
        return self.own is not None and 0 < self._epoch != node.epoch > 0

    def _settle(self, node: Node) -> ArtifactRef:
        if self.own is not None and self._is_the_runs(node):
            return self.own.ref(node)
        identity = self.identity(node)
        inputs = [self._refs[each] for each in identity.upstream()]
        ref = self._canonical(node, identity.work(inputs))
        if self.own is None or self._made(node, ref):
            return ref
        return self._borrowed(self.own, node, inputs) or ref

    def _borrowed(self, own: Chain, node: Node, inputs: Sequence[ArtifactRef]) -> ArtifactRef | None:
        """Return the run's own artifact for a node if it is a policy, or made from the same inputs."""
        if node.epoch == 0 or not own.has(node):
            return None
        same = [own.ref(each) for each in own.identity(node).upstream()] == list(inputs)
        return own.ref(node) if same or node == policy_after(node.epoch) else None

    def _made(self, node: Node, ref: ArtifactRef) -> list[LineageEntry]:
        """Return the records of a stage that are attempts at the same work, oldest first."""
        return [entry for entry in self.run.made(*node) if entry.ref.fingerprint == ref.fingerprint]

    def _canonical(self, node: Node, plain: ArtifactRef) -> ArtifactRef:
        """Return the first attempt with the same content as the newest.

        An earlier attempt without its manifest may have the same content; only making it again shows that.
        """
        made = [entry.ref for entry in self._made(node, plain)]
        if not made or made[-1] == plain:
            return made[-1] if made else plain
        store = self.store
        newest = store.manifest(made[-1])
        for number in range(1, made[-1].number):
            attempt = plain.attempt(number)
            earlier = store.manifest(attempt)
            if newest is None or (earlier is None and attempt not in made):
                continue
            if earlier is None or same_content(earlier, newest):
                return attempt
        return made[-1]
