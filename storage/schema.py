"""Arrow schemas of every table in a store, and how tables are written so that equal work gives equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.errors import CorruptError

SCHEMA_VERSION = 1
_VERSION_KEY = b"flowmill.schema_version"

PROMPTS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)

#: One row per sample. ``*_offset`` and ``*_size`` are byte ranges in the file named by the shard's store.
SAMPLES = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        pa.field("replica", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("policy", pa.string(), nullable=False),
        pa.field("sigmas", pa.list_(pa.float32()), nullable=False),
        pa.field("steps", pa.list_(pa.int32()), nullable=False),
        pa.field("states", pa.list_(pa.int32()), nullable=False),
        pa.field("log_probs", pa.list_(pa.float32()), nullable=False),
        pa.field("reference_kl", pa.list_(pa.float32()), nullable=False),
        pa.field("latents_dtype", pa.string(), nullable=False),
        pa.field("latents_shape", pa.list_(pa.int32()), nullable=False),
        pa.field("latents_offset", pa.int64(), nullable=False),
        pa.field("latents_size", pa.int64(), nullable=False),
        pa.field("means_offset", pa.int64(), nullable=False),
        pa.field("means_size", pa.int64(), nullable=False),
        pa.field("media_format", pa.string(), nullable=False),
        pa.field("media_offset", pa.int64(), nullable=False),
        pa.field("media_size", pa.int64(), nullable=False),
    ]
)

REWARDS = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("note", pa.string(), nullable=False),
    ]
)

ADVANTAGES = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("advantage", pa.float32(), nullable=False),
    ]
)

#: One row per (image, reward) of an evaluation.
EVALUATIONS = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("replica", pa.int32(), nullable=False),
        pa.field("reward", pa.string(), nullable=False),
        pa.field("score", pa.float32(), nullable=False),
        pa.field("note", pa.string(), nullable=False),
    ]
)


def write_table(path: Path, rows: Mapping[str, Sequence[Any]], schema: pa.Schema) -> None:
    """Write columns as one Parquet file with the schema's version in its metadata.

    Raises:
        pyarrow.ArrowInvalid: a column does not fit the schema.
    """
    versioned = schema.with_metadata({_VERSION_KEY: str(SCHEMA_VERSION).encode()})
    table = pa.table({name: rows[name] for name in schema.names}, schema=versioned)
    pq.write_table(table, path, version="2.6", compression="zstd", store_schema=False)


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a table and check that it is what the schema says.

    Raises:
        CorruptError: a column is missing or of another type, or the file is newer than this reader.
    """
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowInvalid) as error:
        raise CorruptError(f"{path} is not a readable Parquet file: {error}") from None
    version = int((table.schema.metadata or {}).get(_VERSION_KEY, b"1"))
    if version > SCHEMA_VERSION:
        raise CorruptError(
            f"{path} has schema version {version}; this flowmill reads up to {SCHEMA_VERSION}. Upgrade flowmill."
        )
    for expected in schema:
        index = table.schema.get_field_index(expected.name)
        if index < 0:
            raise CorruptError(f"{path} has no column '{expected.name}'; it is not a table of this kind.")
        found = table.schema.field(index).type
        if not _same_type(found, expected.type):
            raise CorruptError(f"{path}: column '{expected.name}' is {found}, expected {expected.type}.")
    return table


def _same_type(found: pa.DataType, expected: pa.DataType) -> bool:
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return bool(found.value_type == expected.value_type)
    return bool(found == expected)
