"""Loads a YAML file and ``key=value`` overrides into a checked RunConfig, and writes it back as YAML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from flowmill.configs.algorithm_defaults import without_followers
from flowmill.configs.base import Component
from flowmill.configs.data import spelled_out
from flowmill.configs.errors import ConfigError
from flowmill.configs.import_paths import import_from
from flowmill.configs.overrides import apply_overrides, blamed, read_yaml
from flowmill.configs.paths import note_modules, resolve_paths
from flowmill.configs.presets import config_file, is_preset, no_config
from flowmill.configs.schema import RunConfig
from flowmill.configs.validation_messages import explain, place, relevant, section_of

#: Settings that may differ between two invocations of one run. Prompt files count by content, not by path.
FREE_TO_CHANGE = (
    "model.start_config",
    "run.epochs",
    "run.name",
    "store",
    "execution",
    "tracking",
    "rate",
    "watch",
    "evaluate",
    "monitors",
    "rollout.groups_per_shard",
    "rollout.engine",
    "rewards.*.on_failure",
    "rewards.*.device",
    "rewards.*.batch_size",
    "rewards.*.server",
    "data.train",
    "data.heldout",
    "data.prior.train",
    "data.rows_per_shard",
    "data.bad_rows",
    "prompts.train",
    "prompts.heldout",
    "prompts.sources.*.train",
    "prompts.sources.*.heldout",
)
#: Prefixes of settings that do not change the results,
_SHARDS = ("rollout.groups_per_shard", "data.rows_per_shard")
_CARRYING_OUT = ("store.", "execution.", "tracking.", *_SHARDS, "model.start_config")
#: and the exception among them.
DECIDES = ("execution.ahead",)


#: Location of a setting: the parts of its dotted name.
Mistake = tuple[str, ...]
S = TypeVar("S", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, apply overrides, and check it.

    Args:
        path: YAML file, or the name of a preset. Prompt and model paths inside it are relative to its folder.
            ``extends: other.yaml`` merges it over another file or preset.
        overrides: ``section.key=value`` strings; values are YAML.
    """
    source = config_file(path)
    return make_config(read_config(source), overrides, where=str(source), name=source.stem, folder=source.parent)


def make_config(
    data: dict[str, Any], overrides: Sequence[str] = (), *, where: str, name: str, folder: Path = Path()
) -> RunConfig:
    """Check the data of a config with overrides applied.

    Args:
        data: settings by section.
        overrides: ``section.key=value`` strings; values are YAML.
        where: the origin of the data, for errors.
        name: name of the run if the data have none.
        folder: paths in the data are relative to it.
    """
    blame = origin(data, RunConfig, where, overrides)
    if overrides:
        original, data = data, _with_defaults(data)
        without_followers(data, original)
    data = apply_overrides(data, overrides)
    run = data.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = name
    # Paths in overrides are relative to the working directory, then to the config's folder.
    for each in (Path.cwd(), folder):
        data = _resolved(data, each)
    config = _parse(data, blame)
    import_from(config.execution.modules, config.execution.sources)
    return config


