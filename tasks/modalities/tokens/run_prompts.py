"""The prompts of a run as token ids, read once per process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from flowmill.configs.errors import ConfigError
from flowmill.configs.render import TurnsSection
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.shared_prompts import SharedWidths
from flowmill.models.maths.tokens import Widths
from flowmill.models.policies.language_model_folders import (
    CONTEXT,
    add_template,
    context_length_of,
    frame_of,
    load_tokenizer,
    stated_ends,
)
from flowmill.models.text.control_tokens import as_text, chat_ids
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.inputs.prompt_rows import read_picture
from flowmill.tasks.inputs.prompts import HELD_OUT_ROWS, IMAGE, Prompt, StoredPrompt, image_files, image_keys
from flowmill.tasks.inputs.renderer import sees_images
from flowmill.tasks.inputs.resolved import ResolvedConfig
from flowmill.tasks.modalities.tokens.prompts import Look, Prompts, no_images
from flowmill.tasks.modalities.tokens.seen_images import SeenImages, drawn_images
from flowmill.tasks.specs.turns import turns_of

if TYPE_CHECKING:
    from flowmill.models.policies.causal_lm import CausalLM
    from flowmill.models.policies.pictures import Inputs
    from flowmill.tasks.runs.context import RunContext


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The prompts of a run as token ids, and the widths of its batches.

    A row's padding changes its rounding, so widths depend on the run and not on the rows of a batch.
    """

    prompts: Prompts
    """Converts prompts to ids."""
    longest: int
    """Most tokens before a text; see ``longest_context``."""
    context: int | None
    """Maximum tokens of the model."""
    images: Mapping[str, Sequence[str]]
    """Content keys of the images of prompts, by id."""
    members: int | None
    """Texts of a group that share the tokens of their prompt; None: they do not."""
    comments: Comments | None
    """Comments between texts, with turns."""
    seen: SeenImages | None
    """Images of earlier turns, if they are seen."""

    @property
    def shared(self) -> SharedWidths | None:
        """Widths of the run's packed rows, if texts share prompts."""
        if self.members is None:
            return None
        most = self.prompts.section.max_new
        return SharedWidths(prompt=self.longest, completion=most, members=self.members)

    @property
    def widths(self) -> Widths:
        """Widths of the run's batches."""
        return Widths(most=self.longest + self.prompts.section.max_new, limit=self.context)

    def with_images(self, prompt: str, tokens: np.ndarray, drawn: Drawn) -> np.ndarray | Sequence[int]:
        """Return a stored row with the ids of its images.

        Args:
            prompt: id of its prompt.
            tokens: the row.
            drawn: returns id and metadata of its sample.
        """
        if not self.images:
            return tokens
        return self.prompts.with_images(tokens, self.images[prompt], self.seen.of(*drawn()) if self.seen else ())


def shared_members(config: RunConfig) -> int | None:
    """Return the texts of a group that share the tokens of their prompt; None: they do not."""
    return config.samples_per_group if config.optimize.shared_prompts else None


#: Returns id and metadata of a sample.
Drawn = Callable[[], tuple[str, Mapping[str, Any]]]
#: Caches of each run in this process.
_READ: WeakKeyDictionary[RunContext, RunPrompts] = WeakKeyDictionary()
_PROMPTS: WeakKeyDictionary[RunContext, Prompts] = WeakKeyDictionary()


def prompts_of(context: RunContext, policy: CausalLM | None = None) -> Prompts:
    """Return the tokenizer and settings of a run's prompts, of which none is read; see ``read_prompts``."""
    prompts = _PROMPTS.get(context)
    if prompts is None:
        prompts = _PROMPTS[context] = prompts_in(
            context.base_folder,
            context.plan,
            look=lambda key: context.references([{IMAGE: key}])[0][0],
            tokenizer=None if policy is None else policy.tokenizer,
        )
    return prompts


def read_prompts(context: RunContext, policy: CausalLM | None = None) -> RunPrompts:
    """Return the prompts of a run, read with its model's tokenizer.

    Args:
        policy: holds the tokenizer; None: it is read from the base model's folder, if not cached.
    """
    run_prompts = _READ.get(context)
    if run_prompts is None:
        prompts = prompts_of(context, policy)
        everything = {split: context.prompts[split] for split in ("train", "heldout", HELD_OUT_ROWS)}
        turns, limit = turns_of(context.config), context_length_of(context.base_folder)
        drawn, rows = drawn_images(prompts.pictures, context.config), _of_data(context.config)
        longest = longest_context(prompts, turns, limit, everything, drawn, rows)
        keys = {each.id: image_keys(each.metadata) for split in everything.values() for each in split}
        images = keys if prompts.pictures is not None else {}
        comments = None if turns is None else Comments(prompts, turns)
        members, pictures = shared_members(context.config), prompts.pictures
        seen = SeenImages(context, pictures) if pictures is not None and sees_images(context.config) else None
        run_prompts = _READ[context] = RunPrompts(prompts, longest, limit, images, members, comments, seen)
    return run_prompts


def readable(context: RunContext, prompts: Sequence[StoredPrompt]) -> Sequence[StoredPrompt]:
    """Return prompts without those of rows of data that the model cannot read, which ``ingest`` refuses."""
    if context.config.data is None:
        return prompts
    return [prompt for prompt in prompts if prompts_of(context).reads(prompt)] or prompts


