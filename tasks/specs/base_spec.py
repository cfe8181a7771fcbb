"""The contract of identities, and how one is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from configs.errors import ConfigError
from configs.fingerprint import fingerprint
from configs.registry import resolve
from configs.schema import RunConfig
from storage.layout import ArtifactRef
from storage.lineage import LineageEntry
from tasks.inputs.option_paths import Place
from tasks.specs import SPECS
from tasks.specs.graph import DRAWING, ONCE, RENDERER, SLOTTED, TRAINING, Node
from tasks.specs.input_hashes import CONTENTS, Digests
from tasks.specs.run_inputs import RunInputs

#: Gives the record of a stage that has run and counts, None where there is none.
Find = Callable[[Node], LineageEntry | None]


class StageSpec(ABC):
    """One stage of one epoch of a run, as far as it decides which artifact that is."""

    name: ClassVar[str]
    """Name in commands, lineage and metrics."""
    version: ClassVar[int] = 1
    """Raised when the meaning of the stage's output changes."""
    kind: ClassVar[str]
    """Kind of the artifact it makes."""
    grows: ClassVar[bool] = False
    """True for a cache that is never complete and has no manifest."""

    def __init__(self, facts: RunInputs, epoch: int, slot: str, find: Find) -> None:
        """Bind to a run.

        Args:
            facts: the run's config, and what it names.
            epoch: the epoch.
            slot: which of several equal stages of the epoch: the reward's name for score and judge, an evaluation's
                own name; empty for others.
            find: gives what the run has made, where options depend on it.
        """
        self.facts = facts
        self.epoch = epoch
        self.slot = slot
        self.find = find

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.facts.config

    @property
    def node(self) -> Node:
        """Epoch, name and slot."""
        return Node(self.epoch, self.name, self.slot)

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Return the options that change the result, and nothing else."""

    @abstractmethod
    def upstream(self) -> tuple[Node, ...]:
        """Return the stages whose artifacts this one reads."""

    def places(self) -> tuple[Place, ...]:
        """Return the files and folders that options name, whose contents change the result."""
        return ()

    def counted(self, inputs: Sequence[ArtifactRef]) -> dict[str, Any]:
        """Return the options that change the result, and what is in the files and folders that they name."""
        options, places = dict(self.options()), self.places()
        if not places:
            return options

        def named(contents: Digests) -> str:
            return self._fingerprint(_with(options, contents), inputs)

        contents = self.facts.contents
        found = contents.of(self.node, places, named)
        then = contents.then(self.node, found)
        # What was made with the same files at other paths stays what it is.
        before = _with(_renamed(options, then), {then.get(path, path): each for path, each in found.items()})
        is_moved = then and contents.is_made(self.node, self._fingerprint(before, inputs))
        return before if is_moved else _with(options, found)

    def work(self, inputs: Sequence[ArtifactRef]) -> ArtifactRef:
        """Return the first attempt at what this stage makes of some inputs."""
        return ArtifactRef(self.kind, self._fingerprint(self.counted(inputs), inputs))

    def _fingerprint(self, options: dict[str, Any], inputs: Sequence[ArtifactRef]) -> str:
        work: dict[str, Any] = {
            "stage": self.name,
            "version": self.version,
            "options": options,
            "inputs": [str(ref) for ref in inputs],
        }
        return fingerprint(work)


def _with(options: dict[str, Any], contents: Digests) -> dict[str, Any]:
    # What names no local file keeps the name it had before there were contents.
    return {**options, CONTENTS: dict(contents)} if contents else options


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return plain data with some texts replaced, wherever they are."""
    if isinstance(value, Mapping):
        return {key: _renamed(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def spec_of(facts: RunInputs, node: Node, find: Find) -> StageSpec:
    """Return the identity of a stage of a run.

    Raises:
        ConfigError: there is no such stage, or it does not exist for this epoch or slot.
    """
    cls = resolve(SPECS, node.stage, label="stage")
    if node.stage in ONCE and node.epoch != 0:
        raise ConfigError(f"Stage '{node.stage}' runs once per run; leave --epoch out.")
    if node.stage in TRAINING and node.epoch < 1:
        raise ConfigError(f"Stage '{node.stage}' runs once per epoch. Say which with --epoch 1 or later.")
    slot = node.slot if node.stage in SLOTTED else ""
    if node.stage == "base" and slot not in ("", RENDERER):
        raise ConfigError(f"Stage 'base' makes no '{slot}': it scores nothing. Leave the reward out.")
    if facts.config.render is None and (node.stage in DRAWING or (node.stage == "base" and slot)):
        raise ConfigError(f"Stage '{node.stage}' draws texts, but the config has no section 'render'. Add one.")
    return cls(facts, node.epoch, slot, find)  # type: ignore[no-any-return]
