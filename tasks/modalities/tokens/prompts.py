"""Prompts as token ids; special tokens come only from the tokenizer and its template, never from a prompt's text.

Images of a prompt come before its text, in order; their tokens have negative ids, see ``models.policies.pictures``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.errors import ConfigError
from configs.tokens import TokensSection
from models.policies.language_model_folders import CONTEXT, Frame
from models.text.chat_templates import render_chat, told_dates
from models.text.control_tokens import chat_ids, first_mark, marked, plain_ids
from tasks.inputs.prompts import Prompt, StoredPrompt, image_keys

if TYPE_CHECKING:
    from models.policies.pictures import Pictures

#: Returns the (H, W, 3) uint8 pixels of an image by its content key.
Look = Callable[[str], np.ndarray]


def no_images(key: str) -> np.ndarray:
    """Open no image."""
    raise AssertionError(f"image {key} has no source")


def with_places(messages: Sequence[Mapping[str, str]], images: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return messages in parts, as templates of processors read them, with images before the text of the last."""
    *before, last = ({**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages)
    return [*before, {**last, "content": [*images, *last["content"]]}]


class Prompts:
    """Token ids of prompts, which are cut or refused if they are too long."""

    def __init__(
        self,
        tokenizer: Any,
        section: TokensSection,
        context_length: int | None,
        *,
        pictures: Pictures | None = None,
        look: Look = no_images,
        frame: Frame | None = None,
    ) -> None:
        """Bind to a tokenizer.

        Args:
            tokenizer: a transformers tokenizer.
            section: settings of text sampling.
            context_length: maximum tokens of prompt and completion; None: no known limit.
            pictures: images of the model; None: it reads texts alone.
            look: opens images.
            frame: further tokens around prompts.

        Raises:
            ConfigError: the tokenizer lacks the requested template, or no tokens are left for a prompt.
        """
        self.tokenizer, self.section, self.pictures, self._look = tokenizer, section, pictures, look
        self._frame = frame
        self.chat = section.template == "chat" or (
            section.template == "auto" and getattr(self._source, "chat_template", None) is not None
        )
        if pictures is not None and not self.chat:
            raise ConfigError(
                "rollout.tokens.template is 'none', but only the template of a processor says where images go. Remove "
                "it."
            )
        if section.system is not None and not self.chat:
            raise ConfigError(
                "rollout.tokens.system is set, but prompts go through no chat template. Set rollout.tokens.template to "
                "'chat', or remove it."
            )
        room = None if context_length is None else context_length - section.max_new
        if room is not None and room < 1:
            raise ConfigError(
                f"rollout.tokens.max_new is {section.max_new}, but the model takes {context_length} tokens in all, so "
                f"no prompt fits ({CONTEXT}). Lower it."
            )
        limits = [limit for limit in (section.max_prompt, room) if limit is not None]
        self.limit = min(limits) if limits else None
        self.ends = 0 if self.chat else _end_tokens(tokenizer)
        """End tokens that the tokenizer appends to a text; they are removed because a completion follows."""
        self._known: dict[tuple[str, ...], list[int]] = {}

    @property
    def in_parts(self) -> bool:
        """Whether the chat template is a processor's, which reads messages in parts."""
        return self.pictures is not None or self._frame is not None

    @property
    def _source(self) -> Any:
        """The owner of the chat template."""
        return self.tokenizer if self.pictures is None else self.pictures.processor

    def ids(self, text: str, images: Sequence[str] = ()) -> list[int]:
        """Return the ids of a prompt, at least one.

        Args:
            text: its text.
            images: content keys of its images.

        Raises:
            ConfigError: it is too long and may not be cut, it is empty, it holds a control token that cannot be
                tokenized as text or the mark of an image, an image cannot be read, or the template fails.
        """
        key = (text, *images)
        if key not in self._known:
            self._known[key] = self.fitting(text, images)
        return self._known[key]

    def of(self, prompt: Prompt | StoredPrompt) -> list[int]:
        """Return the ids of a prompt of a run; see ``ids``."""
        return self.ids(prompt.text, image_keys(prompt.metadata))

    def stored(self, ids: Sequence[int]) -> Sequence[int]:
        """Return ids as they are stored, with the model's own token for images."""
        return ids if self.pictures is None else self.pictures.stored(ids)

    def with_images(self, tokens: np.ndarray, images: Sequence[str], seen: Sequence[int]) -> list[int]:
        """Return stored ids with those of a prompt's images, see ``ids``, and of further ones by number."""
        assert self.pictures is not None
        return self.pictures.placed(tokens.tolist(), [*self._numbers(images), *seen])

    def _numbers(self, images: Sequence[str]) -> list[int]:
        if self.pictures is None:
            return []
        return [self.pictures.number(key, partial(self._look, key)) for key in images]

    def completion(self, text: str) -> list[int]:
        """Return the ids of a given completion, which ends with the tokenizer's end token.

        Raises:
            ConfigError: it is too long, or holds a control token that cannot be tokenized as text.
        """
        mark = first_mark(self.tokenizer, text)
        if mark is None:
            found = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            found = plain_ids(self.tokenizer, text)
        if found is None:
            raise ConfigError(f"it holds {mark!r}, which the tokenizer cannot read as text. Write it in another way.")
        end, most = self.tokenizer.eos_token_id, self.section.max_new
        ids = [int(token) for token in (*found, *(() if end is None else (end,)))]
        if len(ids) > most:
            raise ConfigError(
                f"it has {len(ids)} tokens, but rollout.tokens.max_new is {most}. Raise it, or shorten it."
            )
        return ids

    def messages(self, asked: str) -> list[tuple[str, str]]:
        """Return the first messages of a chat without images, as (role, text) pairs."""
        system = [] if self.section.system is None else [("system", self.section.system)]
        return [*system, ("user", asked)]

    def told_dates(self, asked: str) -> dict[str, str]:
        """Return the dates that the template requests, by format."""
        messages = [{"role": role, "content": text} for role, text in self.messages(asked)]
        day = self.section.template_date
        return {} if day is None else told_dates(self.tokenizer, messages, day)

    def longest(self, splits: Mapping[str, Sequence[Prompt | StoredPrompt]]) -> int:
        """Return the tokens of the longest prompt, of lists by split.

        Raises:
            ConfigError: a prompt is invalid, see ``ids``.
        """
        return max(
            self._counted(split, row, prompt) for split, found in splits.items() for row, prompt in enumerate(found, 1)
        )

    def _counted(self, split: str, row: int, prompt: Prompt | StoredPrompt) -> int:
        try:
            return len(self.of(prompt))
        except ConfigError as error:
            raise ConfigError(f"prompts.{split}, number {row}: {error}") from None

    def fitting(self, text: str, images: Sequence[str] = ()) -> list[int]:
        """Return the ids of a prompt, which are not kept; see ``ids``."""
        numbers = self._numbers(images)
        found = self._rendered(text, numbers)
        if not found:
            raise ConfigError(f"prompt {text[:60]!r} has no token. Remove it, or use a chat template.")
        if self.limit is None or len(found) <= self.limit:
            return found
        if self.section.on_overlong == "cut_left" and not numbers:
            return found[-self.limit :]
        raise ConfigError(
            f"prompt {text[:60]!r} has {len(found)} tokens, but at most {self.limit} fit (rollout.tokens.max_prompt, "
            f"and the model's limit, {CONTEXT}, less rollout.tokens.max_new). Shorten it, lower max_new, or set "
            "rollout.tokens.on_overlong to 'cut_left'."
        )

    def _rendered(self, text: str, numbers: Sequence[int]) -> list[int]:
        prompt = self.section.asked(text)
        mark = first_mark(self.tokenizer, prompt)
        if self.pictures is not None:
            self._check_marks(text, prompt)
        if self.chat:
            found = self._chat(text, prompt, numbers) if mark is None else self._marked_chat(text, prompt, numbers)
        elif mark is None:
            found = [int(token) for token in self.tokenizer(prompt).input_ids]
        else:
            found = plain_ids(self.tokenizer, prompt)
        if found is None:
            raise ConfigError(
                f"prompt {text[:60]!r} holds {mark!r}, which the tokenizer reads as a control token and cannot read as "
                "text: the prompt would end, or change who speaks. Write it in another way, or remove the prompt."
            )
        found = found[: len(found) - self.ends]
        return found if self._frame is None else self._frame.around(found)

    def _check_marks(self, text: str, prompt: str) -> None:
        """Refuse a prompt with the mark of an image, even where the tokenizer could read it as text: data sets put it
        where an image goes."""
        assert self.pictures is not None
        mark = next((each for each in sorted(self.pictures.marks) if each in prompt), None)
        if mark is not None:
            raise ConfigError(
                f"prompt {text[:60]!r} holds {mark!r}, which stands for an image. Images are put before the text; "
                "remove it."
            )

    def _chat(self, text: str, prompt: str, numbers: Sequence[int]) -> list[int]:
        chat = self.render(text, self.messages(prompt), numbers)
        found = self.tokenizer(chat, add_special_tokens=False).input_ids
        return self._placed([int(token) for token in found], numbers)

    def _marked_chat(self, text: str, prompt: str, numbers: Sequence[int]) -> list[int] | None:
        roles, texts = zip(*self.messages(prompt), strict=True)
        marks, between = marked(self.tokenizer, texts)
        chat = self.render(text, list(zip(roles, marks, strict=True)), numbers)
        found = chat_ids(self.tokenizer, chat, between)
        return None if found is None else self._placed(found, numbers)

    def _placed(self, ids: list[int], numbers: Sequence[int]) -> list[int]:
        return ids if self.pictures is None else self.pictures.placed(ids, numbers)

    def render(
        self, text: str, messages: Sequence[tuple[str, str]], numbers: Sequence[int] = (), *, generate: bool = True
    ) -> str:
        """Return messages, (role, text) pairs, rendered by the template, with the marks of images as the processor
        writes them.

        Args:
            text: the prompt, for errors.
            messages: the messages.
            numbers: of the images of the last.
            generate: end with the beginning of an answer.

        Raises:
            ConfigError: the template fails, or reads the clock.
        """
        given = [{"role": role, "content": content} for role, content in messages]
        try:
            chat = render_chat(
                self._source,
                with_places(given, [{"type": "image"}] * len(numbers)) if self.in_parts else given,
                setting="rollout.tokens.template_date",
                day=self.section.template_date,
                generate=generate,
            )
            return chat if self.pictures is None else self.pictures.expanded(chat, numbers)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the tokenizer's chat template fails for prompt {text[:60]!r}: {error}. Set rollout.tokens.template "
                "to 'none', or mend the template."
            ) from error


def _end_tokens(tokenizer: Any) -> int:
    """Return the number of end tokens (end of text, or of a part) that a tokenizer appends to every text."""
    ends = {tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None)} - {None}
    written = list(tokenizer("a").input_ids)
    count = 0
    while count < len(written) and written[-1 - count] in ends:
        count += 1
    return count
