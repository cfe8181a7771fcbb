"""Chats of several messages as rows of data: the first message of the user is the prompt.

A message has a role, a content, and for answers maybe a weight. Anything else in it would change what a template
renders, so a row with more is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from flowmill.configs.errors import DataError
from flowmill.configs.fingerprint import canonical_json, hash_text
from flowmill.tasks.inputs.data_file import DataFile
from flowmill.tasks.inputs.rows.row import is_unicode

_ROLES = ("system", "user", "assistant")
_READ = ("role", "content", "weight")
#: Roles of ShareGPT, whose messages have 'from' and 'value'.
_SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
#: Values of a key that say nothing, as tables have them where some rows lack the key.
_EMPTY: tuple[Any, ...] = (None, "", [], {})
#: Columns that chat templates of other trainers read.
_OF_TEMPLATES = ("tools", "chat_template_kwargs")
_OBJECTS = re.compile(r"\s*(\[\s*)?\{")
#: Keys of messages: the speaker, whom each has, and the text.
_KEYS = (("role", "content"), ("from", "value"))


class Message(NamedTuple):
    """One message."""

    role: str
    text: str
    weight: int = 1
    """0: an answer that is not trained on."""


def read_chat(value: Any, name: str) -> tuple[str, DataFile]:
    """Return the prompt of a chat, and the whole chat as a sample.

    Args:
        value: a list of objects with role and content; as JSON where a table holds only texts.
        name: place and column, for messages.
    """
    return _sample(read_messages(value, name), name)


def _sample(messages: Sequence[Message], name: str) -> tuple[str, DataFile]:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        raise DataError(
            f"{name} is a chat of {', '.join(roles) or 'no messages'}; user and assistant take turns, a system message "
            "may come first, and the assistant is last. Mend the row."
        )
    if not any(message.weight for message in messages if message.role == "assistant"):
        raise DataError(f"{name}: every answer has weight 0, so there is nothing to learn. Remove the row.")
    # Chats without weights have the key that they had before there were some.
    text = canonical_json([message[: 3 - message.weight] for message in messages])
    if not is_unicode(text):
        raise DataError(f"{name} has half a character, which is no Unicode text. Write it again.")
    return messages[roles.index("user")].text, DataFile(name=name, key=hash_text(text), text=text, is_chat=True)


def read_messages(value: Any, name: str) -> list[Message]:
    """Return the messages of a chat, or of a part of one; see ``read_chat``."""
    try:
        listed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise DataError(
            f"{name} is no list of messages, each with a role ({', '.join(_ROLES)}) and a text as content. Mend the "
            "row, or set data.columns.messages."
        )
    return [_message(each, f"{name}: message {number}") for number, each in enumerate(listed, 1)]


def from_json(value: Any) -> Any:
    """Return the objects that a text holds as JSON, as tables of texts have them; any other value as it is."""
    if not isinstance(value, str) or not _OBJECTS.match(value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def as_messages(value: Any) -> Any:
    """Return the messages that a text holds as JSON; any other value, such as an answer that is JSON, as it is."""
    listed = from_json(value)
    if not is_chat(listed):
        return value
    keys = ((all(who in each for each in listed), any(said in each for each in listed)) for who, said in _KEYS)
    return listed if (True, True) in keys else value


def is_chat(value: Any) -> bool:
    """Return whether a column has messages where it could have a text."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def read_replies(prompt: Any, replies: Mapping[str, Any], place: str) -> tuple[str, tuple[DataFile, ...]]:
    """Return the prompt of a row, and its replies as samples, of which the last answer is trained on.

    Args:
        prompt: the prompt: a text or messages; None where each reply is a whole chat.
        replies: a text, messages after the prompt, or messages of a whole chat, by column.
        place: location of the row.
    """
    before: list[Message] = []
    if prompt not in _EMPTY:
        before = [Message("user", prompt)] if isinstance(prompt, str) else read_messages(prompt, f"{place}, the prompt")
    chats = {name: _whole(before, value, f"{place}, {name}") for name, value in replies.items()}
    first, *others = chats.values()
    if any(chat[:-1] != first[:-1] for chat in others):
        raise DataError(
            f"{place}: {' and '.join(chats)} differ before their last messages, so they answer no common prompt. Mend "
            "the row."
        )
    samples = [_sample(chat, f"{place}, {name}") for name, chat in chats.items()]
    return samples[0][0], tuple(sample if len(first) > 2 else _alone(sample) for _, sample in samples)


