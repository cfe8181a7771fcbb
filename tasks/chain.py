"""Which artifacts make up a run: derived from its config, never "the last one written".

Every stage of every epoch has one expected artifact: the fingerprint of its options under the config and of the
expected artifacts upstream. A lineage record counts only if it is of that artifact; every other record is a side
result. Attempts at the same work that came out equal, byte for byte, are one: the first of them stands for all, so a
forced repetition that changes nothing makes nothing due.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from configs.errors import NotCommittedError
from configs.fingerprint import fingerprint
from storage.layout import ArtifactRef
from storage.lineage import LineageEntry

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from tasks.context import RunContext
    from tasks.stage import Stage

#: Between the reward and the evaluation in the slot of a judge: ``digits@drawbench``.
OF = "@"


class Node(NamedTuple):
    """A stage of an epoch."""

    epoch: int
    stage: str
    slot: str = ""

    def __str__(self) -> str:
        slot = f"[{self.slot}]" if self.slot else ""
        return f"{self.stage}{slot}@{self.epoch}"


def policy_after(epoch: int) -> Node:
    """Return what makes the policy after an epoch; epoch 0 is the base policy."""
    return Node(epoch, "optimize" if epoch else "policy")


def policy_of(config: RunConfig, epoch: int) -> Node:
    """Return what makes the policy that an epoch is rolled out with: the one before, with ``execution.ahead`` older."""
    return policy_after(max(0, epoch - 1 - config.execution.ahead))


def rolled_out_by(config: RunConfig, epoch: int) -> range:
    """Return the epochs that can be rolled out when one begins: it, and with ``execution.ahead`` some after it."""
    return range(epoch, min(epoch + config.execution.ahead, config.run.epochs) + 1)


class Chain:
    """The artifacts of one run under one config."""

    def __init__(self, context: RunContext, *, run: Chain | None = None, epoch: int = 0) -> None:
        """Bind to a context.

        Args:
            context: run and config.
            run: the chain of the run's own config, where ``context`` has another for one stage alone. That one reads
                from it what the other settings do not touch: everything of other epochs, and of the same epoch what
                has not been made with them.
            epoch: the epoch of that stage.
        """
        self.context = context
        self.own = run
        """The chain of the run's own config, where this is another."""
        self._epoch = epoch
        self._refs: dict[Node, ArtifactRef] = {}
        # What each was derived from, see ``_basis``.
        self._bases: dict[Node, tuple[int, tuple[Node, ...]]] = {}
        self._lock = threading.RLock()

    def nodes(self) -> Iterator[Node]:
        """Yield every stage the run consists of, each after those it reads."""
        return run_nodes(self.context.config)

    def ref(self, node: Node) -> ArtifactRef:
        """Return the artifact a stage is expected to make, or has made."""
        with self._lock:
            waiting = [] if self._is_settled(node) else [node]
            while waiting:
                # Not by recursion: a thousand epochs are thousands of stages deep.
                missing = [each for each in self._upstream(waiting[-1]) if each not in self._refs]
                if missing:
                    waiting += missing
                else:
                    found = waiting.pop()
                    self._bases[found] = self._basis(found)
                    self._refs[found] = self._settle(found)
            return self._refs[node]

    def target(self, stage: Stage) -> ArtifactRef:
        """Return the artifact a stage makes with its own settings, whatever the run has in its place."""
        return self._canonical(stage.node, stage.work([self.ref(each) for each in stage.upstream()]))

    def find(self, epoch: int, stage: str, slot: str = "") -> LineageEntry | None:
        """Return the record of a stage if it has run and counts, else None."""
        node = Node(epoch, stage, slot)
        if not self.has(node):
            return None
        ref = self.ref(node)
        made = self._made(node, ref)
        if made:
            # An equal attempt is the same artifact under another name.
            return LineageEntry(epoch=epoch, stage=stage, slot=slot, artifact=str(ref), forced=made[-1].forced)
        return None

    def require(self, epoch: int, stage: str, slot: str = "") -> LineageEntry:
        """Return the record of a stage that must have run.

        Raises:
            NotCommittedError: it has not.
        """
        found = self.find(epoch, stage, slot)
        if found is None:
            label = f"{stage} of '{slot}'" if slot else stage
            option = "" if epoch == 0 else f" --epoch {epoch}"
            state = " with these settings" if self.context.run.made(epoch, stage, slot) else ""
            raise NotCommittedError(
                f"Run '{self.context.run.name}' has no {label} for epoch {epoch}{state} yet. "
                f"Run 'flowmill stage {stage} --run {self.context.run.name}{option}' first."
            )
        return found

    def entries(self) -> list[LineageEntry]:
        """Return the records that count, in the order of the work."""
        found = (self.find(*node) for node in self.nodes())
        return [entry for entry in found if entry is not None]

    def digest(self) -> str:
        """Return one hash over the content of all committed artifacts of the run, without times or hosts."""
        parts: list[list[int | str]] = []
        for entry in sorted(self.entries(), key=lambda entry: entry.key):
            if entry.ref.kind == "embeddings":
                # The cache serves many runs; what this run took from it is hashed in its prompts artifact.
                continue
            manifest = self.context.store.manifest(entry.ref)
            content = manifest.digest if manifest is not None else "incomplete"
            parts.append([*entry.key, content])
        return fingerprint(parts)

    def note(self, stage: Stage) -> None:
        """Hear which artifact a stage made; if it is not the expected one, all that depends on it is derived anew."""
        with self._lock:
            # What depends on one that is not derived yet is not derived either.
            if self._refs.get(stage.node, stage.ref) != stage.ref:
                self._refs.clear()

    def stage(self, node: Node) -> Stage:
        """Return the stage of a node, bound to this chain's context."""
        from tasks.stages import make_stage

        return make_stage(self.context, node.stage, node.epoch, node.slot)

    def has(self, node: Node) -> bool:
        """Return whether the config knows of a stage: of each reward and judge there is one only if it names it."""
        config, reward = self.context.config, node.slot.partition(OF)[0]
        if node.stage == "score":
            return node.slot in {section.slot for section in config.scored}
        if node.stage == "judge":
            return reward in {section.slot for section in (*config.rewards, *config.evaluate.judges)}
        return True

    def _is_settled(self, node: Node) -> bool:
        return node in self._refs and self._bases[node] == self._basis(node)

    def _basis(self, node: Node) -> tuple[int, tuple[Node, ...]]:
        """Return how many records of a stage there are, as another may name another attempt, and what it reads.

        Some read what has run.
        """
        return len(self.context.run.made(*node)), self._upstream(node)

    def _upstream(self, node: Node) -> tuple[Node, ...]:
        return () if self._is_the_runs(node) else self.stage(node).upstream()

    def _is_the_runs(self, node: Node) -> bool:
        return self.own is not None and 0 < self._epoch != node.epoch > 0

    def _settle(self, node: Node) -> ArtifactRef:
        if self.own is not None and self._is_the_runs(node):
            return self.own.ref(node)
        stage = self.stage(node)
        inputs = [self._refs[each] for each in stage.upstream()]
        ref = self._canonical(node, stage.work(inputs))
        if self.own is None or self._made(node, ref):
            return ref
        return self._borrowed(self.own, node, inputs) or ref

    def _borrowed(self, own: Chain, node: Node, inputs: Sequence[ArtifactRef]) -> ArtifactRef | None:
        """Return what the run itself has for a node: its policies, and what was made from the same inputs."""
        if node.epoch == 0 or not own.has(node):
            return None
        same = [own.ref(each) for each in own.stage(node).upstream()] == list(inputs)
        return own.ref(node) if same or node == policy_after(node.epoch) else None

    def _made(self, node: Node, ref: ArtifactRef) -> list[LineageEntry]:
        """Return the records of a stage that are attempts at the same work, oldest first."""
        return [entry for entry in self.context.run.made(*node) if entry.ref.fingerprint == ref.fingerprint]

    def _canonical(self, node: Node, plain: ArtifactRef) -> ArtifactRef:
        """Return the attempt that stands for the newest: the first with the same content."""
        made = [entry.ref for entry in self._made(node, plain)]
        if not made or made[-1] == plain:
            return made[-1] if made else plain
        store = self.context.store
        newest = store.manifest(made[-1])
        for number in range(1, made[-1].number):
            earlier = store.manifest(plain.attempt(number))
            if newest is not None and earlier is not None and earlier.digest == newest.digest:
                return plain.attempt(number)
        return made[-1]


def is_evaluated(config: RunConfig, epoch: int) -> bool:
    """Return whether the policy after an epoch is evaluated: every so many, and the last."""
    return epoch == config.run.epochs or epoch % config.evaluate.every == 0


def run_nodes(config: RunConfig) -> Iterator[Node]:
    """Yield every stage a run of this config consists of, each after those it reads."""
    yield from (Node(0, name) for name in ("base", "encode", "preprocess", "policy"))
    yield from evaluation_nodes(config, 0)
    for epoch in range(1, config.run.epochs + 1):
        yield Node(epoch, "rollout")
        yield from (Node(epoch, "score", reward.slot) for reward in config.scored)
        yield Node(epoch, "advantage")
        yield Node(epoch, "optimize")
        if is_evaluated(config, epoch):
            yield from evaluation_nodes(config, epoch)
    yield Node(config.run.epochs, "export")


def evaluation_nodes(config: RunConfig, epoch: int, name: str = "") -> Iterator[Node]:
    """Yield the stages of one evaluation; ``name`` is that of one beside the run's own."""
    yield Node(epoch, "evaluate", name)
    for reward in (*config.rewards, *config.evaluate.judges):
        yield Node(epoch, "judge", f"{reward.slot}{OF}{name}" if name else reward.slot)
