"""Texts and images of data as samples: a prompt as in rollouts, then the tokens that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from flowmill.configs.errors import ConfigError, DataError
from flowmill.models.text.control_tokens import chat_ids, marked, split_end
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.inputs.chats import Message, messages_of, shown_text
from flowmill.tasks.inputs.prompts import image_keys
from flowmill.tasks.modalities.data_images import read_media
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.samplers import SamplingContext
from flowmill.tasks.modalities.tokens.prompts import Prompts
from flowmill.tasks.modalities.tokens.run_prompts import prompts_of
from flowmill.tasks.modalities.tokens.text import FINISHES


class DataText(NamedTuple):
    """Token ids of a prompt and a text, or of a chat."""

    tokens: list[int]
    """All ids."""
    mask: list[int]
    """1 for each token that is trained on."""
    text: str = ""
    """The text as rewards and people see it."""


class DataImage(NamedTuple):
    """Token ids of a prompt, and an image."""

    prompt: list[int]
    """All ids of the prompt."""
    pixels: np.ndarray
    """(H, W, 3) uint8."""


def read_image(making: SamplingContext, sample: DataSample) -> DataImage:
    """Return the token ids of a prompt, and its image."""
    pixels, prompts = read_media(making, sample, sample.file.read()), prompts_of(making.context)
    try:
        return DataImage(list(prompts.stored(prompts.fitting(sample.prompt.text))), pixels)
    except ConfigError as error:
        raise DataError(f"{sample.file.name}: {error}") from None


def read_text(making: SamplingContext, sample: DataSample) -> DataText:
    """Return the token ids of a prompt and its text, which ends with an end token; or of a chat."""
    if sample.file.text is None:
        raise DataError(
            f"{sample.file.name} is a file, but the policy writes texts. Set data.columns.sample to a column of texts."
        )
    prompts = prompts_of(making.context)
    try:
        if sample.file.is_chat:
            return DataText(*chat_tokens(prompts, messages_of(sample.file)), shown_text(sample.file))
        prompt = prompts.stored(prompts.fitting(sample.prompt.text, image_keys(sample.prompt.metadata)))
        completion, text = prompts.completion(sample.file.text, making.context.around_answers)
    except ConfigError as error:
        raise DataError(f"{sample.file.name}: {error}") from None
    return _after(prompt, completion, text)


def text_samples(making: SamplingContext, samples: Sequence[DataSample], texts: Sequence[DataText]) -> list[Sample]:
    """Return texts of data as samples. Their behavior log-probs are NaN, so no loss can use them unseen."""
    return [
        _sample(sample, text, "eos", text=np.frombuffer(text.text.encode(), np.uint8))
        for sample, text in zip(samples, texts, strict=True)
    ]


def image_samples(
    samples: Sequence[DataSample], images: Sequence[DataImage], coded: Sequence[list[int]]
) -> list[Sample]:
    """Return images of data, coded as N ids each, as samples like those of ``text_samples``."""
    return [
        _sample(sample, _after(image.prompt, ids), "length", media=image.pixels)
        for sample, image, ids in zip(samples, images, coded, strict=True)
    ]


def _after(prompt: Sequence[int], ids: Sequence[int], text: str = "") -> DataText:
    return DataText([*prompt, *ids], [0] * len(prompt) + [1] * len(ids), text)


def _sample(sample: DataSample, content: DataText, finish: str, **more: Any) -> Sample:
    unknown = np.full(sum(content.mask), np.nan, np.float32)
    return Sample(
        **sample.columns(),
        **more,
        sigmas=(),
        log_probs=unknown,
        tokens=np.array(content.tokens, np.int32),
        token_mask=np.array(content.mask, np.uint8),
        sampled_log_probs=unknown,
        finish=np.array([FINISHES.index(finish)], np.uint8),
    )


#: Private character for the words of an answer in a rendered chat.
_WORDS = "\ue000"
_REFUSED = (
    "the model's chat template cannot mark the answers of a chat: {reason}. Split the chat into rows of one answer, or "
    "mend the template."
)


def chat_tokens(prompts: Prompts, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Return token ids of a chat, and 1 for each token that is trained on: the texts of the assistant and the end token
    after each, but for answers of weight 0.

    The text before an answer is rendered as for a rollout that begins there, so every earlier message must be rendered
    as it was, and an answer is its own text up to an end token. Templates that drop earlier thoughts, or end turns
    otherwise, are refused.

    Args:
        prompts: tokenizer and template.
        messages: of user and assistant in turns; the assistant is last.
    """
    if not prompts.chat:
        raise ConfigError(
            "data.columns.messages names chats, but prompts go through no chat template. Set data.columns.prompt."
        )
    system = [Message(*each) for each in prompts.messages("")[:-1]]
    chat = list(messages) if messages[0].role == "system" else [*system, *messages]
    tokenizer, label = prompts.tokenizer, next(message.text for message in chat if message.role == "user")
    texts, between = marked(tokenizer, [message.text for message in chat])
    turns = [(message.role, text) for message, text in zip(chat, texts, strict=True)]
    rendered, ids, mask = "", list[int](), list[int]()
    for place, message in enumerate(chat):
        if message.role != "assistant":
            continue
        _check_end(tokenizer, message.text, place + 1 + len(messages) - len(chat))
        before = prompts.render(label, turns[:place])
        through = prompts.render(label, turns[: place + 1], generate=False)
        answer, end = _answer(prompts, rendered, before, through, turns[place][1])
        for piece, weight in ((before[len(rendered) :], 0), (answer, message.weight)):
            piece_ids = chat_ids(tokenizer, piece, between, begins=not ids)
            if piece_ids is None:
                raise ConfigError("it holds a control token, which the tokenizer cannot read as text. Remove it.")
            ids += piece_ids
            mask += [weight] * len(piece_ids)
        ids.append(prompts.end_tokens[end])
        mask.append(message.weight)
        rendered = before + answer + end
    first, most = mask.index(1), prompts.section.max_new
    if (rest := len(ids) - first) > most:
        raise ConfigError(f"it has {rest} tokens from its first answer on, but rollout.tokens.max_new is {most}.")
    if prompts.limit is not None and first > prompts.limit:
        raise ConfigError(f"it has {first} tokens before its first answer, but at most {prompts.limit} fit.")
    return ids, mask


