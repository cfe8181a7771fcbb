"""The shapes of rows that people keep: which columns are prompt, samples and ratings, by the first row of a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from flowmill.configs.data import DataSection
from flowmill.configs.errors import DataError, PromptError
from flowmill.configs.model_families import most_images
from flowmill.configs.schema import RunConfig
from flowmill.tasks.inputs.columns import has_column, used_columns, value_of
from flowmill.tasks.inputs.components import make_algorithm
from flowmill.tasks.inputs.policy_kind import writes_texts
from flowmill.tasks.inputs.rows.files import Stamps, is_there, stamps_of
from flowmill.tasks.inputs.rows.read import source_rows
from flowmill.tasks.inputs.rows.row import Names

_PROMPTS = ("prompt", "caption", "instruction", "question", "query", "edit_prompt", "txt", "text")
_TEXTS = ("completion", "response", "answer", "output")
_MEDIA = ("image", "images", "video", "videos", "audio", "edited_image", "target_image", "output_image", "file")
_SAMPLES = (*_MEDIA, "png", "jpg", "jpeg", "webp", "mp4")
_RATINGS = ("rating", "stars", "score", "label", "aesthetic_score", "cls")
_LISTS = ("completions", "images", "image_path", "generations")
_LABELS = ("preference", "preferred", "winner", "label")
_STARTS = ("source_image", "input_image", "original_image", "prompt_image", "start_image")


class Shape(NamedTuple):
    """A shape: its name, and the columns that each role may have, the most usual one first."""

    name: str
    roles: Mapping[str, tuple[str, ...]]
    kind: str = ""
    """What its samples are, texts or media; '': any."""
    rated: bool = False
    """Whether it is for algorithms that compare samples alone."""
    promptless: bool = False
    """Whether its rows have no column of a prompt."""


#: The first that fits a row is taken.
SHAPES = (
    Shape("prompts with samples", {"prompt": ("prompt",), "sample": ("image",)}, "media"),
    Shape(
        "OpenAI preference",
        {"prompt": ("input.messages",), "chosen": ("preferred_output",), "rejected": ("non_preferred_output",)},
    ),
    Shape("preference", {"prompt": _PROMPTS, "chosen": ("chosen",), "rejected": ("rejected",)}),
    Shape("preference, implicit prompt", {"chosen": ("chosen",), "rejected": ("rejected",)}, "texts", promptless=True),
    Shape(
        "pairs with a label, as Pick-a-Pic",
        {
            "prompt": _PROMPTS,
            "chosen": ("jpg_0", "image_0", "video_0", "response_A", "response_a", "response_0"),
            "rejected": ("jpg_1", "image_1", "video_1", "response_B", "response_b", "response_1"),
            "preferred": ("label_0", *_LABELS),
        },
    ),
    Shape(
        "ranked replies, as UltraFeedback",
        {"prompt": _PROMPTS, "sample": ("completions.response",), "rating": ("completions.overall_score",)},
        "texts",
    ),
    Shape("ranked lists", {"prompt": _PROMPTS, "sample": _LISTS, "rank": ("rank", "ranking")}),
    Shape("rated lists", {"prompt": _PROMPTS, "sample": _LISTS, "rating": ("human_preference", "scores")}),
    Shape("rated texts", {"prompt": _PROMPTS, "sample": _TEXTS, "rating": _RATINGS}, "texts", True),
    Shape("rated samples", {"prompt": _PROMPTS, "sample": _SAMPLES, "rating": _RATINGS}, "media", True),
    Shape("chats", {"messages": ("messages", "conversations", "conversation")}, "texts"),
    Shape("Alpaca", {"prompt": ("{instruction}\n\n{input}",), "sample": ("output",)}, "texts"),
    Shape("prompt-completion", {"prompt": _PROMPTS, "sample": _TEXTS}, "texts"),
    Shape("prompts with samples", {"prompt": _PROMPTS, "sample": _SAMPLES}, "media"),
    Shape("language modeling", {"sample": ("text",)}, "texts", promptless=True),
)


def recognized(
    row: Mapping[str, Any], named: Mapping[str, str], *, texts: bool, rated: bool, pictured: bool
) -> tuple[str, dict[str, str]] | None:
    """Return the name of the shape of a row, and its columns by role; None if it has none of them.

    Args:
        row: the first row of a source.
        named: columns that the config names.
        texts: samples are texts.
        rated: the algorithm compares samples, so it needs pairs or ratings.
        pictured: prompts come with images.
    """
    fitting = [shape for shape in SHAPES if shape.kind in ("", "texts" if texts else "media")]
    compared = [shape for shape in fitting if {"chosen", "rank", "rating"} & {*shape.roles}]
    plain = [shape for shape in fitting if not shape.rated]
    tried = compared if rated and not {"chosen", "rating", "rank"} & {*named} else plain
    # Shapes that have the columns with these names come before those that have them with others.
    usual = [each for each in tried if all(named[role] in each.roles.get(role, ()) for role in named)]
    for shape in (*usual, *tried):
        columns = _columns(shape, row, named)
        if columns is not None:
            used = {*columns.values()}
            starts = (*_STARTS, *(("image", "images") if texts else ()))
            start = next((name for name in starts if has_column(row, name) and name not in used), None)
            if pictured and start is not None and not {"messages", "prompt_image"} & {*columns}:
                columns["prompt_image"] = start
            return _named(shape, row, columns), columns
    return None


def _columns(shape: Shape, row: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, str] | None:
    optional = {"prompt", "prompt_image", *(("rating",) if "sample" in shape.roles else ())}
    if {*named} - {*shape.roles, *optional}:
        return None
    # The column "prompt" is the prompt, also where the first row has none.
    usual = "prompt" if "prompt" in row else None
    if shape.promptless and usual and "prompt" not in named:
        return None
    columns = dict(named)
    for role, names in shape.roles.items():
        free = (name for name in names if has_column(row, name) and name not in columns.values())
        column = named.get(role) or next(free, usual if role == "prompt" else None)
        # A number may be a position, or say that the first is preferred.
        is_open = role == "preferred" and role not in named and column in _LABELS
        if column is None or (is_open and not isinstance(row[column], str)):
            return None
        columns[role] = column
    whole = value_of(row, columns["chosen"]) if "chosen" in columns else None
    if isinstance(whole, list) and whole and isinstance(whole[0], Mapping) and whole[0].get("role") != "assistant":
        # Whole chats have their prompt, whatever else the row has.
        columns["prompt"] = named.get("prompt", "prompt")
    elif shape.promptless and "prompt" not in columns:
        columns["prompt"] = ""
    return columns


def _named(shape: Shape, row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    values = [value_of(row, name) for role, name in columns.items() if role not in ("rating", "rank", "preferred")]
    chats = any(isinstance(each, list) and each and isinstance(each[0], Mapping) for each in values)
    rest = "" if not chats or shape.name in ("chats", "OpenAI preference") else ", conversational"
    told = "; ".join(f"{role}: {name!r}" if "{" in name else f"{role}: {name}" for role, name in columns.items())
    used = {each for name in columns.values() for each in used_columns(name)}
    others = ", ".join(str(name) for name in row if name not in used)
    return f"{shape.name}{rest} ({told}{f'; metadata: {others}' if others else ''})"


def with_columns(config: RunConfig, recorded: Callable[[], DataSection | None] = lambda: None) -> RunConfig:
    """Return a config whose section of data names the columns of its rows, as its first row has them; if that cannot
    be read, as the recorded section has them. A section that names the samples is as it is meant."""
    section = config.data
    if section is None or _names_samples(section):
        return config
    shape = shape_of(config) if is_there(section.train) else None
    if shape is not None:
        columns = shape[1]
    elif (earlier := recorded()) is not None:
        columns = {**earlier.columns, **section.columns}
    else:
        return config
    plain = section.model_dump(exclude={"columns"}, exclude_unset=True)
    return config.model_copy(update={"data": type(section)(**plain, columns=columns)})


def shape_of(config: RunConfig) -> tuple[str, dict[str, str]] | None:
    """Return the name of the shape of the rows of a config, and the columns by role; None if it is not known."""
    section = config.data
    assert section is not None
    row = _first(section.train, section.split, section.setting, stamps_of(section.train))
    if row is None:
        return None
    pictured = most_images(config.model.policy, config.model.options) != 0
    readings = [
        recognized(row, section.columns, texts=writes_texts(config), rated=rated, pictured=pictured)
        for rated in (False, True)
    ]
    if None in readings or readings[0] == readings[1]:
        shape = readings[0] or readings[1]
    else:
        # Imports torch.
        shape = readings[bool(make_algorithm(config).requires.advantages)]
    if shape is None or not _names_samples(section):
        return shape
    return shape if DataSection(train=section.train, columns=shape[1]).columns == section.columns else None


def _names_samples(section: DataSection) -> bool:
    return not {"sample", "messages", "chosen"}.isdisjoint(section.columns)


@lru_cache(maxsize=8)
def _first(source: str, split: str, where: str, stamps: Stamps) -> Mapping[str, Any] | None:
    """Return the first row of a source that can be read; None without any."""
    try:
        rows = source_rows(source, split, where, Names())
        return next((row for _, row in islice(rows, 100) if isinstance(row, Mapping)), None)
    except (DataError, PromptError):
        return None
