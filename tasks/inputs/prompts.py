"""Reads prompts from .txt, .jsonl, .parquet or a Hugging Face dataset id, and refuses what cannot be trained on."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image

from configs.errors import PromptError
from configs.fingerprint import canonical_json, fingerprint, hash_text
from configs.garbage import without_collecting
from configs.schema import PromptsSection, RunConfig
from models.policies import EMBEDDED_GUIDANCE
from storage.checksums import hash_file
from storage.names import below
from tasks.inputs.prompt_files import READERS, Rows, hub_rows

#: A small file can claim to be an image of any size; models take a hundredth of this.
_MOST_PIXELS = 1 << 26
#: Metadata key of the hash of the image a prompt starts from.
IMAGE = "image_xxh3"
#: Metadata key of the name of the source, where there are several.
SOURCE = "prompt_source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and what else its source says about it."""

    text: str
    """The prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns or keys, for rewards; of an image to start from its content's hash."""
    image: Path | None = None
    """File of the image to start from."""
    id: str = field(init=False)
    """Identity of the prompt's group: a hash of text and metadata."""

    def __post_init__(self) -> None:
        """Compute the identity once; lists have a million prompts, most of them without metadata."""
        plain = None if self.metadata else f"[{encode_basestring(self.text)},{{}}]"
        found = fingerprint([self.text, dict(self.metadata)]) if plain is None else hash_text(plain)
        object.__setattr__(self, "id", found[:16])

    @property
    def condition(self) -> str:
        """What is encoded, see ``condition_key``."""
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
        """What was encoded of it."""
        return condition_key(self.text, self.metadata)


def stored_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as the store gives them back: what a reward gets in a trial is what it gets in scoring."""
    return dict(json.loads(canonical_json(dict(metadata))))


def condition_key(text: str, metadata: Mapping[str, Any]) -> str:
    """Return what identifies a prompt's conditioning: its text, and the content of the image it starts from."""
    image = metadata.get(IMAGE) if metadata else None
    return text if image is None else f"{text} [image {image}]"


def uses_guidance(config: RunConfig) -> bool:
    """Return whether guidance takes a negative prompt: when its scale is above 1 and not an input of the model."""
    return config.model.guidance_scale > 1 and config.model.policy not in EMBEDDED_GUIDANCE


def source_prompts(config: RunConfig) -> dict[str, list[Prompt]]:
    """Return the prompts the config names, by split: train, heldout, and negative when guidance needs it.

    Raises:
        PromptError: a source cannot be used, or a held-out prompt is trained on.
    """
    train, heldout = _listed(config.prompts, "train"), _listed(config.prompts, "heldout")
    trained = {_as_read(prompt) for prompt in train} if heldout else set()
    shared = {prompt.condition for prompt in heldout if _as_read(prompt) in trained}
    if shared:
        raise PromptError(
            f"prompts.heldout: {len(shared)} prompts are in prompts.train too, the first is {min(shared)!r} (case and "
            "spaces aside). Their evaluation would not be of held-out prompts. Remove them from one of the two."
        )
    negative = _negative(config, [*train, *heldout]) if uses_guidance(config) else []
    return {"train": train, "heldout": heldout, "negative": negative}


def _as_read(prompt: Prompt) -> str:
    """Return what a person takes two prompts for the same by: not case, not spaces, not how letters are encoded."""
    text = " ".join(unicodedata.normalize("NFKC", prompt.text).casefold().split())
    return condition_key(text, prompt.metadata)


def _listed(section: PromptsSection, split: Literal["train", "heldout"]) -> list[Prompt]:
    """Return the prompts of all lists of a split; of several each prompt says in its metadata which it is of."""
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
    return Prompt(text=prompt.text, metadata={**prompt.metadata, SOURCE: name}, image=prompt.image)


def _taking_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts so that those of all sources take turns: the first ones are of all of them."""
    places: dict[str, int] = {}
    keyed: list[tuple[int, int, Prompt]] = []
    for prompt in prompts:
        name = str(prompt.metadata[SOURCE])
        keyed.append((places.setdefault(name, 0), len(keyed), prompt))
        places[name] += 1
    return [prompt for _, _, prompt in sorted(keyed, key=lambda one: one[:2])]


def _negative(config: RunConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the negative prompt, with every image to start from where prompts have one."""
    text = config.model.negative_prompt
    images = {prompt.metadata[IMAGE]: prompt.image for prompt in prompts if prompt.image is not None}
    if not images:
        return [Prompt(text=text)]
    return [Prompt(text=text, metadata={IMAGE: key}, image=path) for key, path in images.items()]


def read_prompts(source: str, section: PromptsSection, *, where: str) -> list[Prompt]:
    """Return the prompts of a source.

    Args:
        source: path of a .txt, .jsonl or .parquet file, or a Hugging Face dataset id.
        section: names the prompt column and the dataset split.
        where: the setting that names the source, for errors.

    Raises:
        PromptError: the source is missing, empty or malformed, or holds an empty prompt or a prompt twice.
    """
    path = Path(source)
    if path.suffix.lower() not in READERS:
        return _prompts(hub_rows(source, section, where), source, section, where)
    if not path.is_file():
        found = "is no regular file" if path.exists() else "does not exist. Paths are relative to the config file"
        raise PromptError(f"{where}: prompt file '{source}' {found}.")
    if section.image is not None:
        # Images may change while the list does not.
        return _file_prompts(source, section, where)
    about = path.stat()
    return list(_unchanged_prompts(source, section.model_dump_json(), where, about.st_mtime_ns, about.st_size))


