"""Token ids of chats of data, with a mask of the assistant's answers as a rollout would have sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowmill.configs.errors import ConfigError
from flowmill.models.text.control_tokens import chat_ids, marked, split_end
from flowmill.tasks.inputs.chats import Message
from flowmill.tasks.modalities.tokens.prompts import Prompts

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
