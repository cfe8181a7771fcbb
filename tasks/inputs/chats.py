"""Chats of several messages as rows of given data: the first message of the user is the prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import DataError
from configs.fingerprint import canonical_json, hash_text
from tasks.inputs.given_file import GivenFile, is_unicode

_ROLES = ("system", "user", "assistant")
Message = tuple[str, str]
"""Role and text."""


def read_chat(value: Any, name: str) -> tuple[str, GivenFile]:
    """Return the prompt of a chat, and the whole chat as a sample.

    Args:
        value: a list of objects with role and content; as JSON where a table holds only texts.
        name: place and column, for messages.

    Raises:
        DataError: it is no chat of a user and an assistant in turns, after at most one message of the system.
    """
    messages = _messages(value, name)
    roles = [role for role, _ in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        raise DataError(
            f"{name} is a chat of {', '.join(roles) or 'no messages'}; user and assistant take turns, a system message "
            "may come first, and the assistant is last. Mend the row."
        )
    if empty := next((number for number, (_, text) in enumerate(messages, 1) if not text.strip()), None):
        raise DataError(f"{name}: message {empty} is empty. Mend the row.")
    text = canonical_json(messages)
    if not is_unicode(text):
        raise DataError(f"{name} has half a character, which is no Unicode text. Write it again.")
    return messages[roles.index("user")][1], GivenFile(name=name, key=hash_text(text), text=text, is_chat=True)


def messages_of(sample: GivenFile) -> list[Message]:
    """Return the messages of a chat."""
    return [(role, text) for role, text in json.loads(str(sample.text))]


def shown_text(sample: GivenFile) -> str:
    """Return a given text for people: of a chat, the messages after the prompt with their roles."""
    if not sample.is_chat:
        return str(sample.text)
    messages = messages_of(sample)
    after = [role for role, _ in messages].index("user") + 1
    return "\n\n".join(f"{role}: {text}" for role, text in messages[after:])


def _messages(value: Any, name: str) -> list[Message]:
    try:
        listed = json.loads(value) if isinstance(value, str) else value
        found = [(each["role"], each["content"]) for each in listed if isinstance(each, Mapping)]
        if isinstance(listed, Sequence) and len(found) == len(listed) and all(map(_is_message, found)):
            return found
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise DataError(
        f"{name} is no list of messages, each with a role ({', '.join(_ROLES)}) and a text as content. Mend the row, "
        "or set data.messages."
    )


def _is_message(message: tuple[Any, Any]) -> bool:
    return message[0] in _ROLES and isinstance(message[1], str)
