"""From a YAML file and ``key=value`` overrides to a checked RunConfig, and back to YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from configs.errors import ConfigError
from configs.schema import RunConfig, Section
from configs.suggest import did_you_mean


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number (YAML 1.1 wants 1.0e-4)."""


def _exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)))


_Loader.add_constructor("!exponent", _exponent)
_Loader.add_implicit_resolver("!exponent", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))

#: What may differ between two invocations of one run. Prompt files count by content, not by path.
FREE_TO_CHANGE = (
    "run.epochs",
    "run.name",
    "store",
    "execution",
    "tracking",
    "evaluate",
    "export",
    "prompts.train",
    "prompts.heldout",
)
#: Settings that change nothing of what is made.
_CARRYING_OUT = ("store.", "execution.", "tracking.")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, apply overrides, and check it.

    Args:
        path: YAML file. Relative prompt and model paths inside it are taken relative to its folder.
            ``extends: other.yaml`` lays it over another file.
        overrides: ``section.key=value`` strings; values are YAML.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown, or a value is not allowed.
    """
    source = Path(path)
    data = _apply(_with_defaults(_read(source)) if overrides else _read(source), overrides)
    run = data.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") is None:
        run["name"] = source.stem
    # What an override names is looked for where the command is given, then beside the config.
    for folder in (Path.cwd(), source.parent):
        data = _resolve_paths(data, folder)
    return parse_config(data, where=str(source))


def parse_config(data: Mapping[str, Any], *, where: str) -> RunConfig:
    """Check plain data against the schema; ``where`` names its origin in errors.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from None


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the config with ``section.key=value`` overrides applied.

    Raises:
        ConfigError: an override is malformed, names an unknown key or sets a value that is not allowed.
    """
    return parse_config(_apply(config.model_dump(mode="json"), overrides), where="overrides")


def dump_yaml(config: RunConfig) -> str:
    """Return the resolved config as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return ``key: old -> new`` for every setting that changes artifacts and differs."""
    flat_old, flat_new = flatten(old), flatten(new)
    keys = sorted(set(flat_old) | set(flat_new))
    return [
        f"{key}: {flat_old.get(key)!r} -> {flat_new.get(key)!r}"
        for key in keys
        if not _is_free(key) and flat_old.get(key) != flat_new.get(key)
    ]


def asks_for(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say what a run shall make, flat; where and how it is made are not among them."""
    return {key: value for key, value in flatten(config).items() if not key.startswith(_CARRYING_OUT)}


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested data as ``{"section.key": value}``; lists are indexed."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flatten_value(f"{prefix}{key}", value))
    return flat


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in defaults, so that an override may reach into a section the file leaves out; as it is if not valid yet."""
    try:
        return RunConfig.model_validate(data).model_dump(mode="json")
    except ValidationError:
        return data


def _flatten_value(name: str, value: object) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return flatten(value, f"{name}.")
    if isinstance(value, list | tuple) and value:
        return flatten({str(i): item for i, item in enumerate(value)}, f"{name}.")
    return {name: value}


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_TO_CHANGE)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError:
        raise ConfigError(f"Config file '{path}' does not exist. Presets are in configs/.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file '{path}' cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"Config file '{path}' is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"Config file '{path}' holds {type(data).__name__}, not sections like 'model:'.")
    data = _resolve_paths(data, path.parent)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if path.resolve() in (seen := (*seen, path.resolve()))[:-1]:
        raise ConfigError(f"Config file '{path}' extends itself through {' -> '.join(p.name for p in seen)}.")
    return _merge(_read(path.parent / str(parent), seen), data)


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with another laid over it: sections are merged, components, lists and values replaced."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and "name" not in value:
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _apply(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"Override '{override}' is not of the form section.key=value.")
        try:
            value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError:
            raise ConfigError(f"Override '{override}': '{text}' is not a YAML value.") from None
        _set(data, key.strip().split("."), value, override)
    return data


def _set(data: dict[str, Any], keys: list[str], value: object, override: str) -> None:
    node: Any = data
    for key in keys[:-1]:
        node = _child(node, key, override)
    if isinstance(node, list):
        node[_index(node, keys[-1], override)] = value
    elif isinstance(node, dict):
        node[keys[-1]] = value
    else:
        raise ConfigError(f"Override '{override}': '{'.'.join(keys[:-1])}' holds a value, not a section.")


def _child(node: Any, key: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, override)]
    if not isinstance(node, dict):
        raise ConfigError(f"Override '{override}': '{key}' is inside a value, not a section.")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _index(node: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise ConfigError(f"Override '{override}': '{key}' must be a list index below {len(node)}.")
    return int(key)


def _explain(error: ValidationError, where: str) -> str:
    lines = [_explain_one(dict(item), where) for item in error.errors()]
    return "\n".join(lines)


def _explain_one(item: dict[str, Any], where: str) -> str:
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        valid = _fields_at(item["loc"][:-1])
        return f"{where}: unknown setting '{location}'. {did_you_mean(str(item['loc'][-1]), valid)}"
    if item["type"] == "missing":
        return f"{where}: setting '{location}' is required and missing."
    found = "" if item["type"] == "value_error" else f" is {item['input']!r}"
    return f"{where}: '{location or 'config'}'{found}: {item['msg'].removeprefix('Value error, ')}."


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the section at a location of the schema."""
    section: type[BaseModel] = RunConfig
    for part in location:
        if isinstance(part, int):
            continue
        found = _section_of(section.model_fields[part].annotation) if part in section.model_fields else None
        if found is None:
            break
        section = found
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in get_args(annotation):
        found = _section_of(inner)
        if found is not None:
            return found
    return None


#: Settings that hold a path, or something else (a dataset or hub id) where no such path exists.
_PATHS = (("prompts", "train"), ("prompts", "heldout"), ("model", "path"))


def _resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make paths that exist below a folder absolute, so that a run can be resumed from anywhere."""
    for section, key in _PATHS:
        value = data[section].get(key) if isinstance(data.get(section), dict) else None
        if isinstance(value, str) and "://" not in value and (folder / value).exists():
            data[section][key] = str((folder / value).resolve())
    return data
