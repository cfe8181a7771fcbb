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

#: Attributes of tokenizers with the placeholders of images, clips and sounds.
_PLACES = ("image_token", "video_token", "audio_token")
_KNOWN: WeakKeyDictionary[Any, tuple[int, re.Pattern[str]]] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of a tokenizer's control tokens, the longest first. Tokens of one character are excluded, as
    some families pad with letters or signs (CLIP's '!' in Stable Diffusion XL), and so is a token that only stands for
    unknown text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {str(token.content) for token in added if token.special}
    names |= {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    names |= {found for found in (getattr(tokenizer, place, None) for place in _PLACES) if isinstance(found, str)}
    roles = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token")
    if (unknown := getattr(tokenizer, "unk_token", None)) not in [getattr(tokenizer, role, None) for role in roles]:
        names.discard(unknown)
    return tuple(sorted((name for name in names if len(name) > 1), key=lambda name: (-len(name), name)))


def first_mark(tokenizer: Any, text: str) -> str | None:
    """Return the first control token in a text, or None."""
    found = _pattern(tokenizer).search(text)
    return None if found is None else found[0]


def as_text(tokenizer: Any, text: str) -> str:
    """Return a text without control tokens: a space is inserted after the first character of each, '< /s>'."""
    pattern = _pattern(tokenizer)
    while (found := pattern.search(text)) is not None:
        broken = f"{found[0][0]} {found[0][1:]}"
        # The text with the space could be a token too; then it is removed.
        text = text.replace(found[0], "" if pattern.search(broken) else broken)
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
    return [_pattern(tokenizer).sub(lambda found: f"{first}{found[0]}{last}", text) for text in texts], (first, last)


def chat_ids(tokenizer: Any, chat: str, between: tuple[str, str], *, begins: bool = True) -> list[int] | None:
    """Return the ids of a chat, or a part of one, rendered from marked texts: marked parts are encoded as plain text.

    As ``sanitize_control_tokens`` of transformers 5.23 (``encode_marked_chat``): pieces are encoded after a line break,
    which is removed again, so that SentencePiece puts no space before them.

    Args:
        between: the characters around marked parts, see ``marked``.
        begins: nothing comes before.

    Returns:
        Its ids, without the tokenizer's added tokens; None: the tokenizer does not support that.
    """
    first, last = between
    pieces = re.split(f"({first}[^{first}{last}]*{last})", chat)
    found: list[int] = []
    for place, piece in enumerate(pieces):
        plain = piece.startswith(first) and piece.endswith(last)
        bare, at_start = piece.replace(first, "").replace(last, ""), begins and place == 0
        ids = _piece_ids(tokenizer, bare, begins=at_start, plain=plain)
        if ids is None or (plain and _ids(tokenizer).intersection(ids)):
            return None
        found += ids
    return found


def _piece_ids(tokenizer: Any, piece: str, *, begins: bool, plain: bool) -> list[int] | None:
    how: Mapping[str, bool] = {"add_special_tokens": False, **({"split_special_tokens": True} if plain else {})}
    try:
        before = [] if begins else tokenizer("\n", add_special_tokens=False).input_ids
        ids = tokenizer(piece if begins else f"\n{piece}", **how).input_ids if piece else before
        if ids[: len(before)] != before:
            before, ids = [], tokenizer(piece, **how).input_ids
    except (TypeError, ValueError, NotImplementedError):
        return None
    return [int(token) for token in ids[len(before) :]]


def _ids(tokenizer: Any) -> set[int]:
    numbers = {name: tokenizer.convert_tokens_to_ids(name) for name in control_tokens(tokenizer)}
    # A tokenizer returns the id of another token for a name it does not know.
    return {int(n) for name, n in numbers.items() if n is not None and tokenizer.convert_ids_to_tokens(n) == name}


def _pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return the pattern of control tokens; it is rebuilt when tokens are added to the tokenizer, as rewards do."""
    size = len(tokenizer)
    known = _KNOWN.get(tokenizer)
    if known is None or known[0] != size:
        # Without control tokens the pattern matches nothing.
        known = (size, re.compile("|".join(map(re.escape, control_tokens(tokenizer))) or "(?!)"))
        _KNOWN[tokenizer] = known
    return known[1]
