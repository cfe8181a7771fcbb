"""The settings of a schema, walked with their annotations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from flowmill.configs.base import Section


def section_fields(section: type[Section], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting of a schema with its annotation, list items by a star."""
    for name, field in section.model_fields.items():
        inner = [each for each in and_inside(field.annotation) if is_section(each)]
        for each in inner:
            listed = each is not field.annotation and tuple in map(get_origin, and_inside(field.annotation))
            yield from section_fields(each, f"{above}{name}.{'*.' * listed}")
        if not inner:
            yield f"{above}{name}", field.annotation


def and_inside(annotation: Any) -> list[Any]:
    """Return an annotation and all annotations in it."""
    return [annotation, *(inner for argument in get_args(annotation) for inner in and_inside(argument))]


def is_section(annotation: Any) -> bool:
    """Return whether an annotation is a section."""
    return isinstance(annotation, type) and issubclass(annotation, Section)
