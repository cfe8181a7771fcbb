"""The bounds and choices that types of options state, and values outside of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from flowmill.configs import registry
from flowmill.configs.registry import Table, resolve

#: By kind of bound: its sign, and the distance to a value that it refuses.
_BOUNDS = {Gt: (">", 0), Ge: (">=", -1), Lt: ("<", 0), Le: ("<=", 1)}


def option_types(table: Table) -> Iterator[tuple[type, dataclasses.Field[Any], Any]]:
    """Yield the options of a table's components that are dataclasses: (component or its options, field, type)."""
    for name in table:
        component = resolve(table, name, label="component")
        for kind in (component, getattr(component, "options_type", None)):
            for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
                if field.init:
                    yield kind, field, registry._type_of(kind, field.name)[0]


def owner(kind: type, option: str) -> str:
    """Return which class states an option: ``Class.option``."""
    return next(f"{base.__name__}.{option}" for base in kind.__mro__ if option in vars(base).get("__annotations__", {}))


def _parts(kind: Any, *notes: Any) -> Iterator[tuple[Any, list[tuple[str, float, float]]]]:
    """Yield the members of a union and the entries of a list, each with its bounds: sign, limit, refused value."""
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        yield from _parts(kind, *notes, *(each for note in more for each in getattr(note, "metadata", [note])))
    elif get_origin(kind) is Literal or not get_args(kind):
        limits = [(*_BOUNDS[type(note)], *dataclasses.astuple(note)) for note in notes if type(note) in _BOUNDS]
        yield kind, [(sign, limit, limit + beyond) for sign, beyond, limit in limits]
    else:
        for inner in get_args(kind):
            yield from _parts(inner, *notes)


def stated(kind: Any) -> str | None:
    """Return bounds of numbers like ``> 0, < 1`` and choices like ``mean | sum``; None for other types."""
    found = {}
    for part, bounds in _parts(kind):
        if get_origin(part) is Literal:
            found[" | ".join(map(str, get_args(part)))] = None
        elif part in (int, float):
            found[", ".join(f"{sign} {limit}" for sign, limit, _ in bounds) or "any number"] = None
    return "; ".join(found) or None


def outside(kind: Any) -> list[Any]:
    """Return the first values beyond the bounds of a number, and one that is no number and no choice."""
    return [{"no": "such value"}, *(refused for _, bounds in _parts(kind) for *_, refused in bounds)]