def prompts_in(folder: Path, plan: ResolvedConfig, *, look: Look = no_images, tokenizer: Any = None) -> Prompts:
    """Return prompts as the model in a folder reads them.

    Args:
        folder: folder of the model.
        look: opens images.
        tokenizer: the model's, if it is loaded.
    """
    family: type[CausalLM] = plan.family
    pictures, frame = family.pictures_in(folder), frame_of(folder) if family.models.draws else None
    tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
    if frame is not None:
        add_template(tokenizer, folder)
    return Prompts(
        tokenizer,
        tokens_of(plan.config),
        context_length_of(folder),
        pictures=pictures,
        look=look,
        frame=frame,
        ends=stated_ends(folder),
    )


def largest_image(folder: Path, plan: ResolvedConfig, prompts: Sequence[Prompt]) -> Inputs | None:
    """Return the inputs of a local model for the image with the most tokens; None if it reads no images."""
    pictures = prompts_in(folder, plan).pictures
    if pictures is None:
        return None
    files = image_files(prompts)
    numbers = [pictures.number(key, partial(read_picture, file)) for key, file in files.items()]
    numbers += drawn_images(pictures, plan.config)
    return pictures.inputs(max(numbers, key=lambda number: pictures.picture(number).tokens))


def longest_prompt(folder: Path, plan: ResolvedConfig) -> int:
    """Return the most tokens before a text, with a local model; raise ConfigError if a prompt is invalid."""
    files = image_files(prompt for prompts in plan.prompts.values() for prompt in prompts)
    prompts = prompts_in(folder, plan, look=lambda key: read_picture(files[key]))
    drawn = drawn_images(prompts.pictures, plan.config)
    limit, rows = context_length_of(folder), _of_data(plan.config)
    return longest_context(prompts, turns_of(plan.config), limit, plan.prompts, drawn, rows)


def _of_data(config: RunConfig) -> tuple[str, ...]:
    """Return the splits of prompts that are of rows of data."""
    return () if config.data is None else ("train", HELD_OUT_ROWS)


#: Private characters for a text and a comment in a rendered chat, and a pair that occurs in neither.
_TEXT, _COMMENT, _UNUSED = "\ue000", "\ue001", ("\ue002", "\ue003")


class Comments:
    """Token ids of comments: a user's message where there is a chat template, else the comment as it is."""

    def __init__(self, prompts: Prompts, turns: TurnsSection) -> None:
        self._prompts, self._tokenizer, self._turns = prompts, prompts.tokenizer, turns
        self._cached: dict[tuple[str, ...], tuple[list[int], list[int]]] = {}
        self._around(())

    def most(self, images: Sequence[int] = ()) -> int:
        """Return the most tokens between two texts with images by number."""
        return sum(map(len, self._around(images))) + self._turns.comment_tokens

    def after(self, text: Sequence[int], comment: str, images: Sequence[int] = ()) -> list[int]:
        """Return the ids that follow the ids of a text; the end token that closes it is not repeated.

        Args:
            text: its ids.
            comment: the comment on its images.
            images: numbers of those that are seen, before the comment.
        """
        said = self._ids(as_text(self._tokenizer, comment))[: self._turns.comment_tokens]
        before, after = self._around(images)
        closed = before[:1] == [*text[-1:]]
        ids, pictures = [*before[int(closed) :], *said, *after], self._prompts.pictures
        return ids if pictures is None else pictures.placed(ids, images)

    def _around(self, images: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ids before and after a comment; those of images as the model's token for them."""
        pictures = self._prompts.pictures
        key = () if pictures is None else tuple(pictures.picture(number).text for number in images)
        if key not in self._cached:
            before, after = _around(self._prompts, images) if self._prompts.chat else ("", "")
            self._cached[key] = self._ids(before), self._ids(after)
        return self._cached[key]

    def _ids(self, text: str) -> list[int]:
        ids = chat_ids(self._tokenizer, text, _UNUSED, begins=False)
        assert ids is not None
        return ids


def _around(prompts: Prompts, images: Sequence[int]) -> tuple[str, str]:
    """Return the rendered text between an answer and the text of a user's next message, and from there to the next
    answer."""
    chat = prompts.render(_COMMENT, [*prompts.messages("."), ("assistant", _TEXT), ("user", _COMMENT)], images)
    before, separator, after = chat.partition(_TEXT)[2].partition(_COMMENT)
    if not separator:
        raise ConfigError(
            "render.turns: the tokenizer's chat template cannot go on after an answer, as it leaves out messages. "
            "Choose a model whose template has turns, or set rollout.tokens.template to 'none'."
        )
    return before, after


def longest_context(
    prompts: Prompts,
    turns: TurnsSection | None,
    context: int | None,
    splits: Mapping[str, Sequence[Prompt | StoredPrompt]],
    images: Sequence[int],
    rows: Sequence[str] = (),
) -> int:
    """Return the most tokens before a text: of the longest prompt and, with turns, of all texts and comments before.

    Args:
        prompts: converts prompts to ids.
        turns: settings of turns, if there are several.
        context: maximum tokens of the model; None: no limit.
        splits: prompts by split.
        images: numbers of images of a text, if they are seen.
        rows: splits of rows of data; see ``Prompts.longest``.
    """
    longest, new = prompts.longest(splits, rows), prompts.section.max_new
    if turns is None:
        return longest
    longest += (turns.count - 1) * (new + Comments(prompts, turns).most(images))
    if context is not None and longest + new > context:
        raise ConfigError(
            f"render.turns: a conversation may have {longest + new} tokens, but the model takes {context} ({CONTEXT}). "
            "Lower render.turns.count, render.turns.comment_tokens or rollout.tokens.max_new."
        )
    return longest
