"""Schemas of other programs' files: those of installed packages, and copies under ``tests/golden/schemas``.

Most programs ignore a key they do not know; a schema that is closed does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "schemas"


def stored(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())["schema"]


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the keys that are named and no others."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    named = isinstance(schema.get("properties"), dict) and not isinstance(schema.get("additionalProperties"), dict)
    return {name: closed(value) for name, value in schema.items()} | ({"additionalProperties": False} if named else {})


def misspelled(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield data once for each of its keys, with that key misspelled, and the path of the key."""
    for place, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        if isinstance(data, dict):
            others = {name: other for name, other in data.items() if name != place}
            yield ".".join(map(str, (*path, place))), {**others, f"{place}x": value}
        for where, changed in misspelled(value, (*path, place)):
            copy = data.copy()
            copy[place] = changed
            yield where, copy
