"""Trust in configs: a config specified on this machine is trusted, a run's config in a store is not.

Settings can run code (import strings), run commands (launchers, clusters), send samples (trackers, reward servers),
send keys (judges), and read files (paths, hub ids). Such settings of a config specified on this machine are remembered.
Those only in a store require the user's consent.

Every text setting counts unless it is listed as harmless. New settings and options of components therefore count by
default.
"""

from __future__ import annotations

import contextlib
import os
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from flowmill.configs.base import Component, Section
from flowmill.configs.errors import TrustError
from flowmill.configs.escaping import visible
from flowmill.configs.fingerprint import canonical_json, hash_text
from flowmill.configs.rewards import ServerSection
from flowmill.configs.schema import RunConfig
from flowmill.configs.user_directories import user_state

#: Text settings without effects outside a run: names, columns, prompts, devices, parts of a model.
#: ``store.root`` always comes from the caller, never from a record.
HARMLESS = frozenset(
    {
        "run.name",
        "store.root",
        "model.negative_prompt",
        "render.model.negative_prompt",
        "model.lora.targets",
        "model.start",
        "model.start_config",
        "render.model.start",
        "render.model.start_config",
        "prompts.column",
        "prompts.image",
        "prompts.split",
        "prompts.sources.*.name",
        "rewards.*.label",
        "rewards.*.sources",
        "rewards.*.device",
        "watch.on",
        "tracking.experiment",
        "tracking.parent",
        "execution.device",
    }
)
#: Settings with a name from a table or an import string, which has a colon.
NAMES = frozenset(
    {
        "model.policy",
        "model.kind",
        "render.model.policy",
        "render.model.kind",
        "rollout.solver",
        "rollout.store",
        "evaluate.solver",
        "optimize.optimizer",
    }
)
#: Settings whose custom classes are imported even to read a run, as its stages and samples depend on them.
READ = frozenset({"model.kind", "rollout.store", "advantage.estimator"})
#: Settings with lists of rewards that follow the same rules as ``rewards``.
_REWARDS = ("monitors", "evaluate.judges")
#: Prefix of components whose options are commands, classes or addresses: all options count, including numbers.
_COMMANDS = "execution."


def remember(config: RunConfig) -> None:
    """Remember the trusted settings of a config specified on this machine; does nothing without a writable home."""
    with contextlib.suppress(OSError):
        for _, label in carried_out(config):
            note = _note(label)
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.touch(mode=0o600)


def check_trusted(
    stored: RunConfig,
    config: RunConfig,
    *,
    run: str,
    only: Collection[str] | None = None,
    consent: str = "say so with --trust-store; or ",
) -> None:
    """Check that no setting takes effect that only a store names.

    Args:
        stored: the config in the store.
        config: the config to use: the stored one with the overrides of this invocation.
        run: name of the run.
        only: settings that will be used; all when absent.
        consent: how the caller takes consent; '' if it does not.
    """
    settings = dict(carried_out(stored))
    used = [(name, label) for name, label in carried_out(config) if only is None or name in only]
    strange = [name for name, label in used if settings.get(name) == label and not _note(label).exists()]
    # The options of a component that is listed whole are not listed again.
    lines = [name for name in strange if name.partition(".options.")[0] not in strange or ".options." not in name]
    if lines:
        listed = "\n  ".join(f"{name}: {visible(settings[name])}"[:500] for name in lines)
        raise TrustError(
            f"The store's record of run '{run}' names code, commands, addresses, variables or paths that no config "
            f"given on this machine has named:\n  {listed}\nIf you trust everyone who can write to the store, "
            f"{consent}give the config itself: flowmill run CONFIG.{_forgetful()}"
        )


def _forgetful() -> str:
    """Return a note if trusted settings cannot be remembered; '' otherwise."""
    folder = user_state()
    above = next(each for each in (folder, *folder.parents) if each.exists())
    if os.access(above, os.W_OK):
        return ""
    return f" Configs are not remembered here, as '{folder}' cannot be written; set XDG_STATE_HOME to another folder."


def carried_out(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield setting and value of all settings that run code, read a path, contact a server or use a secret.

    The options of a component count together, so that the key of one endpoint is not sent to another. Each also counts
    alone, so that an override of one option does not vouch for the others.
    """
    yield from _of_section(config, "")


def trusted_modules(config: RunConfig) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the folders and sources of modules of a config, each if a config specified on this machine named it."""
    folders, sources = config.execution.modules, config.execution.sources
    return (
        folders if _note(canonical_json(list(folders))).exists() else (),
        sources if _note(canonical_json(sources)).exists() else {},
    )


def is_set_here(component: Component, option: str) -> bool:
    """Return whether a config specified on this machine set an option of a component to its present value."""
    whole = ":" in component.name
    options = _plain(component.options) if whole else texts(component.options)
    return option in options and _note(canonical_json({option: options[option]})).exists()


def _of_section(section: Section, above: str) -> Iterator[tuple[str, str]]:
    for name, field in type(section).model_fields.items():
        yield from _of_field(section, above, name, field)


def _of_field(section: Section, above: str, name: str, field: FieldInfo) -> Iterator[tuple[str, str]]:
    value, setting = getattr(section, name), f"{above}{name}"
    if isinstance(section, Component) and name in ("name", "options"):
        if name == "name":
            yield from _of_component(section, above[:-1])
    elif isinstance(value, ServerSection):
        yield f"{setting}.url", value.url
    elif isinstance(value, Section):
        yield from _of_section(value, f"{setting}.")
    elif isinstance(value, tuple) and any(isinstance(each, Section) for each in value):
        for number, each in enumerate(value):
            yield from _of_section(each, f"{setting}.{number}.")
    elif value != field.default and _counts(setting, value, field.annotation):
        yield setting, value if isinstance(value, str) else canonical_json(_plain(value))


def _of_component(component: Component, setting: str) -> Iterator[tuple[str, str]]:
    own = ":" in component.name
    if own:
        yield setting, component.name
    whole = own or setting.startswith(_COMMANDS)
    options = _plain(component.options) if whole else texts(component.options)
    if options:
        yield f"{setting}.options" if own else setting, canonical_json({"name": component.name, "options": options})
        for name, value in options.items():
            yield f"{setting}.options.{name}", canonical_json({name: value})


def _counts(setting: str, value: Any, annotation: Any) -> bool:
    """Return whether a value requires trust, by the lists of settings."""
    place = pattern(setting)
    if place in HARMLESS or not texts(value):
        return False
    if place in NAMES:
        return ":" in value
    return value not in choices(annotation) if isinstance(value, str) else True


def pattern(setting: str) -> str:
    """Return a setting with '*' for list indices; monitors and judges map to ``rewards``."""
    place = ".".join("*" if part.isdigit() else part for part in setting.split("."))
    for other in _REWARDS:
        if place.startswith(f"{other}.*"):
            return "rewards" + place.removeprefix(other)
    return place


def choices(annotation: Any) -> set[Any]:
    """Return the literal texts of an annotation; these need no trust."""
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    return set().union(*(choices(each) for each in typing.get_args(annotation)))


def texts(value: Any) -> Any:
    """Return a value reduced to its texts; mappings keep keys whose values hold text. Empty or None without text."""
    if isinstance(value, Mapping):
        texts_by_key = {str(key): texts(each) for key, each in value.items()}
        return {key: each for key, each in texts_by_key.items() if each}
    if isinstance(value, list | tuple):
        return [each for each in map(texts, value) if each]
    return value if isinstance(value, str) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _note(label: str) -> Path:
    return user_state() / "trusted" / hash_text(label)