def parse_config(data: Mapping[str, Any], *, where: str) -> RunConfig:
    """Check plain data against the schema; ``where`` names its origin in errors."""
    return _parse(data, lambda mistake: where)


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the config with ``section.key=value`` overrides applied."""
    data = apply_overrides(config.model_dump(mode="json"), overrides)
    return _parse(data, lambda mistake: blamed(mistake, overrides) or "overrides").like(config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, same: Collection[str] = ()) -> list[str]:
    """Return ``key: old -> new`` for every setting that changes artifacts and differs.

    Args:
        old: the settings of a run.
        new: the requested settings.
        same: settings that differ in text but are equivalent.
    """
    flat_old, flat_new = flatten(old), flatten(new)
    # Monitors that gate the KL or weight advantages affect training, as rewards do.
    gated = any(flat_new.get(f"advantage.{name}") is not None for name in ("kl_gate", "diversity"))
    return [
        f"{key}: {before!r} -> {after!r}"
        for key, (before, after) in unlike(flat_old, flat_new).items()
        if key not in same and not _is_free(key.replace("monitors", "rewards", 1) if gated else key)
    ]


def unlike(*settings: Mapping[str, Any], missing: Any = None) -> dict[str, tuple[Any, ...]]:
    """Return the values of flat settings that are not equal; of an empty section only if no other has a part of it."""
    values = {key: tuple(each.get(key, missing) for each in settings) for key in sorted(set().union(*settings))}
    differing = {key: each for key, each in values.items() if any(value != each[0] for value in each)}
    empty = [key for key, each in differing.items() if {} in each or [] in each]
    in_parts = [key for key in empty if any(other.startswith(f"{key}.") for other in differing)]
    return {key: each for key, each in differing.items() if key not in in_parts}


def asks_for(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat settings that determine a run's results, without those of location and execution."""
    return {key: value for key, value in flatten(config).items() if key in DECIDES or not key.startswith(_CARRYING_OUT)}


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested data as ``{"section.key": value}``; lists are indexed."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flatten_value(f"{prefix}{key}", value))
    return flat


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in defaults, so that overrides may set keys of absent sections; return invalid data unchanged."""
    try:
        return RunConfig.model_validate(data).model_dump(mode="json")
    except ValidationError:
        return data


def _parse(data: Mapping[str, Any], where: Callable[[Mistake], str]) -> RunConfig:
    return checked(data, RunConfig, where)


def checked(data: Mapping[str, Any], schema: type[S], where: Callable[[Mistake], str]) -> S:
    """Return plain data as an instance of a schema; ``where`` names the origin of a mistake in errors."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        items = relevant([dict(item) for item in error.errors()])
        lines = [f"{where(_mistake(item))}: {explain(item, schema)}" for item in items]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def origin(
    data: Mapping[str, Any], schema: type[BaseModel], source: str, overrides: Sequence[str]
) -> Callable[[Mistake], str]:
    """Return the function that names the origin of a mistake: the file, or the override that caused it.

    Args:
        data: the data, without the overrides.
        schema: the schema of the data.
        source: the file, or another origin of the data.
        overrides: ``section.key=value`` strings.
    """
    own = set[Mistake]()
    try:
        schema.model_validate(data)
    except ValidationError as error:
        own = {_mistake(dict(item)) for item in error.errors()}
    return lambda mistake: source if mistake in own else blamed(mistake, overrides) or source


def _mistake(item: Mapping[str, Any]) -> Mistake:
    return tuple(str(part) for part in place(item))


def _flatten_value(name: str, value: object) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return flatten(value, f"{name}.")
    if isinstance(value, list | tuple) and value:
        return flatten({str(i): item for i, item in enumerate(value)}, f"{name}.")
    return {name: value}


def _is_free(key: str) -> bool:
    parts = key.split(".")
    return key not in DECIDES and any(_is_below(parts, free.split(".")) for free in FREE_TO_CHANGE)


def _is_below(parts: Sequence[str], free: Sequence[str]) -> bool:
    """Return whether a setting equals a free setting or is within it; * matches any list index."""
    return len(parts) >= len(free) and all(name in ("*", part) for name, part in zip(free, parts, strict=False))


def read_config(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the data of a config file, merged over those that it extends.

    Args:
        seen: the files that extend it.
    """
    try:
        with path.open("rb") as file:
            # A device may be endless.
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"Config file '{path}' has more than {_MOST_BYTES:,} bytes: it is no config.")
        data = read_yaml(content.decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"Config file '{path}' {no_config(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file '{path}' cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"Config file '{path}' is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"Config file '{path}' holds {type(data).__name__}, not sections like 'model:'.")
    data = _resolved(data, path.parent)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if path.resolve() in (seen := (*seen, path.resolve()))[:-1]:
        raise ConfigError(f"Config file '{path}' extends itself through {' -> '.join(p.name for p in seen)}.")
    return merged(read_config(_extended(path, str(parent)), seen), data)


def _resolved(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve paths, modules of import strings, and the preset of ``model.start_config``, in place."""
    data = note_modules(resolve_paths(data, folder), folder)
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("start_config"), str):
        start = config_file(model["start_config"], folder)
        model["start_config"] = str(start) if is_preset(start) else model["start_config"]
    return data


def _extended(path: Path, parent: str) -> Path:
    """Return the file, or the preset, that a config extends."""
    file = config_file(parent, path.parent)
    if not file.exists():
        raise ConfigError(f"Config file '{path}' extends '{parent}', which {no_config(parent, path.parent)}")
    return file


def merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], section: type[BaseModel] | None = RunConfig
) -> dict[str, Any]:
    """Return a config merged with changes: sections are merged; components, lists and values are replaced.

    Args:
        section: the schema of both; None: that of options, in which a mapping with a name is a component.
    """
    result = dict(base)
    fields = {} if section is None else section.model_fields
    for key, value in changes.items():
        below = result.get(key)
        if key == "data":
            below, value = spelled_out(below), spelled_out(value)
        inner = section_of(fields[key].annotation) if key in fields else None
        named = inner is None or issubclass(inner, Component)
        if isinstance(value, dict) and isinstance(below, dict) and not (named and "name" in value):
            result[key] = merged(below, value, inner)
        else:
            result[key] = value
    return result


_MOST_BYTES = 1 << 22
