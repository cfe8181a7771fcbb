"""The parts of a row by the names of their columns: as it is, inside another (``input.messages``), or of several in a
text (``{a} {b}``); pairs in their order, and lists of samples as rows of one. Tables of texts hold messages and objects
as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError
from flowmill.tasks.inputs.chats import as_messages, from_json, is_chat
from flowmill.tasks.inputs.rows.row import RowLocation, as_media

_Place = tuple[str | int, ...]
_Convert = Callable[[Any, _Place], Any]
_FIELD = re.compile(r"\{([^{}]+)\}")
#: What a column says of which of two samples is preferred.
_FIRST, _TIE = ("1", "1.0", "a", "first", "true", "response_a", "model_a"), ("0.5", "tie", "same", "equal", "both")
_SECOND = ("0", "0.0", "2", "2.0", "b", "second", "false", "response_b", "model_b")
#: Between a chat as a text and its last answer, as in HH-RLHF.
_ANSWER = "\n\nAssistant:"


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has a value of a column; of a template, its first column and all names of the others."""
    if fields := _FIELD.findall(name):
        return has_column(row, fields[0]) and all(each in row for each in fields)
    return value_of(row, name) not in (None, "", [])


def value_of(
    row: Mapping[str, Any], name: str, convert: _Convert = lambda value, place: value, place: _Place = ()
) -> Any:
    """Return the value of a column; None if the row lacks it. Of a list of objects, a column inside has a list.

    Args:
        convert: returns the value to take for one at a place, which consists of keys, and of numbers in lists.
        place: that of the row.

    Raises:
        ValueError: a template has a column that the row lacks, or that is no text or number.
    """
    if name in row:
        return convert(as_messages(row[name]), (*place, name))
    if _FIELD.search(name):
        return _filled(row, name)
    first, _, rest = name.partition(".")
    inner, below = from_json(row.get(first)) if rest else None, (*place, first)
    if isinstance(inner, list) and inner and all(isinstance(each, Mapping) for each in inner):
        return [value_of(each, rest, convert, (*below, number)) for number, each in enumerate(inner)]
    return value_of(inner, rest, convert, below) if isinstance(inner, Mapping) else None


def used_columns(name: str) -> list[str]:
    """Return the columns of a row that a name takes."""
    return _FIELD.findall(name) or [name, name.partition(".")[0]]


def _filled(row: Mapping[str, Any], template: str) -> str:
    """Return a template with the values of its columns, without spaces where the last ones are empty."""
    for field in _FIELD.findall(template):
        if field not in row:
            raise ValueError(f"there is no column '{field}' for the template {template!r}; there are {', '.join(row)}")
        if not isinstance(row[field], str | int | float | None):
            raise ValueError(f"the column '{field}' of the template {template!r} is {str(row[field])[:60]}, no text")
    return _FIELD.sub(lambda match: "" if row[match[1]] is None else str(row[match[1]]), template).rstrip()


def shaped(
    row: Mapping[str, Any], section: DataSection, place: RowLocation, *, texts: bool
) -> Sequence[Mapping[str, Any]]:
    """Return the rows of one sample, or one pair, that a row stands for, with each part under the name of its column.

    Args:
        texts: all samples are texts, also those that look like base64 of images.

    Raises:
        DataError: the row has not the shape that the section names.
    """
    parts = [section.prompt, *_samples(section), *filter(None, (section.rating, section.prompt_image))]
    # A text that a model has written is no list of messages.
    if {"artifact", "artifact_0"}.isdisjoint(row):
        row = _with_messages(row, parts)
    listed = not section.paired and section.messages is None and isinstance(row.get(section.sample), list)
    if not listed and not {"preferred", "rank"} & {*section.columns} and all(name in row for name in parts):
        return (row,)
    try:
        whole = _with_parts(row, section, parts)
        if not texts:
            # A value that moves would lose its place in the source.
            medias = {name: value_of(row, name, partial(_media_at, place.number)) for name in _samples(section)}
            whole |= {name: media for name, media in medias.items() if name in whole}
        if section.paired:
            return (_pair(whole, section),)
        return _singles(whole, section)
    except ValueError as error:
        raise DataError(f"{place}: {error}. Mend the row, or set data.columns.") from None


