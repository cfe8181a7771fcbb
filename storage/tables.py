"""Artifacts whose shards are one table each: prompts, rewards, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.records import ShardRecord

#: Name of the columns of each kind in ``storage.schema``, which is imported only where a table is: it takes Arrow.
TABLES: Mapping[str, str] = {"prompts": "PROMPTS", "rewards": "REWARDS", "advantages": "ADVANTAGES"}


def write_rows(kind: str, folder: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write the one table of a shard of an artifact whose kind is in ``TABLES``.

    Raises:
        pyarrow.ArrowInvalid: a column does not fit the kind's.
    """
    from storage import schema

    schema.write_table(folder / _file(kind), columns, vars(schema)[TABLES[kind]])


def read_rows(store: ArtifactStore, ref: ArtifactRef) -> pa.Table:
    """Return all rows of an artifact whose kind is in ``TABLES``, in shard order.

    Raises:
        CorruptError: a table is damaged.
    """
    return pa.concat_tables([read_shard(store, ref, record) for record in store.shards(ref)])


def read_shard(store: ArtifactStore, ref: ArtifactRef, record: ShardRecord) -> pa.Table:
    """Return the rows of one shard of such an artifact.

    Raises:
        CorruptError: the table is damaged.
    """
    from storage import schema

    return schema.read_table(store.files(ref, record), _file(ref.kind), vars(schema)[TABLES[ref.kind]])


def _file(kind: str) -> str:
    return f"{kind}.parquet"
