"""Parts of texts as tokens, and tokens as parts of texts, as in the whole.

Many tokenizers (SentencePiece's, WordPiece's) begin a text with a space that it does not hold, and leave off the first
space of what they decode. A text after another has neither added nor removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

#: Ids that come before what is decoded, and their text, by tokenizer.
_BEFORE: WeakKeyDictionary[Any, tuple[list[int], str]] = WeakKeyDictionary()
#: Size of a tokenizer's vocabulary, and the ids of a line break.
_LINE_BREAKS: WeakKeyDictionary[Any, tuple[int, list[int]]] = WeakKeyDictionary()


def part_ids(tokenizer: Any, text: str, *, begins: bool = False, plain: bool = False) -> list[int]:
    """Return the ids of a part of a text, without the tokenizer's added tokens.

    As in transformers 5.23 (``encode_marked_chat``) it is encoded after a line break, which is removed again.

    Args:
        tokenizer: a transformers tokenizer.
        text: the part.
        begins: nothing comes before.
        plain: read control tokens in it as text; a tokenizer that does not know how raises TypeError, ValueError or
            NotImplementedError.
    """
    how: Mapping[str, bool] = {"add_special_tokens": False, **({"split_special_tokens": True} if plain else {})}
    before = [] if begins or not text else _line_break(tokenizer)
    ids = tokenizer(text if begins or not text else f"\n{text}", **how).input_ids
    if ids[: len(before)] != before:
        before, ids = [], tokenizer(text, **how).input_ids
    return [int(token) for token in ids[len(before) :]]


def _line_break(tokenizer: Any) -> list[int]:
    size = len(tokenizer)
    entry = _LINE_BREAKS.get(tokenizer)
    if entry is None or entry[0] != size:
        entry = _LINE_BREAKS[tokenizer] = (size, tokenizer("\n", add_special_tokens=False).input_ids)
    return entry[1]


def appended_ends(tokenizer: Any) -> int:
    """Return the number of end tokens (end of text, or of a part) that a tokenizer appends to every text."""
    ends = {tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None)} - {None}
    written = list(tokenizer("a").input_ids)
    count = 0
    while count < len(written) and written[-1 - count] in ends:
        count += 1
    return count


def part_text(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text of ids that follow others, with all of its spaces."""
    entry = _BEFORE.get(tokenizer)
    if entry is None:
        entry = _BEFORE[tokenizer] = _before(tokenizer)
    before, text = entry
    whole = _decoded(tokenizer, [*before, *ids], skip_special_tokens)
    return whole[len(text) :] if whole.startswith(text) else _decoded(tokenizer, ids, skip_special_tokens)


def _before(tokenizer: Any) -> tuple[list[int], str]:
    for text in "a", "1", ".":
        ids = [int(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
        if _decoded(tokenizer, ids, True) == text:
            return ids, text
    return [], ""


def _decoded(tokenizer: Any, ids: Sequence[int], skip: bool) -> str:
    # Otherwise transformers removes spaces before punctuation.
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))