@lru_cache(maxsize=16)
def _unchanged_prompts(source: str, section: str, where: str, changed: int, size: int) -> tuple[Prompt, ...]:
    """Return the prompts of a file as it is now: a command asks for a long list several times."""
    return tuple(_file_prompts(source, PromptsSection.model_validate_json(section), where))


def _file_prompts(source: str, section: PromptsSection, where: str) -> list[Prompt]:
    return _prompts(READERS[Path(source).suffix.lower()](source, section.column), source, section, where)


def _prompts(rows: Rows, source: str, section: PromptsSection, where: str) -> list[Prompt]:
    """Return the prompts of rows, checked."""
    folder = Path(source).parent
    # They may be millions, none of them garbage.
    with without_collecting():
        numbered = [(number, _prompt(row, section, _Place(where, source, number), folder)) for number, row in rows]
    if not numbered:
        raise PromptError(f"{where}: '{source}' holds no prompts.")
    _check_distinct(numbered, where, source)
    return [prompt for _, prompt in numbered]


def prompts_fingerprint(prompts: Mapping[str, list[Prompt]]) -> str:
    """Return the identity of named lists of prompts, by content and order."""
    return fingerprint({split: [prompt.id for prompt in items] for split, items in prompts.items()})


class _Place(NamedTuple):
    """Where a row stands, for errors."""

    where: str
    source: str
    number: int

    def __str__(self) -> str:
        unit = "line" if Path(self.source).suffix.lower() in (".txt", ".jsonl") else "row"
        return f"{self.where}: {self.source}, {unit} {self.number}"


def _prompt(row: Mapping[str, Any], section: PromptsSection, place: _Place, folder: Path) -> Prompt:
    column = section.column
    if column not in row:
        raise PromptError(f"{place} has no '{column}'; it has {', '.join(row) or 'nothing'}. Set prompts.column.")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise PromptError(
            f"{place}: '{column}' is no text but {_kind_of(text)}. Give each row one text, or set prompts.column to a "
            "column of texts."
        )
    if text is None or not text.strip():
        raise PromptError(f"{place}: the prompt is empty. Remove the line or write a prompt.")
    if "\0" in text:
        raise PromptError(
            f"{place}: the prompt holds NUL characters, as text of another encoding (UTF-16) does. Save it as UTF-8."
        )
    metadata = {key: value for key, value in row.items() if key not in (column, section.image)} if len(row) > 1 else {}
    _check_plain(metadata, place)
    image = None if section.image is None else _image(row, section.image, place, folder)
    if image is not None:
        metadata[IMAGE] = hash_file(image)
    try:
        prompt = Prompt(text=text, metadata=metadata, image=image)
    except (TypeError, ValueError) as error:
        raise PromptError(f"{place}: metadata must be plain JSON values: {error}.") from None
    return prompt


def _kind_of(value: Any) -> str:
    """Return what a cell holds, in words."""
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return f"{names.get(type(value), type(value).__name__)} ({str(value)[:60]})"


def _check_plain(metadata: Mapping[str, Any], place: _Place) -> None:
    """Refuse columns of bytes: the store keeps metadata as JSON, and rewards would get lists of numbers."""
    for column, value in metadata.items():
        if _holds_bytes(value):
            raise PromptError(
                f"{place}: column '{column}' holds bytes, which metadata cannot: rewards get what JSON can say. Save "
                "them as files and name their paths in the column, or leave the column out."
            )


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_bytes, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes | bytearray | memoryview)


def _image(row: Mapping[str, Any], column: str, place: _Place, folder: Path) -> Path:
    name = row.get(column)
    if not isinstance(name, str) or not name:
        raise PromptError(f"{place} has no '{column}', the path of an image. Add it, or leave prompts.image out.")
    try:
        path = below(folder, name)
    except ValueError as error:
        raise PromptError(f"{place}: {error}. Images are below the prompt file's folder; put it there.") from None
    if not path.is_file():
        found = "is no regular file" if path.exists() else "does not exist. Paths are relative to the prompt file"
        raise PromptError(f"{place}: image '{path}' {found}.")
    try:
        with Image.open(path) as image:
            pixels = image.width * image.height
            if pixels > _MOST_PIXELS:
                raise PromptError(
                    f"{place}: '{path}' has {pixels:,} pixels, more than {_MOST_PIXELS:,}. Scale it down."
                )
            image.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PromptError(f"{place}: '{path}' is not an image: {error}.") from None
    return path


def _check_distinct(numbered: Sequence[tuple[int, Prompt]], where: str, source: str) -> None:
    more = len(numbered) - len({prompt.id for _, prompt in numbered})
    if not more:
        return
    first: dict[str, int] = {}
    for number, prompt in numbered:
        if prompt.id in first:
            places = " and ".join(
                str(_Place(where, source, each)).removeprefix(f"{where}: ") for each in (first[prompt.id], number)
            )
            raise PromptError(
                f"{where}: prompt {prompt.text!r} appears twice: {places}. Of {len(numbered)} rows {more} repeat an "
                "earlier one. Groups are identified by their prompt; remove what repeats."
            )
        first[prompt.id] = number


def prompt_set(section: PromptsSection, split: Literal["train", "heldout"]) -> str | None:
    """Return the names of prompt lists: a file's name without its folders, a dataset's id as it is."""
    return ", ".join(map(_named, section.lists(split).values())) or None


def _named(source: str) -> str:
    if not source.lower().endswith((".txt", ".jsonl", ".parquet")):
        return source
    return source.replace("\\", "/").rpartition("/")[2]