def around_answers(prompts: Prompts) -> tuple[str, ...]:
    """Return the spaces that the chat template writes before and after the words of an answer, which a chat in one row
    has too; empty if there are none, or if the template cannot mark answers."""
    if not prompts.chat:
        return ()
    messages = prompts.messages(".")
    with suppress(ConfigError):
        through = prompts.render(".", [*messages, ("assistant", _WORDS)], generate=False)
        answer, _ = _answer(prompts, "", prompts.render(".", messages), through, _WORDS)
        return () if answer == _WORDS else tuple(answer.split(_WORDS))
    return ()


def _check_end(tokenizer: Any, text: str, number: int) -> None:
    try:
        split_end(tokenizer, text, {})
    except ConfigError as error:
        raise ConfigError(f"message {number}: {error} The template writes the end of an answer.") from None


def _answer(prompts: Prompts, rendered: str, before: str, through: str, text: str) -> tuple[str, str]:
    """Return the text of an answer as rendered, and the end token after it: ``through`` is ``before``, which begins
    with the earlier ``rendered``, then the text and the end token."""
    if not (before.startswith(rendered) and through.startswith(before)):
        raise ConfigError(_REFUSED.format(reason="it renders earlier messages in another way later"))
    # The text itself may hold an apparent end.
    lead, words, rest = through[len(before) :].partition(text.strip())
    end = prompts.first_end(rest)
    trail = rest if end is None else rest.partition(end)[0]
    if lead.strip() or not words:
        raise ConfigError(_REFUSED.format(reason="it renders an answer in another way than it is written"))
    if end is None or trail.strip():
        ends = " or ".join(map(repr, prompts.end_tokens))
        raise ConfigError(_REFUSED.format(reason=f"it does not end an answer with the end token {ends or None}"))
    return lead + words + trail, end