def _with_messages(row: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    chats = {name: as_messages(row[name]) for name in names if isinstance(row.get(name), str)}
    return {**row, **chats} if any(map(is_chat, chats.values())) else row


def _samples(section: DataSection) -> list[str]:
    if section.paired:
        return [str(section.chosen), str(section.rejected)]
    return [section.sample if section.messages is None else section.messages]


def _media_at(number: int, value: Any, place: _Place) -> Any:
    """Return the image or clip that a value of the row of a number holds in base64, or those of a list."""
    if isinstance(value, list):
        return [_media_at(number, each, (*place, index)) for index, each in enumerate(value)]
    return as_media(value, number, place)


def _with_parts(row: Mapping[str, Any], section: DataSection, parts: Sequence[str]) -> dict[str, Any]:
    lacking = [name for name in parts if name and name not in row]
    values = {name: value_of(row, name) for name in lacking}
    used = {each for name in lacking if values[name] is not None for each in used_columns(name)} - {*section.keep}
    whole = {name: value for name, value in row.items() if name not in used}
    whole |= {name: value for name, value in values.items() if value is not None}
    return whole | ({"": ""} if "" in parts else {})


def _pair(row: dict[str, Any], section: DataSection) -> dict[str, Any]:
    """Return a row with the better sample as the chosen one; without a prompt of its own, with the beginning of both
    texts as prompt."""
    chosen, rejected = _samples(section)
    if (column := section.columns.get("preferred")) is not None:
        if column not in row:
            raise ValueError(f"there is no '{column}', which says which sample is preferred")
        said = str(row.pop(column)).strip().lower()
        if said not in (*_FIRST, *_SECOND, *_TIE):
            raise ValueError(f"'{column}' is {said[:60]!r}, which is neither of the two samples nor a tie")
        if said in _SECOND:
            row = row | {chosen: row.get(rejected), rejected: row.get(chosen)}
        row = row | ({"tie": "true"} if said in _TIE else {})
    both = [row.get(chosen), row.get(rejected)]
    if section.prompt == "" and all(isinstance(each, str) for each in both):
        first, second = map(str, both)
        begin = first[: next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))]
        cut = begin.rfind(_ANSWER) + len(_ANSWER) if _ANSWER in begin else begin.rfind(" ")
        if cut <= 0:
            raise ValueError(f"'{chosen}' and '{rejected}' have no common beginning, which would be their prompt")
        row = row | {"": begin[:cut], chosen: first[cut:], rejected: second[cut:]}
    return row


def _singles(row: dict[str, Any], section: DataSection) -> Sequence[Mapping[str, Any]]:
    """Return a row for each sample of a list, with its rating."""
    samples, rating = row.get(section.sample), section.rating
    is_chat = isinstance(samples, list) and any(isinstance(each, Mapping) and "role" in each for each in samples)
    if (label := section.columns.get("preferred")) is not None:
        raise ValueError(f"'{label}' says which of two samples is preferred, but no chosen and rejected ones are named")
    if {"rating", "rank"} <= {*section.columns}:
        raise ValueError("data.columns.rating and data.columns.rank both say how samples are rated. Name one of them")
    if section.messages is not None or not isinstance(samples, list) or is_chat:
        if "rank" in section.columns:
            raise ValueError(
                f"'{rating}' is a rank among the samples of a list, but this row has one sample. List the samples of a "
                "prompt and their ranks in one row, or give ratings as data.columns.rating"
            )
        return (row,)
    if rating is None:
        return [row | {section.sample: each} for each in samples]
    ratings = row.get(rating)
    if not isinstance(ratings, list) or len(ratings) != len(samples):
        has = len(ratings) if isinstance(ratings, list) else "no"
        raise ValueError(f"there are {len(samples)} samples in '{section.sample}', but {has} ratings in '{rating}'")
    if "rank" in section.columns and ratings:
        if wrong := [each for each in ratings if not isinstance(each, str | int | float)]:
            raise ValueError(f"'{rating}' holds {str(wrong[0])[:60]}, no rank")
        ranks, (low, high) = [float(each) for each in ratings], section.scale
        best, steps = min(ranks), max(ranks) - min(ranks)
        ratings = [high - (each - best) / steps * (high - low) if steps else (low + high) / 2 for each in ranks]
    return [row | {section.sample: each, rating: value} for each, value in zip(samples, ratings, strict=True)]
