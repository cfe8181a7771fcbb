"""Reads prompts from rows of any source, and refuses unusable ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, Literal

from flowmill.configs.errors import LISTED, DataError, PromptError, listed
from flowmill.configs.fingerprint import canonical_json, fingerprint, hash_text
from flowmill.configs.gc_tuning import without_collecting
from flowmill.configs.model_families import spec_of
from flowmill.configs.schema import PromptsSection, RunConfig
from flowmill.tasks.inputs.chats import is_chat, read_messages
from flowmill.tasks.inputs.columns import used_columns, value_of
from flowmill.tasks.inputs.prompt_rows import ImageSource, as_read, images_of, metadata_of, split_keys, text_of
from flowmill.tasks.inputs.rows.files import Stamps, stamps_of
from flowmill.tasks.inputs.rows.read import Row, source_rows
from flowmill.tasks.inputs.rows.row import Names, RowLocation, dataset_id

#: Metadata key of the content hash of a prompt's start image, or of the joined hashes of several.
IMAGE = "image_xxh3"
#: Metadata key of the name of the prompt source, where there are several.
SOURCE = "prompt_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrompt:
    """One row of a prompts artifact."""

    id: str
    """Identity of the prompt's group: a hash of text and metadata."""
    text: str
    """The prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the source, for rewards; also the content hash of start images."""

    @property
    def condition(self) -> str:
        """Key of the prompt's encoding, see ``condition_key``."""
        return condition_key(self.text, self.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(StoredPrompt):
    """One prompt with the other columns of its source."""

    images: tuple[ImageSource, ...] = ()
    """Files of the start images, in order."""
    id: str = field(init=False)

    def __post_init__(self) -> None:
        """Compute the identity once, with a fast path without metadata: a list may hold a million prompts."""
        plain = None if self.metadata else f"[{encode_basestring(self.text)},{{}}]"
        digest = fingerprint([self.text, dict(self.metadata)]) if plain is None else hash_text(plain)
        object.__setattr__(self, "id", digest[:16])


def stored_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata after a round trip through JSON, so that a trial passes a reward the same values as scoring."""
    return dict(json.loads(canonical_json(dict(metadata))))


def condition_key(text: str, metadata: Mapping[str, Any]) -> str:
    """Return the key of a prompt's conditioning: its text and the content hashes of its start images."""
    image = metadata.get(IMAGE) if metadata else None
    return text if image is None else f"{text} [image {image}]"


#: Split of the prompts of ``data.heldout``.
HELD_OUT_ROWS = "heldout_rows"
#: The normalized text of a prompt, and the content keys of its images.
Seen = tuple[str, str | None]


def seen(prompt: Prompt) -> Seen:
    """Return a value that is equal for prompts that a person cannot tell apart."""
    return as_read(prompt.text), prompt.metadata.get(IMAGE)


def image_column(config: RunConfig) -> str | None:
    """Return the column of the images that prompts come with, in lists or in rows of data; None without any."""
    return config.prompts.image or (None if config.data is None else config.data.prompt_image)


def image_keys(metadata: Mapping[str, Any]) -> list[str]:
    """Return the content key of each start image of a prompt, in order."""
    return split_keys(str(metadata[IMAGE])) if IMAGE in metadata else []


def image_files(prompts: Iterable[Prompt]) -> dict[str, ImageSource]:
    """Return the files of the prompts' start images by content key."""
    files: dict[str, ImageSource] = {}
    for prompt in prompts:
        if prompt.images:
            files |= zip(image_keys(prompt.metadata), prompt.images, strict=True)
    return files


def uses_guidance(config: RunConfig) -> bool:
    """Return whether guidance takes a negative prompt: its scale is above 1 and not an input of the model."""
    return config.model.guidance_scale > 1 and spec_of(config.model.policy).guidance == "pair"


def listed_prompts(section: PromptsSection, split: Literal["train", "heldout"]) -> list[Prompt]:
    """Return the prompts of all sources of a split; with several sources the metadata name the source."""
    all_prompts: list[Prompt] = []
    for setting, source in section.lists(split).items():
        prompts = read_prompts(source, section, where=setting)
        for prompt in prompts:
            _check_reserved(prompt, setting)
        if not section.sources:
            return prompts
        name = section.sources[int(setting.split(".")[2])].name
        all_prompts += [replace(prompt, metadata={**prompt.metadata, SOURCE: name}) for prompt in prompts]
    return _taking_turns(all_prompts) if split == "heldout" else all_prompts


def _check_reserved(prompt: Prompt, setting: str) -> None:
    if SOURCE in prompt.metadata:
        raise PromptError(
            f"{setting}: prompt {prompt.text!r} has a column '{SOURCE}', which is where the name of its source goes. "
            "Rename the column."
        )


def _taking_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts interleaved by source, so that the first ones cover all sources."""
    places: dict[str, int] = {}
    keyed: list[tuple[int, int, Prompt]] = []
    for prompt in prompts:
        name = str(prompt.metadata[SOURCE])
        keyed.append((places.setdefault(name, 0), len(keyed), prompt))
        places[name] += 1
    return [prompt for _, _, prompt in sorted(keyed, key=lambda one: one[:2])]


def read_prompts(source: str | Sequence[str], section: PromptsSection, *, where: str) -> list[Prompt]:
    """Return the prompts of a source.

    Args:
        source: a file, several, a folder, or a Hugging Face dataset id, see ``row_files``; or a list of texts.
        section: names the prompt column and the dataset split.
        where: the setting that names the source, for errors.
    """
    if not isinstance(source, str):
        rows = ((RowLocation(where, where, n), {section.column: text}) for n, text in enumerate(source, 1))
        return _prompts(rows, where, section, where)
    stamps = stamps_of(source)
    if section.image is not None or not stamps:
        # Images may change while the list does not.
        return _file_prompts(source, section, where)
    return list(_unchanged_prompts(source, section.model_dump_json(), where, stamps))


@lru_cache(maxsize=16)
def _unchanged_prompts(source: str, section: str, where: str, stamps: Stamps) -> tuple[Prompt, ...]:
    """Return the prompts of unchanged files from a cache, as one command reads a long list several times."""
    return tuple(_file_prompts(source, PromptsSection.model_validate_json(section), where))


def _file_prompts(source: str, section: PromptsSection, where: str) -> list[Prompt]:
    names = Names(section.column, texts=frozenset(used_columns(section.column)))
    try:
        return _prompts(source_rows(source, section.split, where, names), source, section, where)
    except DataError as error:
        raise PromptError(str(error)) from None


def _prompts(rows: Iterable[tuple[RowLocation, Row]], source: str, section: PromptsSection, where: str) -> list[Prompt]:
    prompts, first, reasons, count = list[Prompt](), dict[str, RowLocation](), list[str](), 0
    # There may be millions of objects, none of them garbage.
    with without_collecting():
        for place, row in rows:
            try:
                prompt = _prompt(row, section, place)
                if (earlier := first.setdefault(prompt.id, place)) != place:
                    raise _repeated(prompt, place, earlier)
            except (PromptError, DataError) as error:
                count += 1
                if count <= LISTED:
                    reasons.append(f"{where}: {str(error).removeprefix(f'{where}: ')}")
            else:
                prompts.append(prompt)
    if count:
        raise PromptError(listed(reasons, count))
    if not prompts:
        raise PromptError(f"{where}: '{source}' holds no prompts. Write some into it, or name another.")
    return prompts


def _repeated(prompt: Prompt, place: RowLocation, first: RowLocation) -> PromptError:
    earlier, later = (str(each).removeprefix(f"{place.where}: ") for each in (first, place))
    return PromptError(
        f"{place.where}: prompt {prompt.text!r} appears twice: {earlier} and {later}. Groups are identified by their "
        "prompt; remove one."
    )


def _prompt(row: Row, section: PromptsSection, place: RowLocation) -> Prompt:
    if isinstance(row, DataError):
        raise row
    text = text_of(_column(row, section.column, place), place, "prompts.column")
    metadata = metadata_of(row, (*used_columns(section.column), section.image), place) if len(row) > 1 else {}
    images: tuple[ImageSource, ...] = ()
    if section.image is not None:
        images, metadata[IMAGE] = images_of(row, section.image, place, "prompts.image")
    try:
        prompt = Prompt(text=text, metadata=metadata, images=images)
    except (TypeError, ValueError) as error:
        raise PromptError(f"{place}: metadata must be plain JSON values: {error}.") from None
    return prompt


def prompt_set(section: PromptsSection, split: Literal["train", "heldout"]) -> str | None:
    """Return the names of prompt lists: a file's name without its folders, a dataset's id as it is."""
    return ", ".join(map(list_name, section.lists(split).values())) or None


def _column(row: Mapping[str, Any], column: str, place: RowLocation) -> Any:
    """Return the prompt of a row; of messages the text of the only one."""
    try:
        value = value_of(row, column)
    except ValueError as error:
        raise PromptError(f"{place}: {error}. Mend the row, or set prompts.column.") from None
    if value is None and column not in row:
        raise PromptError(f"{place} has no '{column}'; it has {', '.join(row) or 'nothing'}. Set prompts.column.")
    if not is_chat(value):
        return value
    messages = read_messages(value, f"{place}, {column}")
    if [message.role for message in messages] != ["user"]:
        roles = ", ".join(message.role for message in messages)
        raise PromptError(f"{place}, {column} is a chat of {roles}; a prompt is one message of the user. Mend the row.")
    return messages[0].text


def list_name(source: str | Sequence[str]) -> str:
    """Return the name of one prompt list."""
    if not isinstance(source, str):
        return f"{len(source)} prompts"
    return dataset_id(source) or source.replace("\\", "/").rpartition("/")[2]
