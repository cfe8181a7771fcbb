"""Reads prompts from files, ``save_to_disk`` folders or dataset ids, and refuses unusable ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, Literal

from configs.errors import PromptError
from configs.fingerprint import canonical_json, fingerprint, hash_text
from configs.gc_tuning import without_collecting
from configs.schema import PROMPT_FILES, PromptsSection, RunConfig
from models.policies import BLANK_GUIDANCE, EMBEDDED_GUIDANCE
from tasks.inputs.prompt_files import READERS, hub_rows
from tasks.inputs.prompt_rows import (
    ImageSource,
    RowLocation,
    Rows,
    as_read,
    check_metadata,
    images_of,
    split_keys,
    text_of,
)
from tasks.inputs.saved_datasets import is_saved_dataset, saved_files

#: Metadata key of the content hash of a prompt's start image, or of the joined hashes of several.
IMAGE = "image_xxh3"
#: Metadata key of the name of the prompt source, where there are several.
SOURCE = "prompt_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt with the other columns of its source."""

    text: str
    """The prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns or keys, for rewards; also the content hash of start images."""
    images: tuple[ImageSource, ...] = ()
    """Files of the start images, in order."""
    id: str = field(init=False)
    """Identity of the prompt's group: a hash of text and metadata."""

    def __post_init__(self) -> None:
        """Compute the identity once, with a fast path without metadata: a list may hold a million prompts."""
        plain = None if self.metadata else f"[{encode_basestring(self.text)},{{}}]"
        found = fingerprint([self.text, dict(self.metadata)]) if plain is None else hash_text(plain)
        object.__setattr__(self, "id", found[:16])

    @property
    def condition(self) -> str:
        """Key of the prompt's encoding, see ``condition_key``."""
        return condition_key(self.text, self.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrompt:
    """One row of a prompts artifact."""

    id: str
    """Group identity."""
    text: str
    """The prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the source."""

    @property
    def condition(self) -> str:
        """Key of the prompt's encoding, see ``condition_key``."""
        return condition_key(self.text, self.metadata)


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
    """Return the column of the images that prompts come with, in lists or in given rows; None without any."""
    return config.prompts.image or (None if config.data is None else config.data.prompt_image)


def image_keys(metadata: Mapping[str, Any]) -> list[str]:
    """Return the content key of each start image of a prompt, in order."""
    return split_keys(str(metadata[IMAGE])) if IMAGE in metadata else []


def image_files(prompts: Iterable[Prompt]) -> dict[str, ImageSource]:
    """Return the files of the prompts' start images by content key."""
    found: dict[str, ImageSource] = {}
    for prompt in prompts:
        if prompt.images:
            found |= zip(image_keys(prompt.metadata), prompt.images, strict=True)
    return found


def uses_guidance(config: RunConfig) -> bool:
    """Return whether guidance takes a negative prompt: its scale is above 1 and not an input of the model."""
    return config.model.guidance_scale > 1 and config.model.policy not in EMBEDDED_GUIDANCE | BLANK_GUIDANCE


def listed_prompts(section: PromptsSection, split: Literal["train", "heldout"]) -> list[Prompt]:
    """Return the prompts of all sources of a split; with several sources the metadata name the source."""
    found: list[Prompt] = []
    for setting, source in section.lists(split).items():
        prompts = read_prompts(source, section, where=setting)
        if not section.sources:
            return prompts
        found += [_of_source(prompt, _source_named(section, setting), setting) for prompt in prompts]
    return _taking_turns(found) if split == "heldout" else found


def _source_named(section: PromptsSection, setting: str) -> str:
    return section.sources[int(setting.split(".")[2])].name


def _of_source(prompt: Prompt, name: str, setting: str) -> Prompt:
    if SOURCE in prompt.metadata:
        raise PromptError(
            f"{setting}: prompt {prompt.text!r} has a column '{SOURCE}', which is where the name of its source goes. "
            "Rename the column."
        )
    return Prompt(text=prompt.text, metadata={**prompt.metadata, SOURCE: name}, images=prompt.images)


def _taking_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts interleaved by source, so that the first ones cover all sources."""
    places: dict[str, int] = {}
    keyed: list[tuple[int, int, Prompt]] = []
    for prompt in prompts:
        name = str(prompt.metadata[SOURCE])
        keyed.append((places.setdefault(name, 0), len(keyed), prompt))
        places[name] += 1
    return [prompt for _, _, prompt in sorted(keyed, key=lambda one: one[:2])]


def read_prompts(source: str, section: PromptsSection, *, where: str) -> list[Prompt]:
    """Return the prompts of a source.

    Args:
        source: path of a file (``PROMPT_FILES``) or of a folder of ``save_to_disk``, or a Hugging Face dataset id.
        section: names the prompt column and the dataset split.
        where: the setting that names the source, for errors.

    Raises:
        PromptError: the source is missing, empty or malformed, or holds an empty prompt or the same prompt twice.
    """
    path, files = Path(source), [Path(source)]
    if is_saved_dataset(path):
        files = saved_files(path, section.split, where)
    elif path.suffix.lower() not in READERS:
        return _prompts(hub_rows(source, section, where), source, section, where)
    elif not path.is_file():
        found = "is no regular file" if path.exists() else "does not exist. Paths are relative to the config file"
        raise PromptError(f"{where}: prompt file '{source}' {found}.")
    if section.image is not None:
        # Images may change while the list does not.
        return _file_prompts(source, section, where)
    stamps = tuple((each.name, each.stat().st_mtime_ns, each.stat().st_size) for each in files)
    return list(_unchanged_prompts(source, section.model_dump_json(), where, stamps))


@lru_cache(maxsize=16)
def _unchanged_prompts(
    source: str, section: str, where: str, stamps: tuple[tuple[str, int, int], ...]
) -> tuple[Prompt, ...]:
    """Return the prompts of unchanged files from a cache, as one command reads a long list several times."""
    return tuple(_file_prompts(source, PromptsSection.model_validate_json(section), where))


def _file_prompts(source: str, section: PromptsSection, where: str) -> list[Prompt]:
    if not is_saved_dataset(Path(source)):
        return _prompts(READERS[Path(source).suffix.lower()](source, section.column), source, section, where)
    from tasks.inputs.arrow_rows import saved_rows

    return _prompts(saved_rows(source, section, where), source, section, where)


def _prompts(rows: Rows, source: str, section: PromptsSection, where: str) -> list[Prompt]:
    folder = Path(source) if is_saved_dataset(Path(source)) else Path(source).parent
    # There may be millions of objects, none of them garbage.
    with without_collecting():
        numbered = [(number, _prompt(row, section, RowLocation(where, source, number), folder)) for number, row in rows]
    if not numbered:
        raise PromptError(f"{where}: '{source}' holds no prompts. Write some into it, or name another.")
    _check_distinct(numbered, where, source)
    return [prompt for _, prompt in numbered]


def _prompt(row: Mapping[str, Any], section: PromptsSection, place: RowLocation, folder: Path) -> Prompt:
    column = section.column
    if column not in row:
        raise PromptError(f"{place} has no '{column}'; it has {', '.join(row) or 'nothing'}. Set prompts.column.")
    text = text_of(row[column], place, "prompts.column")
    metadata = {key: value for key, value in row.items() if key not in (column, section.image)} if len(row) > 1 else {}
    images: tuple[ImageSource, ...] = ()
    if section.image is not None:
        images, metadata[IMAGE] = images_of(row, section.image, place, folder, "prompts.image")
    check_metadata(metadata, place)
    try:
        prompt = Prompt(text=text, metadata=metadata, images=images)
    except (TypeError, ValueError) as error:
        raise PromptError(f"{place}: metadata must be plain JSON values: {error}.") from None
    return prompt


def _check_distinct(numbered: Sequence[tuple[int, Prompt]], where: str, source: str) -> None:
    if len({prompt.id for _, prompt in numbered}) == len(numbered):
        return
    first: dict[str, int] = {}
    again = [(number, prompt) for number, prompt in numbered if first.setdefault(prompt.id, number) != number]
    number, prompt = again[0]
    places = " and ".join(
        str(RowLocation(where, source, each)).removeprefix(f"{where}: ") for each in (first[prompt.id], number)
    )
    counted = "" if len(again) == 1 else f"{len(again):,} of {len(numbered):,} prompts were there before. The first: "
    remove = "one" if len(again) == 1 else f"all {len(again):,} repetitions"
    raise PromptError(
        f"{where}: {counted}prompt {prompt.text!r} appears twice: {places}. "
        f"Groups are identified by their prompt; remove {remove}."
    )


def prompt_set(section: PromptsSection, split: Literal["train", "heldout"]) -> str | None:
    """Return the names of prompt lists: a file's name without its folders, a dataset's id as it is."""
    return ", ".join(map(_named, section.lists(split).values())) or None


def _named(source: str) -> str:
    # Loading a config makes existing paths absolute.
    if not source.lower().endswith(PROMPT_FILES) and not source.startswith("/"):
        return source
    return source.replace("\\", "/").rpartition("/")[2]
