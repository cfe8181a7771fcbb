"""Token ids of given chats, with a mask of the assistant's answers as a rollout would have sampled them."""

from __future__ import annotations

from collections.abc import Sequence

from configs.errors import ConfigError
from models.text.control_tokens import chat_ids, marked
from tasks.inputs.chats import Message
from tasks.modalities.tokens.prompts import Prompts

_REFUSED = (
    "the model's chat template cannot mark the answers of a chat: {reason}. Split the chat into rows of one answer, or "
    "mend the template."
)


def chat_tokens(prompts: Prompts, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Return token ids of a chat, and 1 for each token that is trained on: the texts of the assistant and the end token
    after each.

    The text before an answer is rendered as for a rollout that begins there, so every earlier message must be rendered
    as it was, and an answer is its own text up to the end token. Templates that drop earlier thoughts, or end turns
    otherwise, are refused.

    Args:
        prompts: tokenizer and template.
        messages: of user and assistant in turns; the assistant is last.

    Raises:
        ConfigError: there is no template, it cannot mark answers, or a text cannot be tokenized.
    """
    if not prompts.chat:
        raise ConfigError("data.messages names chats, but prompts go through no chat template. Set data.prompt.")
    given = messages if messages[0][0] == "system" else [*prompts.messages("")[:-1], *messages]
    tokenizer, label = prompts.tokenizer, next(text for role, text in given if role == "user")
    texts, between = marked(tokenizer, [text for _, text in given])
    given = [(role, text) for (role, _), text in zip(given, texts, strict=True)]
    rendered, ids, mask = "", list[int](), list[int]()
    for place in (place for place, (role, _) in enumerate(given) if role == "assistant"):
        before = prompts.render(label, given[:place])
        through = prompts.render(label, given[: place + 1], generate=False)
        answer = _answer(rendered, before, through, given[place][1], tokenizer.eos_token)
        for piece, trained in ((before[len(rendered) :], 0), (answer, 1)):
            found = chat_ids(tokenizer, piece, between, begins=not ids or trained == 1)
            if found is None:
                raise ConfigError("it holds a control token, which the tokenizer cannot read as text. Remove it.")
            ids += found
            mask += [trained] * len(found)
        ids.append(int(tokenizer.eos_token_id))
        mask.append(1)
        rendered = before + answer + tokenizer.eos_token
    first, most = mask.index(1), prompts.section.max_new
    if (rest := len(ids) - first) > most:
        raise ConfigError(f"it has {rest} tokens from its first answer on, but rollout.tokens.max_new is {most}.")
    if prompts.limit is not None and first > prompts.limit:
        raise ConfigError(f"it has {first} tokens before its first answer, but at most {prompts.limit} fit.")
    return ids, mask


def _answer(rendered: str, before: str, through: str, text: str, end: str | None) -> str:
    """Return the text of an answer as rendered: ``through`` is ``before``, which begins with the earlier ``rendered``,
    then the text and the end token."""
    if not (before.startswith(rendered) and through.startswith(before)):
        raise ConfigError(_REFUSED.format(reason="it renders earlier messages in another way later"))
    # The text itself may hold an apparent end.
    lead, found, rest = through[len(before) :].partition(text.strip())
    trail, ended, _ = rest.partition(end or "\0")
    if lead.strip() or not found:
        raise ConfigError(_REFUSED.format(reason="it renders an answer in another way than it is written"))
    if trail.strip() or not ended:
        raise ConfigError(_REFUSED.format(reason=f"it does not end an answer with the end token {end!r}"))
    return lead + found + trail
