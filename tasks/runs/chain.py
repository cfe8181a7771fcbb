"""The artifacts that make up a run: derived from its config, never "the last one written".

Every stage of every epoch has one expected artifact: the fingerprint of its options under the config and of the
expected artifacts upstream. A lineage record counts only if it names that artifact; every other record is a side
result. A run's attempts at the same work with equal rows count as one artifact, the first of them. So a forced
repetition with an equal result makes no dependent stage stale.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from flowmill.configs.errors import NotCommittedError
from flowmill.configs.escaping import command
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.roots import root_option
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.storage.artifacts.records import same_content
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.specs.graph import OF, RENDERER, Node, policy_after
from flowmill.tasks.specs.identity import StageIdentity, identity_of
from flowmill.tasks.specs.run_inputs import RunInputs
from flowmill.tasks.specs.stages import STAGES
from flowmill.tasks.specs.turns import has_turn, split_turn


class Chain:
    """The artifacts of one run under one config."""

    def __init__(self, facts: RunInputs, *, run: Chain | None = None, epoch: int = 0) -> None:
        """Bind to a run and a config.

        Args:
            facts: run and config.
            run: the chain of the run's own config, if ``facts`` have another config for one stage. That stage reads
                all artifacts of other epochs from this chain, and those of its own epoch that do not result from the
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
        """Return the expected artifact of a stage, or its actual one."""
        with self._lock:
            waiting = [] if self._is_settled(node) else [node]
            while waiting:
                # No recursion: with a thousand epochs the chain is thousands of stages deep.
                missing = [each for each in self._upstream(waiting[-1]) if each not in self._refs]
                if missing:
                    waiting += missing
                else:
                    ready = waiting.pop()
                    self._bases[ready] = self._basis(ready)
                    self._refs[ready] = self._settle(ready)
            return self._refs[node]

    def target(self, node: Node) -> ArtifactRef:
        """Return the artifact a stage makes with this config, even if the run has another one in its place."""
        identity = self.identity(node)
        return self._canonical(node, identity.work([self.ref(each) for each in identity.upstream()]))

    def result_of(self, node: Node, inputs: Sequence[ArtifactRef]) -> ArtifactRef:
        """Return the artifact a stage computes from ``inputs``, which may differ from those of the chain."""
        return self._canonical(node, self.identity(node).work(inputs))

    def find(self, epoch: int, stage: str, slot: str = "") -> LineageEntry | None:
        """Return the record of a stage if it has run and counts, else None."""
        node = Node(epoch, stage, slot)
        if not self.has(node):
            return None
        ref = self.ref(node)
        attempts = self._attempts(node, ref)
        if attempts:
            # An equal attempt is the same artifact with another name.
            return LineageEntry(epoch=epoch, stage=stage, slot=slot, artifact=str(ref), forced=attempts[-1].forced)
        return None

    def require(self, epoch: int, stage: str, slot: str = "") -> LineageEntry:
        """Return the record of a stage that must have run."""
        entry = self.find(epoch, stage, slot)
        if entry is None:
            raise NotCommittedError(self._missing(epoch, stage, slot))
        return entry

    def trained(self) -> int:
        """Return the newest epoch whose training is done and counts; 0 if there is none.

        Epochs after the last one of the run's own config, which may have been rewound, do not count.
        """
        own = self.run.config()
        last = self.config.run.epochs if own is None else int(own["run"]["epochs"])
        trained = (entry.epoch for entry in self.run.entries() if entry.stage == "optimize")
        newest = max((epoch for epoch in trained if epoch <= last), default=0)
        return next((epoch for epoch in range(newest, 0, -1) if self.find(*policy_after(epoch))), 0)

    def _missing(self, epoch: int, stage: str, slot: str) -> str:
        """Return the message that a stage has not run, with the command that runs it or an epoch that has it."""
        name, done, root = self.run.name, self.trained(), root_option(self.store.root.uri)
        label = f"{stage} of '{slot}'" if slot else stage
        lacks = f"Run '{name}' has no {label} for epoch {epoch}"
        # A stage of an epoch reads the policy of the epoch before.
        if epoch > done + (STAGES[stage].scope == "epoch"):
            more = command("flowmill", "run", "CONFIG", "--name", name, "--set", f"run.epochs={epoch}", *root)
            reached = f"{done} of its {self.config.run.epochs} epochs are trained"
            others = f"Name an epoch up to {done}, or train" if done else "Train"
            return f"{lacks}: {reached}. {others} it further: {more}"
        how = command("flowmill", "stage", stage, "--run", name, *(["--epoch", epoch] if epoch else []), *root)
        state = " with these settings" if self.run.entries_of(epoch, stage, slot) else ""
        return f"{lacks}{state} yet. Run '{how}' first."

    def entries(self) -> list[LineageEntry]:
        """Return the records that count, in the order of the work."""
        entries = (self.find(*node) for node in self.nodes())
        return [entry for entry in entries if entry is not None]

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

    def note(self, node: Node, ref: ArtifactRef) -> None:
        """Record the artifact of a stage; if it is not the expected one, derive its dependents again."""
        with self._lock:
            # If this one is not derived yet, its dependents are not derived either.
            if self._refs.get(node, ref) != ref:
                self._refs.clear()

    def identity(self, node: Node) -> StageIdentity:
        """Return a stage under this config, with its options and inputs."""
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
        return len(self.run.entries_of(*node)), self._upstream(node)

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
        if self.own is None or self._attempts(node, ref):
            return ref
        return self._borrowed(self.own, node, inputs) or ref

    def _borrowed(self, own: Chain, node: Node, inputs: Sequence[ArtifactRef]) -> ArtifactRef | None:
        """Return the run's own artifact for a node if it is a policy, or has the same inputs."""
        if node.epoch == 0 or not own.has(node):
            return None
        same = [own.ref(each) for each in own.identity(node).upstream()] == list(inputs)
        return own.ref(node) if same or node == policy_after(node.epoch) else None

    def _attempts(self, node: Node, ref: ArtifactRef) -> list[LineageEntry]:
        """Return the records of a stage that are attempts at the same work, oldest first."""
        return [entry for entry in self.run.entries_of(*node) if entry.ref.fingerprint == ref.fingerprint]

    def _canonical(self, node: Node, plain: ArtifactRef) -> ArtifactRef:
        """Return the run's first attempt with the same content as its newest.

        Attempts that only other runs have do not count: which of them are complete depends on their progress, and
        artifacts that this run computed from its own would no longer belong to it. An earlier attempt without its
        manifest may have the same content; only making it again shows that.
        """
        attempts = [entry.ref for entry in self._attempts(node, plain)]
        if not attempts or attempts[-1] == plain:
            return attempts[-1] if attempts else plain
        newest = self.store.manifest(attempts[-1])
        for attempt in sorted(attempts, key=lambda each: each.number):
            if newest is None or attempt.number >= attempts[-1].number:
                break
            earlier = self.store.manifest(attempt)
            if earlier is None or same_content(earlier, newest):
                return attempt
        return attempts[-1]
