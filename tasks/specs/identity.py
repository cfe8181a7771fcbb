"""The part of a stage that decides which artifact it makes: options, and the stages whose artifacts it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import fingerprint
from flowmill.configs.registry import imported
from flowmill.configs.schema import RunConfig
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.inputs.option_paths import OptionPath
from flowmill.tasks.specs.graph import RENDERER, Node
from flowmill.tasks.specs.input_hashes import CONTENTS, Digests
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.run_inputs import RunInputs
from flowmill.tasks.specs.stages import StageSpec, stage_spec
from flowmill.tasks.specs.turns import has_turn, last_turn, split_turn

#: Gives the record of a stage that has run and counts, None where there is none.
Find = Callable[[Node], LineageEntry | None]


class StageIdentity(ABC):
    """One stage of one epoch of a run, as far as it decides which artifact that is."""

    def __init__(self, spec: StageSpec, facts: RunInputs, node: Node, find: Find) -> None:
        """Bind to a run.

        Args:
            facts: the run's config, and the inputs that it names.
            node: the epoch, and which of several equal stages of it: the slot is the reward's name for score and
                judge, an evaluation's own name, empty for others, with the number of a turn before the last.
            find: gives the artifacts of the run, where options depend on them.
        """
        self.spec, self.facts, self.node, self.find = spec, facts, node, find
        self.epoch, self.slot = node.epoch, node.slot
        self.take_slot()

    def take_slot(self) -> None:  # noqa: B027 - most stages have no slot
        """Find the reward or evaluation that the slot names."""

    @property
    def name(self) -> str:
        """Name in commands, lineage and metrics."""
        return self.spec.name

    @property
    def config(self) -> RunConfig:
        """The run's config."""
        return self.facts.config

    @property
    def plan(self) -> RunPlan:
        """The run's plan, with the components of its config."""
        return self.facts.plan

    @property
    def turn(self) -> int:
        """The number of its turn, 1 in runs without turns."""
        number = split_turn(self.slot)[1]
        return int(number[1:]) if number else last_turn(self.config)

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Return the options that change the result, and nothing else."""

    @abstractmethod
    def upstream(self) -> tuple[Node, ...]:
        """Return the stages whose artifacts this one reads."""

    def places(self) -> tuple[OptionPath, ...]:
        """Return the files and folders that options name, whose contents change the result."""
        return ()

    def counted(self, inputs: Sequence[ArtifactRef]) -> dict[str, Any]:
        """Return the options that change the result, and the contents of the files and folders that they name."""
        options, places = dict(self.options()), self.places()
        if not places:
            return options

        def named(contents: Digests) -> str:
            return self._fingerprint(_with(options, contents), inputs)

        contents = self.facts.contents
        digests = contents.of(self.node, places, named)
        then = contents.then(self.node, digests)
        # Artifacts computed with the same files at other paths keep their names.
        before = _with(_renamed(options, then), {then.get(path, path): each for path, each in digests.items()})
        is_moved = then and contents.is_made(self.node, self._fingerprint(before, inputs))
        return before if is_moved else _with(options, digests)

    def work(self, inputs: Sequence[ArtifactRef]) -> ArtifactRef:
        """Return the first attempt at the artifact that this stage makes of some inputs."""
        return ArtifactRef(self.spec.artifact, self._fingerprint(self.counted(inputs), inputs))

    def _fingerprint(self, options: dict[str, Any], inputs: Sequence[ArtifactRef]) -> str:
        work: dict[str, Any] = {
            "stage": self.name,
            "version": self.spec.version,
            "options": options,
            "inputs": [str(ref) for ref in inputs],
        }
        return fingerprint(work)


def _with(options: dict[str, Any], contents: Digests) -> dict[str, Any]:
    # Options without local files keep the fingerprint from before contents counted.
    return {**options, CONTENTS: dict(contents)} if contents else options


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return plain data with some texts replaced, wherever they are."""
    if isinstance(value, Mapping):
        return {key: _renamed(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def identity_of(facts: RunInputs, node: Node, find: Find) -> StageIdentity:
    """Return a stage of a run."""
    spec = stage_spec(node.stage)
    if spec.scope == "run" and node.epoch != 0:
        raise ConfigError(f"Stage '{spec.name}' runs once per run; leave --epoch out.")
    if spec.scope == "epoch" and node.epoch < 1:
        raise ConfigError(f"Stage '{spec.name}' runs once per epoch. Say which with --epoch 1 or later.")
    slot = node.slot if spec.slotted else ""
    if spec.name == "base" and slot not in ("", RENDERER):
        raise ConfigError(f"Stage 'base' makes no '{slot}': it scores nothing. Leave the reward out.")
    if not facts.plan.has(spec.name):
        reason = (
            "reads given samples, but the config has no section 'data'. Add one"
            if spec.with_data
            else "belongs to rollouts, but the config trains on the samples of its section 'data'. Remove it"
        )
        raise ConfigError(f"Stage '{spec.name}' {reason}.")
    if not has_turn(facts.config, slot):
        raise ConfigError(
            f"Stage '{spec.name}' has no '{slot}': turns are numbered from 1 to render.turns.count - 1, and the last "
            "has no number."
        )
    if facts.config.render is None and (spec.renders or (spec.name == "base" and slot)):
        raise ConfigError(f"Stage '{spec.name}' draws texts, but the config has no section 'render'. Add one.")
    stage = spec.data_stage if facts.plan.has_data and spec.data_stage else spec.stage
    identity: StageIdentity = imported(stage, label="stage")(spec, facts, Node(node.epoch, spec.name, slot), find)
    return identity
