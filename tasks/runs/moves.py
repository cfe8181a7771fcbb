"""Moved projects: a setting with another path to the same files counts as unchanged.

Files are compared by contents. The manifests record the contents that a run used, so only the path in the given config
is read, never the path in a store's record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from configs.load import flatten, override_config
from configs.override_quoting import text_override
from configs.schema import RunConfig
from storage.artifacts.commit import ArtifactStore
from storage.artifacts.lineage import RunFolder
from tasks.inputs.option_paths import config_places, held
from tasks.inputs.renderer import render_of
from tasks.inputs.source_prompts import prompts_fingerprint
from tasks.inputs.store_trust import pattern
from tasks.specs.graph import RENDERER, Node
from tasks.specs.run_inputs import RunInputs
from tasks.specs.stages import STAGES

#: By setting: different paths to equal contents, as (path of the run, path of the given config).
Moves = Mapping[str, tuple[str, str]]


class Recorded(NamedTuple):
    """The location of the recorded contents of a path."""

    node: Node
    """The stage whose manifest records the contents."""
    option: str
    """The option of the manifest."""
    now: Callable[[RunInputs], Any]
    """Returns the contents at the path of a given config."""


#: For each of ``configs.paths.PATH_SETTINGS`` except prompt lists, which the run's first record contains.
RECORDED = {
    "model.path": Recorded(Node(0, "base"), "identity", lambda facts: facts.model_identity),
    "model.single_file": Recorded(
        Node(0, "base"), "single_file", lambda facts: facts.single_file_identity(facts.config.model, "")
    ),
    "model.checkpoint": Recorded(Node(0, "policy"), "checkpoint", lambda facts: facts.checkpoint_identity),
    "model.lora.start": Recorded(Node(0, "policy"), "start", lambda facts: facts.adapter_identity),
    "critic.path": Recorded(Node(1, "value"), "critic_base", lambda facts: facts.critic_identity),
    "render.model.path": Recorded(Node(0, "base", RENDERER), "identity", lambda facts: facts.renderer_identity),
    "render.model.single_file": Recorded(
        Node(0, "base", RENDERER),
        "single_file",
        lambda facts: facts.single_file_identity(render_of(facts.config).model, RENDERER),
    ),
}
_PROMPTS = "prompts."


def moved(store: ArtifactStore, run: RunFolder, before: RunConfig, given: RunConfig) -> Moves:
    """Return the settings whose paths differ between a given config and that of a run, but whose files are equal.

    Raises:
        PromptError: a prompt source cannot be used.
    """
    old, new = (flatten(each.model_dump(mode="json")) for each in (before, given))
    pairs = {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}
    facts = RunInputs(store, given, run)
    texts = {key: pair for key, pair in pairs.items() if all(isinstance(each, str) for each in pair)}
    return {key: pair for key, pair in texts.items() if _leads_to_same(facts, key, *pair)}


def as_before(config: RunConfig, moves: Moves) -> RunConfig:
    """Return a given config with the paths of the run."""
    return override_config(config, [text_override(key, old) for key, (old, _) in moves.items()]) if moves else config


def as_given(config: RunConfig, moves: Moves) -> RunConfig:
    """Return the config of a run with the paths of the given one."""
    return override_config(config, [text_override(key, new) for key, (_, new) in moves.items()]) if moves else config


def _leads_to_same(facts: RunInputs, setting: str, old: str, new: str) -> bool:
    if setting.startswith(_PROMPTS):
        return setting.endswith((".train", ".heldout")) and _has_same_prompts(facts)
    found = next((each for key, each in RECORDED.items() if _is_below(pattern(setting), key)), None)
    if found is None:
        return _is_same_option(facts, setting, old, new)
    if not Path(new).expanduser().exists():
        return False
    made = facts.run.made(*found.node)
    manifests = [facts.store.manifest(entry.ref) for entry in reversed(made)]
    known = [each.options[found.option] for each in manifests if each is not None and found.option in each.options]
    return bool(known[0] == found.now(facts)) if known else not made and Path(old).is_absolute()


def _is_below(setting: str, known: str) -> bool:
    return setting == known or setting.startswith(f"{known}.")


def _has_same_prompts(facts: RunInputs) -> bool:
    record = facts.run.describe() or {}
    return bool(record.get("preprocess") == prompts_fingerprint(facts.source_prompts))


def _is_same_option(facts: RunInputs, setting: str, old: str, new: str) -> bool:
    """Return whether an option of a component names the contents that the run recorded for the old path."""
    for component, places in config_places(facts.config).items() if ".options." in setting else ():
        for place in places:
            if place.path == new and _is_below(setting, f"{component}.options.{place.option}"):
                found, known = held(place, facts.metadata), facts.contents.recorded.get(old)
                if known is None:
                    return found is not None and all(
                        STAGES[entry.stage].scope == "run" for entry in facts.run.entries()
                    )
                return found is not None and found.digest == known
    return False
