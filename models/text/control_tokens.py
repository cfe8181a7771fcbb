"""Control tokens (end of text, roles, image placeholders) whose text occurs in a prompt or in the output of a policy.

A tokenizer turns such text into the token itself: a prompt could end its own turn, or move an image's placeholder.
Prompts of a language model are encoded as plain text, or refused if the tokenizer cannot do that. Prompts of image
models are refused. Texts for a reward or a renderer get a space inserted into the token's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from flowmill.configs.errors import ConfigError
from flowmill.models.text.continuations import part_ids

#: Attributes of tokenizers with the placeholders of images, clips and sounds.
_PLACES = ("image_token", "video_token", "audio_token")
#: Size of a tokenizer's vocabulary, its control tokens, and their pattern.
_PATTERNS: WeakKeyDictionary[Any, tuple[int, tuple[str, ...], re.Pattern[str]]] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of a tokenizer's control tokens, the longest first. Tokens of one character are excluded, as
    some families pad with letters or signs (CLIP's '!' in Stable Diffusion XL), and so is a token that only stands for
    unknown text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token.content) for token in added if token.special}
    names |= {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    names |= {mark for mark in (getattr(tokenizer, place, None) for place in _PLACES) if isinstance(mark, str)}
    roles = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token")
    if (unknown := getattr(tokenizer, "unk_token", None)) not in [getattr(tokenizer, role, None) for role in roles]:
        names.discard(unknown)
    return tuple(sorted((name for name in names if len(name) > 1), key=lambda name: (-len(name), name)))


def first_mark(tokenizer: Any, text: str) -> str | None:
    """Return the first control token in a text, or None."""
    match = _pattern(tokenizer).search(text)
    return None if match is None else match[0]


def as_text(tokenizer: Any, text: str) -> str:
    """Return a text without control tokens: a space is inserted after the first character of each, '< /s>'."""
    pattern = _pattern(tokenizer)
    while (match := pattern.search(text)) is not None:
        broken = f"{match[0][0]} {match[0][1:]}"
        # The text with the space could be a token too; then it is removed.
        text = text.replace(match[0], "" if pattern.search(broken) else broken)
    return text


def as_texts(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """Return texts without control tokens, see ``as_text``."""
    return [as_text(tokenizer, text) for text in texts]


def plain_ids(tokenizer: Any, text: str) -> list[int] | None:
    """Return the ids of a text, with the tokenizer's added tokens but with control tokens in it as plain text. None:
    the tokenizer does not support that."""
    try:
        whole = tokenizer(text, split_special_tokens=True).input_ids
        bare = tokenizer(text, split_special_tokens=True, add_special_tokens=False).input_ids
    except (TypeError, ValueError, NotImplementedError):
        return None
    return None if _ids(tokenizer).intersection(bare) else [int(token) for token in whole]


def marked(tokenizer: Any, texts: Sequence[str]) -> tuple[list[str], tuple[str, str]]:
    """Return texts with two unused characters around their control tokens, and these two characters."""
    present = set().union(*texts)
    free = (each for each in map(chr, range(0xE000, 0xF8FF)) if each not in present)
    first, last = next(free), next(free)
    return [_pattern(tokenizer).sub(lambda match: f"{first}{match[0]}{last}", text) for text in texts], (first, last)


def chat_ids(tokenizer: Any, chat: str, between: tuple[str, str], *, begins: bool = True) -> list[int] | None:
    """Return the ids of a chat, or a part of one, rendered from marked texts: marked parts are encoded as plain text.

    Args:
        between: the characters around marked parts, see ``marked``.
        begins: nothing comes before.

    Returns:
        Its ids, without the tokenizer's added tokens; None: the tokenizer does not support that.
    """
    first, last = between
    pieces = re.split(f"({first}[^{first}{last}]*{last})", chat)
    all_ids: list[int] = []
    for place, piece in enumerate(pieces):
        plain = piece.startswith(first) and piece.endswith(last)
        bare, at_start = piece.replace(first, "").replace(last, ""), begins and place == 0
        try:
            ids = part_ids(tokenizer, bare, begins=at_start, plain=plain)
        except (TypeError, ValueError, NotImplementedError):
            return None
        if plain and _ids(tokenizer).intersection(ids):
            return None
        all_ids += ids
    return all_ids


def text_ids(tokenizer: Any, text: str) -> list[int] | None:
    """Return the ids of a text after another, with control tokens in it as plain text; see ``chat_ids``."""
    if first_mark(tokenizer, text) is None:
        return part_ids(tokenizer, text)
    (text,), between = marked(tokenizer, [text])
    return chat_ids(tokenizer, text, between, begins=False)


def split_end(tokenizer: Any, text: str, ends: Mapping[str, int]) -> tuple[str, int | None]:
    """Return a text without the end token whose text it ends with, and that token; None: it ends with its own words.

    Args:
        tokenizer: the model's tokenizer.
        ends: ids of end tokens by their texts.
    """
    words = text.rstrip()
    names = [*sorted(ends, key=len, reverse=True), *_entry(tokenizer)[0]]
    mark = next((name for name in names if len(name) > 1 and words.endswith(name)), None)
    if mark is None:
        return text, None
    if mark in ends and words == text:
        return text.removesuffix(mark), ends[mark]
    raise ConfigError(
        f"it ends with {mark!r}, which would be learned letter by letter, not as the control token. Remove it"
        f"{', or the spaces after it' if mark in ends else ''}."
    )


def _ids(tokenizer: Any) -> set[int]:
    numbers = {name: tokenizer.convert_tokens_to_ids(name) for name in control_tokens(tokenizer)}
    # A tokenizer returns the id of another token for a name it does not know.
    return {int(n) for name, n in numbers.items() if n is not None and tokenizer.convert_ids_to_tokens(n) == name}


def _pattern(tokenizer: Any) -> re.Pattern[str]:
    return _entry(tokenizer)[1]


def _entry(tokenizer: Any) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Return control tokens and their pattern; computed again when tokens are added to the tokenizer, as rewards do."""
    size = len(tokenizer)
    entry = _PATTERNS.get(tokenizer)
    if entry is None or entry[0] != size:
        names = control_tokens(tokenizer)
        # Without control tokens the pattern matches nothing.
        entry = _PATTERNS[tokenizer] = (size, names, re.compile("|".join(map(re.escape, names)) or "(?!)"))
    return entry[1:]
