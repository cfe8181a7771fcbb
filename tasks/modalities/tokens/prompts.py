"""Prompts as token ids; special tokens come only from the tokenizer and its template, never from a prompt's text.

Images of a prompt come before its text, in order; their tokens have negative ids, see
``flowmill.models.policies.pictures``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowmill.configs.errors import ConfigError, listed
from flowmill.configs.tokens import TokensSection
from flowmill.models.policies.language_model_folders import CONTEXT, Frame, end_tokens
from flowmill.models.text.chat_templates import render_chat, template_dates
from flowmill.models.text.continuations import appended_ends
from flowmill.models.text.control_tokens import chat_ids, first_mark, marked, plain_ids, split_end, text_ids
from flowmill.tasks.inputs.prompts import Prompt, StoredPrompt, image_keys

if TYPE_CHECKING:
    from flowmill.models.policies.pictures import Pictures

#: Private character for the text of an answer in a rendered chat.
_TEXT = "\ue000"
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
        ends: Sequence[int] = (),
    ) -> None:
        """Bind to a tokenizer.

        Args:
            tokenizer: a transformers tokenizer.
            section: settings of text sampling.
            context_length: maximum tokens of prompt and completion; None: no limit.
            pictures: images of the model; None: it reads texts alone.
            look: opens images.
            frame: further tokens around prompts.
            ends: end tokens that the model's configs name.
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
        self.ends = 0 if self.chat else appended_ends(tokenizer)
        """End tokens that the tokenizer appends to a text; they are removed because a completion follows."""
        named = {token: tokenizer.convert_ids_to_tokens(token) for token in (*end_tokens(tokenizer), *ends)}
        self.end_tokens: Mapping[str, int] = {str(name): token for token, name in named.items() if name is not None}
        """End tokens of the tokenizer and of the model's configs, by their text."""
        self._cached: dict[tuple[str, ...], list[int]] = {}

    @property
    def in_parts(self) -> bool:
        """Whether the chat template is a processor's, which reads messages in parts."""
        return self.pictures is not None or self._frame is not None

    @property
    def _source(self) -> Any:
        return self.tokenizer if self.pictures is None else self.pictures.processor

    def ids(self, text: str, images: Sequence[str] = ()) -> list[int]:
        """Return the ids of a prompt, at least one.

        Args:
            images: content keys of its images.
        """
        key = (text, *images)
        if key not in self._cached:
            self._cached[key] = self.fitting(text, images)
        return self._cached[key]

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

    @cached_property
    def _end(self) -> int | None:
        """The token after a text: the one that the template writes after an answer, or the tokenizer's."""
        if self.chat and len(self.end_tokens) > 1:
            with suppress(ConfigError):
                chat = self.render(".", [*self.messages("."), ("assistant", _TEXT)], generate=False)
                if (name := self.first_end(chat.rpartition(_TEXT)[2])) is not None:
                    return self.end_tokens[name]
        return next(iter(self.end_tokens.values()), None)

    def first_end(self, text: str) -> str | None:
        """Return the first end token in a text."""
        names = [name for name in self.end_tokens if name in text]
        return min(names, key=lambda name: (text.index(name), -len(name)), default=None)

    def completion(self, text: str, around: Sequence[str] = ()) -> tuple[list[int], str]:
        """Return the ids of a completion of data after a prompt, with an end token, and its text without that.

        Args:
            text: the completion.
            around: the texts before and after its words, see ``around_answers``.
        """
        words, end = split_end(self.tokenizer, text, self.end_tokens)
        written = words.strip().join(around) if around else words
        tokens, most = text_ids(self.tokenizer, written), self.section.max_new
        if tokens is None:
            mark = first_mark(self.tokenizer, words)
            raise ConfigError(f"it holds {mark!r}, which the tokenizer cannot read as text. Write it in another way.")
        end = self._end if end is None else end
        ids = [*tokens, *(() if end is None else (end,))]
        if len(ids) > most:
            raise ConfigError(
                f"it has {len(ids)} tokens, but rollout.tokens.max_new is {most}. Raise it, or shorten it."
            )
        return ids, words

    def messages(self, prompt: str) -> list[tuple[str, str]]:
        """Return the first messages of a chat without images, as (role, text) pairs."""
        system = [] if self.section.system is None else [("system", self.section.system)]
        return [*system, ("user", prompt)]

    def template_dates(self, prompt: str) -> dict[str, str]:
        """Return the dates that the template requests, by format."""
        messages = [{"role": role, "content": text} for role, text in self.messages(prompt)]
        day = self.section.template_date
        return {} if day is None else template_dates(self.tokenizer, messages, day)

    def reads(self, prompt: Prompt | StoredPrompt) -> bool:
        """Return whether a prompt has ids."""
        with suppress(ConfigError):
            return bool(self.of(prompt))
        return False

    def longest(self, splits: Mapping[str, Sequence[Prompt | StoredPrompt]], rows: Collection[str] = ()) -> int:
        """Return the tokens of the longest prompt.

        Args:
            splits: prompts by split.
            rows: splits of rows of data, without those that cannot be read: ``ingest`` refuses each with its place.
        """
        most, reasons = 0, list[str]()
        for split, prompts in splits.items():
            for row, prompt in enumerate(prompts, 1):
                try:
                    most = max(most, len(self.of(prompt)))
                except ConfigError as error:
                    if split in rows:
                        continue
                    reasons.append(f"prompts.{split}, number {row}: {error}")
        if reasons:
            raise ConfigError(listed(reasons))
        return most

    def fitting(self, text: str, images: Sequence[str] = ()) -> list[int]:
        """Return the ids of a prompt without caching them; see ``ids``."""
        numbers = self._numbers(images)
        ids = self._rendered(text, numbers)
        if not ids:
            raise ConfigError(f"prompt {text[:60]!r} has no token. Remove it, or use a chat template.")
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if self.section.on_overlong == "cut_left" and not numbers:
            return ids[-self.limit :]
        raise ConfigError(
            f"prompt {text[:60]!r} has {len(ids)} tokens, but at most {self.limit} fit (rollout.tokens.max_prompt, "
            f"and the model's limit, {CONTEXT}, less rollout.tokens.max_new). Shorten it, lower max_new, or set "
            "rollout.tokens.on_overlong to 'cut_left'."
        )

    def _rendered(self, text: str, numbers: Sequence[int]) -> list[int]:
        if not text:
            # A given text without a prompt begins where documents do.
            begin = self.tokenizer.bos_token_id
            return [token for token in (begin, *self.end_tokens.values()) if token is not None][:1]
        prompt = self.section.instructed(text)
        mark = first_mark(self.tokenizer, prompt)
        if self.pictures is not None:
            self._check_marks(text, prompt)
        if self.chat:
            ids = self._chat(text, prompt, numbers) if mark is None else self._marked_chat(text, prompt, numbers)
        elif mark is None:
            ids = [int(token) for token in self.tokenizer(prompt).input_ids]
        else:
            ids = plain_ids(self.tokenizer, prompt)
        if ids is None:
            raise ConfigError(
                f"prompt {text[:60]!r} holds {mark!r}, which the tokenizer reads as a control token and cannot read as "
                "text: the prompt would end, or change who speaks. Write it in another way, or remove the prompt."
            )
        ids = ids[: len(ids) - self.ends]
        return ids if self._frame is None else self._frame.around(ids)

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
        ids = self.tokenizer(chat, add_special_tokens=False).input_ids
        return self._placed([int(token) for token in ids], numbers)

    def _marked_chat(self, text: str, prompt: str, numbers: Sequence[int]) -> list[int] | None:
        roles, texts = zip(*self.messages(prompt), strict=True)
        marks, between = marked(self.tokenizer, texts)
        chat = self.render(text, list(zip(roles, marks, strict=True)), numbers)
        ids = chat_ids(self.tokenizer, chat, between)
        return None if ids is None else self._placed(ids, numbers)

    def _placed(self, ids: list[int], numbers: Sequence[int]) -> list[int]:
        return ids if self.pictures is None else self.pictures.placed(ids, numbers)

    def render(
        self, text: str, messages: Sequence[tuple[str, str]], numbers: Sequence[int] = (), *, generate: bool = True
    ) -> str:
        """Return messages, (role, text) pairs, rendered by the template, with the marks of images as the processor
        writes them.

        Args:
            text: the prompt, for errors.
            numbers: of the images of the last.
            generate: end with the beginning of an answer.
        """
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            chat = render_chat(
                self._source,
                with_places(turns, [{"type": "image"}] * len(numbers)) if self.in_parts else turns,
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
