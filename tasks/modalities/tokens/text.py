"""Stored texts: stop texts, finish reasons, and completions without special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowmill.configs.errors import CorruptError
from flowmill.models.text.continuations import part_text
from flowmill.storage.trajectories.base import TrajectoryShard

#: Reasons for the end of a completion; the index is stored.
FINISHES = ("eos", "length", "stop")
#: Bytes that may be left of a cut character, and the sign that decoders write for them.
_CUT, _BROKEN = 3, "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Texts that end a completion."""

    tokenizer: Any
    """The policy's tokenizer."""
    plain: tuple[str, ...]
    """Stop texts without special tokens, searched in the stored text."""
    marked: tuple[str, ...]
    """Stop texts with a special token, which the stored text omits."""
    ids: frozenset[int]
    """Special tokens that are a whole stop text."""

    @classmethod
    def of(cls, tokenizer: Any, stop: Sequence[str]) -> Stops:
        """Return the stop texts of a run, split by whether they hold special tokens of its tokenizer."""
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        special = {*tokenizer.all_special_tokens, *added}
        marked = tuple(each for each in stop if any(token in each for token in special))
        ids = frozenset(int(tokenizer.convert_tokens_to_ids(each)) for each in marked if each in special)
        return cls(tokenizer=tokenizer, plain=tuple(set(stop) - set(marked)), marked=marked, ids=ids)

    def reached(self, ids: Sequence[int]) -> bool:
        """Return whether a completion (token ids) has reached a stop text, which it had not with one token less."""
        if self.ids and ids[-1] in self.ids:
            return True
        return self._in(self.plain, ids, skip=True) or self._in(self.marked, ids, skip=False)

    def _in(self, stop: Sequence[str], ids: Sequence[int], *, skip: bool) -> bool:
        if not stop:
            return False
        # A byte more may turn all characters of a series into the sign of broken ones.
        exact = any(_BROKEN in each for each in stop)

        def text(start: int) -> str:
            return part_text(self.tokenizer, ids[max(0, start) :], skip_special_tokens=skip)

        # The newest token completes it, so the last tokens tell: the whole text each time takes quadratic time.
        longest, count = max(map(len, stop)), max(len(each.encode()) for each in stop) + _CUT
        while not exact and (start := len(ids) - count) > 0:
            texts = [text(start)]
            if _BROKEN in texts[0]:
                # Some decoders read no byte of a series that begins within a character.
                texts += [text(start - more) for more in range(1, _CUT + 1)]
            if any(each in tail for each in stop for tail in texts):
                break
            # Tokens may have no text, as special ones.
            if len(texts[0]) - len(text(len(ids) - 1)) >= longest + _CUT:
                return False
            count *= 2
        whole = text(0)
        return any(each in whole for each in stop)


def chosen_lengths(mask: np.ndarray) -> list[int]:
    """Return the number of tokens that the policy chose in each turn, from the mask of chosen ones (L,)."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [int(length) for length in edges[1::2] - edges[::2]]


def completed_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of a completion, without special tokens."""
    return part_text(tokenizer, ids)


def stored_text(shard: TrajectoryShard, row: int) -> str:
    """Return the completion of a stored sample."""
    text = shard.text(row)
    if text is None:
        raise CorruptError(f"Sample '{shard.table.column('sample_id')[row]}' has no text; the rollout stored none.")
    return text
