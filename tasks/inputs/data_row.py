"""One row of data: its prompt, samples and rating, checked."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowmill.configs.data import DataSection, PriorRowsSection
from flowmill.configs.errors import DataError
from flowmill.configs.fingerprint import hash_text
from flowmill.storage.names import inside
from flowmill.tasks.inputs.chats import check_columns, history_of, is_chat, read_chat, read_replies
from flowmill.tasks.inputs.data_file import DataFile
from flowmill.tasks.inputs.prompt_rows import ImageSource, file_below, images_of, kind_of, metadata_of, text_of
from flowmill.tasks.inputs.prompts import IMAGE, Prompt, Seen, seen
from flowmill.tasks.inputs.rows.bounds import too_many_bytes
from flowmill.tasks.inputs.rows.read import folder_of
from flowmill.tasks.inputs.rows.remote import is_remote
from flowmill.tasks.inputs.rows.row import MEDIA, REPEATED, Media, RowLocation, as_media, is_unicode

#: Values of a column 'tie' for a pair of which neither sample is better.
_TRUE = ("true", "1", "1.0", "yes")
#: Truth values as ratings, also as CSV files hold them.
_TRUTH = {"true": 1.0, "false": 0.0}


#: Files of the images of a prompt, and their joined content keys.
PromptImage = tuple[tuple[ImageSource, ...], str]


def prompt_of(text: str, metadata: Mapping[str, Any], image: PromptImage | None) -> Prompt:
    """Return a prompt with the other columns of its row, and its images."""
    if image is None:
        return Prompt(text=text, metadata=metadata)
    images, keys = image
    return Prompt(text=text, metadata={**metadata, IMAGE: keys}, images=images)


def stored_image(image: PromptImage | None) -> list[Any] | None:
    """Return plain values, from which ``restored_image`` makes the same."""
    if image is None:
        return None
    plain = ([str(each), ""] if isinstance(each, Path) else ["", b64encode(each).decode()] for each in image[0])
    return [list(plain), image[1]]


def restored_image(values: list[Any] | None) -> PromptImage | None:
    """Return images from the plain values of ``stored_image``."""
    if values is None:
        return None
    return tuple(Path(path) if path else b64decode(data) for path, data in values[0]), values[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One row: a prompt and its samples."""

    place: str
    """File and line, for messages."""
    text: str
    """The prompt."""
    metadata: Mapping[str, Any]
    """The other columns."""
    samples: tuple[DataFile, ...]
    """One sample, or the chosen and the rejected one."""
    image: PromptImage | None
    """Files of the prompt's input images and their joined content keys, if it has some."""
    ratings: tuple[float | None, ...]
    """Rating of each sample on the section's scale; 1 and 0 for a pair, 0.5 for a tie; None if rows have no ratings."""

    captions: tuple[str, ...] = ()
    """The prompt and the other captions of the samples; empty if there is one."""
    repeats: int = 1
    """Times that the row counts."""
    is_prior: bool = False
    """Whether it is one of ``data.prior``."""

    @property
    def prompt(self) -> Prompt:
        """The prompt, with the other columns."""
        return prompt_of(self.text, self.metadata, self.image)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt with each caption."""
        return [prompt_of(text, self.metadata, self.image) for text in self.captions or (self.text,)]

    @property
    def seen_prompts(self) -> list[Seen]:
        """The prompts as ``seen`` returns them. Messages before the answer of a chat stand where an image does, as
        chats have no images: equal first messages do not make two questions equal. Those of the system do not count."""
        history = history_of(self.samples[0], system=False)
        return [(text, history or image) for text, image in map(seen, self.prompts)]

    @property
    def empty_prompt(self) -> Prompt:
        """The prompt without its caption and the other columns, but with its images."""
        return prompt_of("", {}, self.image)

    @property
    def rated_group(self) -> str:
        """The group of a rated sample: its prompt, and the messages of a chat after that before its answer."""
        history = history_of(self.samples[0])
        return f"{self.prompt.id}-{history}" if history else self.prompt.id

    @staticmethod
    def restored(values: list[Any]) -> DataRow:
        """Return a row from its plain values."""
        text, metadata, place, samples, ratings, image, captions, is_prior = values
        return DataRow(
            place=place,
            text=text,
            metadata=metadata,
            samples=tuple(DataFile.restored(sample) for sample in samples),
            image=restored_image(image),
            ratings=tuple(ratings),
            captions=tuple(captions),
            is_prior=is_prior,
        )


def read_row(row: Mapping[str, Any], section: DataSection, place: RowLocation, *, texts: bool) -> DataRow:
    """Return a row of a section; raise DataError or PromptError if it cannot be used.

    Args:
        texts: all samples are texts, whatever they end in.
    """
    prompt, samples, columns = _contents(row, section, place, texts)
    setting = "data.columns.prompt" if section.trained else None
    may_be_empty = not section.trained or section.prompt == ""
    captions = _captions(prompt, place, setting) if section.captions == "several" else ()
    prompt = captions[0] if captions else prompt
    text = prompt if prompt == "" and may_be_empty else text_of(prompt, place, setting)
    used = {section.prompt, *columns, section.rating, section.prompt_image} - {*section.keep}
    named = section.prompt_image
    if named is not None and any(sample.is_chat for sample in samples):
        raise DataError(f"{place}: images come before a prompt alone, not into a chat of several messages. Remove it.")
    image = None if named is None else images_of(row, named, place, "data.columns.prompt_image")
    tie = section.paired and str(row.get("tie", "")).strip().lower() in _TRUE
    if tie and section.trained:
        raise DataError(f"{place} is a tie: neither sample is better, so there is nothing to learn. Remove the row.")
    try:
        if section.trained:
            metadata = metadata_of(row, used, place)
        else:
            # Several raters, or one who has no name, may judge the same samples.
            metadata = {"rater": str(row.get("rater") or ""), "row": place.before + place.number}
    except RecursionError:
        raise DataError(f"{place}: its columns are nested too deeply. Flatten them.") from None
    ratings = ((0.5, 0.5) if tie else (1.0, 0.0)) if section.paired else (_rating(row, section, place),)
    return DataRow(
        place=str(place),
        text=text,
        metadata=metadata,
        samples=samples,
        image=image,
        ratings=ratings,
        captions=captions if len(captions) > 1 else (),
        repeats=_repeats(section, place, samples[0]),
        is_prior=isinstance(section, PriorRowsSection),
    )


def _captions(prompt: Any, place: RowLocation, setting: str | None) -> tuple[str, ...]:
    """Return the different captions of a list, or those on the lines of a text."""
    lines = prompt.splitlines() if isinstance(prompt, str) else prompt
    if not isinstance(lines, list | tuple):
        return ()
    texts = [each.strip() if isinstance(each, str) else each for each in lines]
    return tuple(dict.fromkeys(text_of(each, place, setting) for each in texts if each != ""))


def _repeats(section: DataSection, place: RowLocation, sample: DataFile) -> int:
    if not section.repeated:
        return 1
    if isinstance(section.repeats, int):
        return section.repeats
    folder = (f"{sample.folder}/{sample.path}" if sample.path else place.source).rpartition("/")[0].rpartition("/")[2]
    name = REPEATED.fullmatch(folder)
    if name is None or not int(name[1]):
        raise DataError(
            f"{place}: its folder '{folder}' does not begin with a number above 0 and '_' (10_name), but data.repeats "
            "is 'folders'. Rename it, or set data.repeats to a number."
        )
    return int(name[1])


def _contents(
    row: Mapping[str, Any], section: DataSection, place: RowLocation, texts: bool
) -> tuple[Any, tuple[DataFile, ...], tuple[str, ...]]:
    if section.messages is not None:
        check_columns(row, str(place))
        prompt, sample = read_chat(row.get(section.messages), f"{place}, {section.messages}")
        return prompt, (sample,), (section.messages,)
    options = ("chosen", "rejected") if section.paired else ("sample",)
    columns = tuple(str(getattr(section, option)) for option in options)
    replies = {column: row.get(column) for column in columns}
    if any(map(is_chat, (row.get(section.prompt), *replies.values()))):
        check_columns(row, str(place))
        return *read_replies(row.get(section.prompt), replies, str(place)), columns
    if section.prompt not in row:
        has = ", ".join(row) or "nothing"
        raise DataError(f"{place} has no '{section.prompt}'; it has {has}. {_remedy(section, 'prompt')}")
    return row[section.prompt], tuple(_sample(row, each, section, place, texts) for each in options), columns


def _rating(row: Mapping[str, Any], section: DataSection, place: RowLocation) -> float | None:
    if section.rating is None:
        return None
    if section.rating not in row:
        raise DataError(f"{place} has no '{section.rating}', the rating. {_remedy(section, 'rating')}")
    cell, (low, high) = row[section.rating], section.scale
    # CSV files hold texts.
    truth = _TRUTH.get(str(cell).strip().lower()) if isinstance(cell, str | bool) else None
    value = _number(cell) if truth is None else truth
    name, setting = f"{place}: the rating '{section.rating}' is {cell!r}", "data.scale" if section.trained else "scale"
    if value is None:
        raise DataError(f"{name}, no number. Mend the row.")
    if truth is not None and section.scale != (0, 1):
        raise DataError(
            f"{name}, which is {truth:g}, but the scale is {low} to {high}. Set {setting} to [0, 1], or mend the row."
        )
    if not low <= value <= high:
        raise DataError(f"{name}, but the scale is {low} to {high}. Mend the row, or set {setting}.")
    return value


def _number(cell: Any) -> float | None:
    try:
        value = float(cell) if isinstance(cell, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _remedy(section: DataSection, option: str, verb: str = "Add") -> str:
    """Return the remedy for a column that rows lack; the columns of judgments have names that no setting changes."""
    return f"{verb} it, or {f'set data.columns.{option} to another' if section.trained else 'rename its'} column."


def _sample(row: Mapping[str, Any], option: str, section: DataSection, place: RowLocation, texts: bool) -> DataFile:
    column = str(getattr(section, option))
    cell = row.get(column)
    value = cell if texts else as_media(cell, place.number, (column,))
    folder, name = folder_of(place), f"{place}, {column}"
    if isinstance(value, Media):
        if large := too_many_bytes(len(value.data or b"")):
            raise DataError(f"{name} {large}. Scale it down.")
        name, path = name if value.column else value.name, place.source.rpartition("/")[2]
        return DataFile(name, value.key, None, folder, path, value.start, value.size, column=value.column)
    # An image or clip of datasets has a path.
    value = value.get("path") if isinstance(value, Mapping) else value
    # Texts of 'flowmill rate --export', which names their artifacts, may be empty: no cell is missing.
    exported = texts and not section.trained and not {"artifact", "artifact_0"}.isdisjoint(row)
    if not isinstance(value, str) or not (value.strip() or exported):
        kind = "a text" if texts else "the path of an image or clip, or a text"
        blank = cell is None or isinstance(value, str)
        problem = f"has no '{column}', {kind}" if blank else f"has {kind_of(cell)} as '{column}', not {kind}"
        raise DataError(f"{place} {problem}. {_remedy(section, option, 'Add' if blank else 'Mend')}")
    if not is_unicode(value):
        raise DataError(f"{name} has half a character, which is no Unicode text. Write it again.")
    if texts or not (value[-5:].lower().endswith(MEDIA) and Path(value).suffix):
        return DataFile(name=name, key=hash_text(value), text=value)
    try:
        if not is_remote(folder) and (large := too_many_bytes(file_below(Path(folder), value).stat().st_size)):
            raise ValueError(f"'{value}' {large}. Scale it down")
        inside(value)
    except (ValueError, OSError) as error:
        raise DataError(f"{place}: {error}.") from None
    name = str(place) if place.source.endswith(f"/{value}") else f"{place}: {value}"
    return DataFile(name=name, folder=folder, path=value)
