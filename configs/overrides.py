"""``section.key=value`` overrides: parsing, merging into a config, and attribution of errors."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from flowmill.configs.data import USUAL_COLUMNS
from flowmill.configs.errors import ConfigError
from flowmill.configs.override_quoting import text_override
from flowmill.configs.paths import note_modules, resolve_paths

#: Parts of an address that messages do not repeat.
_PASSWORD = re.compile(r"(?<=:)[^:/@]+(?=@)")
#: Far above the number of values in any realistic config.
_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number (YAML 1.1 wants 1.0e-4), and a key such as `on` is text, not true."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def _exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)))


_Loader.add_constructor("!exponent", _exponent)
#: A date is text here: no setting is one.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("!exponent", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: it is not YAML, constructs Python objects, or is nested without end.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from None
    finally:
        loader.dispose()


def _check_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values of a node, including repeated aliases; refuse too many, recursive aliases, and
    repeated keys."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise yaml.YAMLError("an alias stands for something that it is part of")
        return sizes[id(node)]
    sizes[id(node)] = 0
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    count = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_check_size(part, sizes) for part in inner))
    if count > _MOST_VALUES:
        raise yaml.YAMLError(f"it holds more than {_MOST_VALUES:,} values, those that aliases repeat included")
    sizes[id(node)] = count
    return count


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse a key that a mapping has twice, of which YAML takes the last: the first would be lost unseen."""
    lines = dict[str, int]()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise yaml.YAMLError(f"'{key.value}' is there twice, in lines {lines[key.value]} and {line}: keep one")
        lines[key.value] = line


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Merge overrides into a config's data, in place."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set '{override}' is not of the form section.key=value.")
        try:
            value = read_yaml(text)
        except yaml.YAMLError:
            raise ConfigError(
                f"--set '{override}': '{text}' is not a YAML value. Quote lists and mappings for the shell: "
                f"--set '{key}=[...]'."
            ) from None
        _set(data, _keys(override), value, override)
    return data


def with_resolved_paths(overrides: Sequence[str]) -> list[str]:
    """Return overrides with paths that exist below the working directory, or the home ``~``, absolute."""
    return [_located(override) for override in overrides]


def _located(override: str) -> str:
    key, _, text = override.partition("=")
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return override
    data: dict[str, Any] = {}
    _set(data, _keys(override), copy.deepcopy(value), override)
    resolved: Any = note_modules(resolve_paths(data, Path.cwd()), Path.cwd())
    for name in _keys(override):
        resolved = resolved[name]
    return override if resolved == value else text_override(key, resolved)


def blamed(location: Sequence[str], overrides: Sequence[str]) -> str | None:
    """Return ``--set OVERRIDE`` for the last override that set a location, a part of it, or a section around it."""
    for override in reversed(overrides):
        keys = _keys(override)
        if all(mine == its for mine, its in zip(keys, location, strict=False)):
            return f"--set {_PASSWORD.sub('***', override)}"
    return None


def _keys(override: str) -> list[str]:
    keys = override.partition("=")[0].strip().split(".")
    is_short = keys[0] == "data" and len(keys) == 2 and keys[1] in USUAL_COLUMNS
    return ["data", "columns", keys[1]] if is_short else keys


def _set(data: dict[str, Any], keys: list[str], value: object, override: str) -> None:
    node: Any = data
    for depth, key in enumerate(keys[:-1]):
        above, node = node, _child(node, key, keys[:depth], override)
        if isinstance(node, str) and keys[depth + 1] == "options" and isinstance(above, dict):
            # A component's name stands for the component.
            node = above[key] = {"name": node}
    if isinstance(node, list):
        node[_index(node, keys[-1], keys[:-1], override)] = value
    elif isinstance(node, dict):
        node[keys[-1]] = value
    else:
        raise ConfigError(
            f"--set {override}: '{'.'.join(keys[:-1])}' holds a value, not a section, so it has no '{keys[-1]}'."
        )


def _child(node: Any, key: str, above: Sequence[str], override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, above, override)]
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override}: '{'.'.join(above)}' holds a value, not a section, so it has no '{key}'.")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _index(node: list[Any], key: str, above: Sequence[str], override: str) -> int:
    if key.isdecimal() and int(key) < len(node):
        return int(key)
    where = ".".join(above)
    raise ConfigError(
        f"--set {override}: '{where}' is a list of {len(node)}, so '{key}' must be a list index below {len(node)}. To "
        f"add or remove entries give the whole list: --set '{where}=[..., ...]'."
    )
