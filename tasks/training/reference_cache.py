"""The cache of the frozen reference's outputs in an epoch that is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowmill.tasks.algorithms.base import Models
from flowmill.tasks.modalities.rows import Units
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.loop import Reading, chunks_of, dealt, read_ahead


@torch.no_grad()
def recall_reference(
    models: Models, done: Sequence[Units], *, reading: Reading, micro_batch_size: int, ranks: Ranks
) -> None:
    """Fill the cache, if there is one, as the updates did that a resumed epoch does not repeat.

    The last bits of an output depend on the micro-batch that a row was first in.
    """
    cache: Mapping[Any, Any] | None = models.remembered
    if cache is None:
        return
    for units in done:
        own = dealt(chunks_of(units, reading.alike, micro_batch_size), ranks)
        new = [chunk for chunk in own if not cache.keys() >= set(map(tuple, chunk.rows.tolist()))]
        for batch in read_ahead(reading.read, new):
            models.recall(batch)
