"""Artifacts whose shards are tables: prompts, rewards, values, gradients, advantages, preferences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.layout import ArtifactRef

if TYPE_CHECKING:
    import pyarrow as pa

#: Name of each kind's schema in ``flowmill.storage.trajectories.schema``, which is imported lazily because it imports
#: Arrow.
TABLES: Mapping[str, str] = {
    "prompts": "PROMPTS",
    "choices": "CHOICES",
    "prompt_states": "PROMPT_STATES",
    "rewards": "REWARDS",
    "values": "VALUES",
    "gradients": "GRADIENTS",
    "advantages": "ADVANTAGES",
    "preferences": "PREFERENCES",
    "token_advantages": "TOKEN_ADVANTAGES",
    "return_turns": "RETURN_TURNS",
    "variants": "VARIANTS",
}
#: Tables of shards in memory before they become one.
_TOGETHER = 64
#: Additional columns for other tools, by kind.
LABELS: Mapping[str, str] = {"rewards": "OF_REWARD", "gradients": "OF_REWARD", "advantages": "OF_ARTIFACT"}


def write_rows(
    kind: str, folder: Path, columns: Mapping[str, Sequence[Any]], labels: Mapping[str, str] | None = None
) -> None:
    """Write one table of ``TABLES`` of a shard: that of its artifact's kind, or an additional one.

    Args:
        folder: folder of the shard.
        columns: the kind's columns.
        labels: values of the additional columns for other tools, the same in all rows.

    Raises:
        pyarrow.ArrowInvalid: a column does not fit the schema.
    """
    import pyarrow as pa

    rows = len(next(iter(columns.values())))
    repeated = {name: pa.repeat(pa.scalar(value, pa.string()), rows) for name, value in (labels or {}).items()}
    _schema().write_table(folder / _file(kind), {**columns, **repeated}, written_schema(kind))


def written_schema(kind: str) -> pa.Schema:
    """Return all columns of the table of a kind in ``TABLES``."""
    import pyarrow as pa

    defined = vars(_schema())
    return pa.schema([*defined[TABLES[kind]], *(defined[LABELS[kind]] if kind in LABELS else ())])


def read_rows(store: ArtifactStore, ref: ArtifactRef, table: str | None = None) -> pa.Table:
    """Return all rows of an artifact's table, in shard order.

    Args:
        table: a key of ``TABLES``; the artifact's kind when absent.
    """
    return in_few_chunks(read_shard(store, ref, record, table) for record in store.shards(ref))


def in_few_chunks(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of tables, of which few are in memory at a time: a small one takes far more than its rows."""
    import pyarrow as pa

    joined, small = list[pa.Table](), list[pa.Table]()
    for table in tables:
        small.append(table)
        if len(small) == _TOGETHER:
            joined.append(pa.concat_tables(small).combine_chunks())
            small.clear()
    return pa.concat_tables([*joined, *small])


def read_shard(store: ArtifactStore, ref: ArtifactRef, record: ShardRecord, table: str | None = None) -> pa.Table:
    """Return the rows of one shard; see ``read_rows``."""
    schema, kind = _schema(), table or ref.kind
    return schema.read_table(store.files(ref, record), _file(kind), vars(schema)[TABLES[kind]])


def _schema() -> Any:
    from flowmill.storage.trajectories import schema

    return schema


def _file(kind: str) -> str:
    return f"{kind}.parquet"
