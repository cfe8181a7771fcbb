"""Moved projects: a setting with another path to the same files counts as unchanged.

Files are compared by contents. The manifests record the contents that a run used, so only the path in the new config
is read, never the path in a store's record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowmill.configs.load import flatten, override_config
from flowmill.configs.override_quoting import text_override
from flowmill.configs.schema import RunConfig
from flowmill.configs.user_directories import user_path
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.tasks.inputs.option_paths import config_places, content_of
from flowmill.tasks.inputs.renderer import render_of
from flowmill.tasks.inputs.source_prompts import prompts_fingerprint
from flowmill.tasks.inputs.store_trust import pattern
from flowmill.tasks.specs.graph import RENDERER, Node
from flowmill.tasks.specs.run_inputs import RunInputs
from flowmill.tasks.specs.stages import names_of

#: By setting: different paths to equal contents, as (path of the run, path of the other config).
Moves = Mapping[str, tuple[str, str]]


class Recorded(NamedTuple):
    """The location of the recorded contents of a path."""

    node: Node
    """The stage whose manifest records the contents."""
    option: str
    now: Callable[[RunInputs], Any]
    """Returns the contents at the path of a config."""


#: For each of ``flowmill.configs.paths.PATH_SETTINGS`` except prompt lists, which the run's first record contains.
RECORDED = {
    "model.path": Recorded(Node(0, "base"), "identity", lambda facts: facts.model_identity),
    "model.single_file": Recorded(
        Node(0, "base"), "single_file", lambda facts: facts.single_file_identity(facts.config.model, "")
    ),
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


def moved(store: ArtifactStore, run: RunFolder, before: RunConfig, config: RunConfig) -> Moves:
    """Return the settings whose paths differ between a config and that of a run, but whose files are equal."""
    old, new = (flatten(each.model_dump(mode="json")) for each in (before, config))
    pairs = {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}
    facts = RunInputs(store, config, run)
    texts = {key: pair for key, pair in pairs.items() if all(isinstance(each, str) for each in pair)}
    return {key: pair for key, pair in texts.items() if _leads_to_same(facts, key, *pair)}


def as_before(config: RunConfig, moves: Moves) -> RunConfig:
    """Return a config with the paths of the run."""
    return override_config(config, [text_override(key, old) for key, (old, _) in moves.items()]) if moves else config


def as_requested(config: RunConfig, moves: Moves) -> RunConfig:
    """Return the config of a run with the paths of the requested one."""
    return override_config(config, [text_override(key, new) for key, (_, new) in moves.items()]) if moves else config


def _leads_to_same(facts: RunInputs, setting: str, old: str, new: str) -> bool:
    if setting.startswith(_PROMPTS):
        return setting.endswith((".train", ".heldout")) and _has_same_prompts(facts)
    source = next((each for key, each in RECORDED.items() if _is_below(pattern(setting), key)), None)
    if source is None:
        return _is_same_option(facts, setting, old, new)
    if not user_path(new).exists():
        return False
    recorded = facts.recorded(source.option, *source.node)
    if recorded is None:
        return not facts.run.entries_of(*source.node) and Path(old).is_absolute()
    return bool(recorded == source.now(facts))


def _is_below(setting: str, ancestor: str) -> bool:
    return setting == ancestor or setting.startswith(f"{ancestor}.")


def _has_same_prompts(facts: RunInputs) -> bool:
    record = facts.run.describe() or {}
    return bool(record.get("preprocess") == prompts_fingerprint(facts.source_prompts))


def _is_same_option(facts: RunInputs, setting: str, old: str, new: str) -> bool:
    """Return whether an option of a component names the contents that the run recorded for the old path."""
    for component, places in config_places(facts.config).items() if ".options." in setting else ():
        for place in places:
            if place.path == new and _is_below(setting, f"{component}.options.{place.option}"):
                content, digest = content_of(place, facts.metadata), facts.contents.recorded.get(old)
                if digest is None:
                    return content is not None and all(entry.stage in names_of("run") for entry in facts.run.entries())
                return content is not None and content.digest == digest
    return False
