"""Validation messages: pydantic's error items as sentences with a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from flowmill.configs.base import Component, Section
from flowmill.configs.schema import RunConfig
from flowmill.configs.suggestions import did_you_mean


def place(item: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the location of an error item, without the union members that pydantic adds."""
    location = tuple(part for part in item["loc"] if not _CONTAINER.match(str(part)))
    return location[:-1] if location and _UNION_MEMBER.search(str(location[-1])) else location


def relevant(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Omit errors of values with an error inside: a list is then also too short, or not the text that it may be."""
    places = [place(item) for item in items]
    return [
        item
        for item, at in zip(items, places, strict=True)
        if not any(len(other) > len(at) and other[: len(at)] == at for other in places)
    ]


def explain(item: Mapping[str, Any], schema: type[BaseModel] = RunConfig) -> str:
    """Return one error item of pydantic, on data of a schema, as a sentence or two, without its origin."""
    location = ".".join(str(part) for part in place(item))
    if item["type"] == "extra_forbidden":
        instead = _section_at(item["loc"][:-1], schema, schema=schema).removed.get(str(item["loc"][-1]))
        if instead is not None:
            return f"setting '{location}' no longer exists. {instead}"
        return f"unknown setting '{location}'. {_suggest(item['loc'], schema)}"
    if item["type"] == "missing":
        return f"setting '{location}' is required and missing."
    if item["type"] == "value_error":
        return f"'{location or 'config'}': {item['msg'].removeprefix('Value error, ')}."
    message = requirement(item)
    section = _section_at(item["loc"], schema=schema)
    if item["type"] in ("model_type", "dict_type") and section is not None and issubclass(section, Component):
        message = "it must be a name with options; give the name alone, or {name: ..., options: {...}}"
    return f"'{location or 'config'}' is {item['input']!r}; {message}."


def requirement(item: Mapping[str, Any]) -> str:
    """Return the part of a message that says which values are allowed, such as "it must be greater than 0"."""
    said = item["msg"].removeprefix("Value error, ").removesuffix(".").replace(" after validation", "")
    return _REMEDIES.get(item["type"]) or re.sub(r"^\w+ should ", "it must ", said)


def first_error(error: ValidationError) -> str:
    """Return the first error in data of a program, in a short line without the data."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    location = ".".join(str(part)[:60] for part in first["loc"])
    return f"{location or 'it'}: {first['msg'].removeprefix('Value error, ')[:300]}"


_CONTAINER = re.compile(r"(tuple|list|dict|set)\[")
_UNION_MEMBER = re.compile(r"[\[(]|^constrained-|^(int|float|str|bool)$")
_REMEDIES = {
    "tuple_type": "it must be a list like [a, b]",
    "list_type": "it must be a list like [a, b]",
    "model_type": "it must be a section with keys, like {key: value}",
    "dict_type": "it must be a mapping like {key: value}",
    "missing": "it has too few entries",
}


def _suggest(location: Sequence[int | str], schema: type[BaseModel]) -> str:
    """Suggest the setting of the same name in another section, else the most similar one in this section."""
    leaf, valid = str(location[-1]), list(_section_at(location[:-1], schema, schema=schema).model_fields)
    elsewhere = [name for name in _settings(schema) if name.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"Did you mean {' or '.join(repr(name) for name in elsewhere[:2])}? Valid: {', '.join(valid)}."
    return did_you_mean(leaf, valid)


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        elif inner is not Component:
            yield from _settings(inner, f"{prefix}{name}.")


def _section_at(location: Sequence[int | str], default: Any = None, *, schema: type[BaseModel] = RunConfig) -> Any:
    """Return the section at a location of the schema, or the innermost one around it if there is a default."""
    section = schema
    for part in location:
        if isinstance(part, int) or str(part).isdecimal():
            continue
        inner = section_of(section.model_fields[part].annotation) if part in section.model_fields else None
        if inner is None:
            return default and section
        section = inner
    return section


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field of the schema holds, also as an optional value or in a list; None if none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in get_args(annotation):
        section = section_of(inner)
        if section is not None:
            return section
    return None
