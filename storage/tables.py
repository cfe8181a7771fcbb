"""Artifacts whose shards are one table each: prompts, rewards, advantages."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.schema import ADVANTAGES, PROMPTS, REWARDS, read_table

#: File and columns of each kind.
TABLES: Mapping[str, tuple[str, pa.Schema]] = {
    "prompts": ("prompts.parquet", PROMPTS),
    "rewards": ("rewards.parquet", REWARDS),
    "advantages": ("advantages.parquet", ADVANTAGES),
}


def read_rows(store: ArtifactStore, ref: ArtifactRef) -> pa.Table:
    """Return all rows of an artifact whose kind is in ``TABLES``, in shard order.

    Raises:
        CorruptError: a table is damaged.
    """
    name, schema = TABLES[ref.kind]
    return pa.concat_tables([read_table(store.files(ref, record), name, schema) for record in store.shards(ref)])
