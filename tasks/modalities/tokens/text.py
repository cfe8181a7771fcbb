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
        """Return whether a completion (token ids) has reached a stop text."""
        if self.ids and ids[-1] in self.ids:
            return True
        return self._in(self.plain, ids, skip=True) or self._in(self.marked, ids, skip=False)

    def _in(self, stop: Sequence[str], ids: Sequence[int], *, skip: bool) -> bool:
        text = part_text(self.tokenizer, ids, skip_special_tokens=skip) if stop else ""
        return any(each in text for each in stop)


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
