"""``section.key=value`` overrides: how they are read, laid over a config, and blamed for what they break."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from configs.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number (YAML 1.1 wants 1.0e-4)."""


def _exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)))


_Loader.add_constructor("!exponent", _exponent)
_Loader.add_implicit_resolver("!exponent", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """Return what a YAML text holds.

    Raises:
        yaml.YAMLError: it is not YAML, or asks for Python objects.
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Lay overrides over a config's data, in place.

    Raises:
        ConfigError: one is malformed, or reaches into a value or beyond a list.
    """
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


def blamed(location: Sequence[str], overrides: Sequence[str]) -> str | None:
    """Return ``--set OVERRIDE`` of the last override that set a place, a part of it, or what it is a part of."""
    for override in reversed(overrides):
        keys = _keys(override)
        if all(mine == its for mine, its in zip(keys, location, strict=False)):
            return f"--set {override}"
    return None


def _keys(override: str) -> list[str]:
    return override.partition("=")[0].strip().split(".")


def _set(data: dict[str, Any], keys: list[str], value: object, override: str) -> None:
    node: Any = data
    for depth, key in enumerate(keys[:-1]):
        node = _child(node, key, keys[:depth], override)
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
