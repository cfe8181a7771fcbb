"""What is stored of a text beside its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.errors import CorruptError
from storage.trajectories.base import TrajectoryShard

#: Why a completion ended, by the number that is stored.
FINISHES = ("eos", "length", "stop")


def completed_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of a completion, without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def stored_text(shard: TrajectoryShard, row: int) -> str:
    """Return the completion of a stored sample.

    Raises:
        CorruptError: none is stored, or the file is damaged.
    """
    found = shard.text(row)
    if found is None:
        raise CorruptError(f"Sample '{shard.table.column('sample_id')[row]}' has no text; the rollout stored none.")
    return found


def stored_finish(shard: TrajectoryShard, row: int) -> str:
    """Return why a stored completion ended."""
    return FINISHES[int(shard.array("finish", row)[0])]
