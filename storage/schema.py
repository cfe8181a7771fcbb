"""Arrow schemas of every table in a store, and how tables are written so that equal work gives equal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.errors import CorruptError
from storage.files import Files, arrow_file

#: 2 made latents and means two of any number of ``arrays`` of a sample.
SCHEMA_VERSION = 2
_VERSION_KEY = b"flowmill.schema_version"
_ARRAY = [
    pa.field("name", pa.string()),
    pa.field("dtype", pa.string()),
    pa.field("shape", pa.list_(pa.int32())),
    pa.field("offset", pa.int64()),
    pa.field("size", pa.int64()),
]

PROMPTS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
    ]
)

#: One row per sample. Offsets are those of raw bytes in the file the shard's store names.
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
        pa.field("arrays", pa.list_(pa.struct(_ARRAY)), nullable=False),
        pa.field("media_format", pa.string(), nullable=False),
        pa.field("media_offset", pa.int64(), nullable=False),
        pa.field("media_size", pa.int64(), nullable=False),
    ]
)

#: A reward that is null was not asked for; with a note it was, and failed as the note says.
REWARDS = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("note", pa.string(), nullable=False),
    ]
)

#: Where reward and advantage are null the sample is left out of training.
ADVANTAGES = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("advantage", pa.float32()),
    ]
)


#: Of every token the policy chose, in order: what a critic expected, and what the base model would have given it.
#: Null where a run needs none.
VALUES = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("reference_log_probs", pa.list_(pa.float32())),
    ]
)

#: Beside the advantages of samples, row by row, where every token has its own; null where the sample is left out.
TOKEN_ADVANTAGES = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("returns", pa.list_(pa.float32())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("reference_log_probs", pa.list_(pa.float32())),
    ]
)


def write_table(path: Path, rows: Mapping[str, Sequence[Any]], schema: pa.Schema) -> None:
    """Write columns as one Parquet file with the schema's version in its metadata.

    Raises:
        pyarrow.ArrowInvalid: a column does not fit the schema.
    """
    table = pa.table({name: rows[name] for name in schema.names}, schema=versioned(schema))
    # Shards are many and their tables small: zstd, and dictionaries of numbers, would double the time to open one.
    repeated = [field.name for field in schema if pa.types.is_string(field.type) and field.name != "sample_id"]
    pq.write_table(table, path, version="2.6", compression="snappy", use_dictionary=repeated)


def versioned(schema: pa.Schema) -> pa.Schema:
    """Return a schema with its version in the metadata."""
    return schema.with_metadata({_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def read_table(files: Files, name: str, schema: pa.Schema) -> pa.Table:
    """Read a table and check that it is what the schema says; columns beyond the schema's are not read.

    Raises:
        CorruptError: a column is missing or of another type, or the file is newer than this reader.
    """
    where, blob = f"{files.where}/{name}", files.blob(name)
    try:
        file = pq.ParquetFile(arrow_file(blob))
        version = int((file.metadata.metadata or {}).get(_VERSION_KEY, b"1"))
        if version > SCHEMA_VERSION:
            raise CorruptError(
                f"{where} has schema version {version}; this flowmill reads up to {SCHEMA_VERSION}. Upgrade flowmill."
            )
        older = version == 1 and schema.equals(SAMPLES)
        wanted = _SAMPLES_1 if older else schema
        present = set(file.schema_arrow.names)
        # One thread: shards are small and many, and starting threads would cost more than reading.
        table = file.read(columns=[column for column in wanted.names if column in present], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise CorruptError(f"{where} is not a readable Parquet file: {error}") from None
    _check_columns(table, wanted, where)
    return _from_version_1(table) if older else table


def _check_columns(table: pa.Table, schema: pa.Schema, where: str) -> None:
    if table.schema.equals(schema):
        return
    for expected in schema:
        index = table.schema.get_field_index(expected.name)
        if index < 0:
            raise CorruptError(f"{where} has no column '{expected.name}'; it is not a table of this kind.")
        found = table.schema.field(index).type
        if not _same_type(found, expected.type):
            raise CorruptError(f"{where}: column '{expected.name}' is {found}, expected {expected.type}.")


def _same_type(found: pa.DataType, expected: pa.DataType) -> bool:
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return _same_type(found.value_type, expected.value_type)
    if pa.types.is_struct(found) and pa.types.is_struct(expected):
        names = [field.name for field in expected]
        return [field.name for field in found] == names and all(
            _same_type(found.field(name).type, expected.field(name).type) for name in names
        )
    return bool(found == expected)


_LATENTS_1 = ("latents_dtype", "latents_shape", "latents_offset", "latents_size", "means_offset", "means_size")
_SAMPLES_1 = pa.schema(
    [field for field in SAMPLES if field.name != "arrays"]
    + [
        pa.field(
            name, pa.string() if name.endswith("dtype") else pa.list_(pa.int32()) if "shape" in name else pa.int64()
        )
        for name in _LATENTS_1
    ]
)


def _from_version_1(table: pa.Table) -> pa.Table:
    """Return a samples table of version 1, which had columns for latents and means, as one of this version."""
    arrays = []
    for row in table.select([*_LATENTS_1, "steps"]).to_pylist():
        dtype, shape = row["latents_dtype"], row["latents_shape"]
        stored = [("latents", dtype, shape), ("means", "float32", [len(row["steps"]), *shape[1:]])]
        arrays.append(
            [
                {"name": n, "dtype": d, "shape": s, "offset": row[f"{n}_offset"], "size": row[f"{n}_size"]}
                for n, d, s in stored
                if row[f"{n}_offset"] >= 0
            ]
        )
    columns = {name: table.column(name) for name in SAMPLES.names if name != "arrays"}
    columns["arrays"] = pa.array(arrays, SAMPLES.field("arrays").type)
    return pa.table({name: columns[name] for name in SAMPLES.names})