def _whole(before: Sequence[Message], value: Any, name: str) -> list[Message]:
    """Return the messages of a reply from the first on; answers before the last are not trained on."""
    reply = [Message("assistant", value)] if isinstance(value, str) else read_messages(value, name)
    if reply and reply[0].role != "assistant":
        whole = reply[: len(before)] == before or (len(before) == 1 and before[0] in reply[:-1])
        if not whole:
            raise DataError(
                f"{name} is a chat without the row's prompt. Mend the row, or remove the column of the prompt."
            )
        before = []
    *earlier, last = [*before, *reply] or [Message("user", "")]
    return [*(each._replace(weight=0) if each.role == "assistant" else each for each in earlier), last]


def _alone(sample: DataFile) -> DataFile:
    text = messages_of(sample)[-1].text
    return DataFile(name=sample.name, key=hash_text(text), text=text)


def check_columns(row: Mapping[str, Any], place: str) -> None:
    """Refuse a row of chats with a column that its template would have to read."""
    if column := next((name for name in _OF_TEMPLATES if row.get(name) not in _EMPTY), None):
        raise DataError(
            f"{place} has a column '{column}', but the chat template is not given it, so the model would learn other "
            "texts than are meant. Write it into the message of the system, or remove the column."
        )


def messages_of(sample: DataFile) -> list[Message]:
    """Return the messages of a chat."""
    return [Message(*each) for each in json.loads(str(sample.text))]


def history_of(sample: DataFile, *, system: bool = True) -> str:
    """Return a digest of the messages before the first answer that is trained on; empty if that is the prompt alone.

    Args:
        system: count the system's messages too.
    """
    messages = [each for each in messages_of(sample) if system or each.role != "system"] if sample.is_chat else []
    before = list(takewhile(lambda each: each.role != "assistant" or not each.weight, messages))
    return hash_text(canonical_json([each[:2] for each in before]))[:16] if len(before) > 1 else ""


def shown_text(sample: DataFile) -> str:
    """Return a text of data for people: of a chat, the messages after the prompt with their roles."""
    if not sample.is_chat:
        return str(sample.text)
    messages = messages_of(sample)
    after = [message.role for message in messages].index("user") + 1
    return "\n\n".join(f"{message.role}: {message.text}" for message in messages[after:])


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{name} is {value!r:.60}, no object with role and content. Mend the row.")
    role, weight = value.get("role") or _SHAREGPT.get(str(value.get("from"))), value.get("weight")
    if role not in _ROLES:
        raise DataError(f"{name} has the role {role!r:.60}; there are {', '.join(_ROLES)}. Mend the row.")
    read = (*_READ, "from", "value") if "from" in value else _READ
    if more := [str(key) for key, each in value.items() if key not in read and each not in _EMPTY]:
        raise DataError(
            f"{name} has {', '.join(map(repr, more))}, which is not trained on: of a message, role, content and weight "
            "are read. Write it into the content as the model's chat template renders it, or remove it."
        )
    if weight is not None and weight not in ((0, 1) if role == "assistant" else (0,)):
        raise DataError(
            f"{name} has the weight {weight!r:.60}, but answers of the assistant have 0 or 1, and other messages are "
            "never trained on. Mend the row."
        )
    text = _text(value.get("value") if "from" in value else value.get("content"), name)
    if not text.strip():
        raise DataError(f"{name} is empty. Mend the row.")
    return Message(role, text, 1 if weight is None else int(weight))


def _text(content: Any, name: str) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if not _is_text(part):
            fault = "has no content" if content is None else f"has {part!r:.60} as content"
            raise DataError(f"{name} {fault}; it can be a text, or a list of parts of the type 'text'. Mend the row.")
    return "".join(part["text"] for part in parts)


def _is_text(part: Any) -> bool:
    fields = {key: each for key, each in part.items() if each not in _EMPTY} if isinstance(part, Mapping) else {}
    return fields.keys() <= {"type", "text"} and fields.get("type") == "text" and isinstance(part.get("text"), str)
