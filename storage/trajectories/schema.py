"""Arrow schemas of all tables in a store, and deterministic reading and writing of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flowmill.configs.errors import CorruptError
from flowmill.storage.artifacts.shard_files import Files
from flowmill.storage.trajectories.arrow_files import arrow_file

#: 2 moved latents and means into ``arrays``, which holds any number of arrays of a sample.
SCHEMA_VERSION = 2
_VERSION_KEY = b"flowmill.schema_version"
#: Key of a column's description in its metadata.
DESCRIPTION = b"description"


def column(name: str, kind: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    """Return a column with a description."""
    return pa.field(name, kind, nullable=nullable, metadata={DESCRIPTION: description.encode()})


_ARRAY = [
    pa.field("name", pa.string()),
    pa.field("dtype", pa.string()),
    pa.field("shape", pa.list_(pa.int32())),
    pa.field("offset", pa.int64()),
    pa.field("size", pa.int64()),
]
_SAMPLE = column("sample_id", pa.string(), "Identity of the sample within its artifact; other artifacts have it too.")
_PROMPT = column("prompt_id", pa.string(), "Identity of the prompt: of its text, metadata and image.")
_GROUP = column("group_id", pa.string(), "Samples that are compared with each other: of one prompt, or of one branch.")
_METADATA = column("metadata", pa.string(), "Further columns of the prompt's source, as JSON.")

PROMPTS = pa.schema(
    [
        _PROMPT,
        column("split", pa.string(), "train, heldout or negative."),
        column("prompt", pa.string(), "Text of the prompt."),
        _METADATA,
    ]
)

#: The prompts of an epoch, in the order of its groups.
CHOICES = pa.schema([_PROMPT, column("reason", pa.string(), "Why the sampler of prompts chose it.")])

#: What a sampler of prompts has recorded of each prompt that was drawn.
PROMPT_STATES = pa.schema(
    [
        _PROMPT,
        column("drawn", pa.int32(), "Last epoch that drew it."),
        column("scored", pa.int32(), "Last epoch whose rewards of it are known; 0 for none."),
        column("mean", pa.float64(), "Mean weighted reward of its group in that epoch.", nullable=True),
        column("spread", pa.float64(), "Standard deviation of these rewards.", nullable=True),
        column("streak", pa.int32(), "Last groups in a row with that mean and a spread of 0."),
    ]
)

#: Table of the start images of prompts.
REFERENCES = pa.schema(
    [
        column(
            "image", pa.string(), "What identifies an image: a hash of its file, marked where it is seen otherwise."
        ),
        column("file", pa.binary(), "Its file, as it was."),
    ]
)

#: One row per sample. Offsets refer to raw bytes in the payload file of the trajectory store.
SAMPLES = pa.schema(
    [
        _SAMPLE,
        _PROMPT,
        _GROUP,
        column("prompt", pa.string(), "Text of the prompt."),
        _METADATA,
        column("epoch", pa.int32(), "Epoch of the rollout."),
        column("replica", pa.int32(), "Position within the group, from 0."),
        column("seed", pa.int64(), "Seed of the initial noise."),
        column("policy", pa.string(), "Artifact of the policy that made it."),
        column("sigmas", pa.list_(pa.float32()), "Noise levels of the whole schedule, from 1 to 0."),
        column("steps", pa.list_(pa.int32()), "Trained steps; step i leads from state i to state i + 1."),
        column("states", pa.list_(pa.int32()), "Steps whose latents are stored."),
        column("log_probs", pa.list_(pa.float32()), "Log-prob of each trained step, mean over latent dimensions."),
        column("reference_kl", pa.list_(pa.float32()), "KL of each trained step to the base model, if asked for."),
        column("arrays", pa.list_(pa.struct(_ARRAY)), "Raw arrays: name, type, shape, and where their bytes lie."),
        column("media_format", pa.string(), "png, webp or mp4; empty where there is no image or clip."),
        column("media_offset", pa.int64(), "Where the image or clip begins in the payload file; -1 without one."),
        column("media_size", pa.int64(), "Bytes of the image or clip."),
    ]
)

#: A null reward was not requested, or failed if there is a note, which gives the reason.
REWARDS = pa.schema(
    [
        _SAMPLE,
        _PROMPT,
        _GROUP,
        column("reward", pa.float32(), "The score; null where none was asked for, or it failed.", nullable=True),
        column("note", pa.string(), "What the reward read or remarked, or why it failed."),
    ]
)

#: Samples with null reward and advantage are excluded from training.
ADVANTAGES = pa.schema(
    [
        _SAMPLE,
        _PROMPT,
        _GROUP,
        column("reward", pa.float32(), "Weighted sum of the rewards less the KL penalty.", nullable=True),
        column("advantage", pa.float32(), "What training weighs it by; null where it is left out.", nullable=True),
    ]
)

#: How a row of data was encoded, and may be used, in the rows of its samples.
VARIANTS = pa.schema(
    [
        _SAMPLE,
        column("row", pa.int64(), "Number of the row, from 0."),
        column("view", pa.int32(), "Which of the row's crops and mirrored images it is, from 0."),
        column("captions", pa.list_(pa.string()), "Prompt with each of its captions, by id."),
        column("empty", pa.string(), "Prompt without a caption, by id."),
        column("prior", pa.bool_(), "Whether the row is one of `data.prior`."),
    ]
)

#: Columns for tools that read many artifacts at once; redundant within one artifact. Tables before 0.3.0 lack them.
OF_ARTIFACT = pa.schema([column("artifact", pa.string(), "Artifact of the samples, kind/id: the other half of a key.")])
OF_REWARD = pa.schema(
    [
        column("reward_name", pa.string(), "Name of the reward in configs, whatever label a run gives it."),
        column("reward_options", pa.string(), "What else says which reward it is, as JSON."),
        *OF_ARTIFACT,
    ]
)


#: One value per token that the policy chose, in order; null if a run needs none.
_VALUES = column(
    "values", pa.list_(pa.float32()), "What the critic expected at each token the policy chose.", nullable=True
)
_REFERENCE = column(
    "reference_log_probs", pa.list_(pa.float32()), "Log-prob of each such token under the base model.", nullable=True
)
VALUES = pa.schema([_SAMPLE, _PROMPT, _GROUP, _VALUES, _REFERENCE])

#: A gradient is its RMS times an array of RMS 1, which half precision represents at any scale.
GRADIENTS = pa.schema(
    [
        _SAMPLE,
        _PROMPT,
        _GROUP,
        column(
            "value", pa.float32(), "The score that was followed back; null where none was asked for.", nullable=True
        ),
        column("rms", pa.float32(), "Root mean square of the gradient with respect to the final latents."),
        column("dtype", pa.string(), "Type of the stored array; empty where there is no gradient."),
        column("shape", pa.list_(pa.int32()), "Its shape, that of the latents."),
        column("offset", pa.int64(), "Where its bytes begin in the file gradients.bin; -1 without one."),
    ]
)

#: Advantages of tokens, in the same rows as those of samples; null if the sample is excluded.
TOKEN_ADVANTAGES = pa.schema(
    [
        _SAMPLE,
        column("advantages", pa.list_(pa.float32()), "Advantage of each token the policy chose.", nullable=True),
        column("returns", pa.list_(pa.float32()), "What a critic learns of each such token.", nullable=True),
        _VALUES,
        _REFERENCE,
    ]
)


#: In the same rows as advantages, if the best turn of a sample counts.
RETURN_TURNS = pa.schema([_SAMPLE, column("turn", pa.int32(), "Turn that the rewards are of.")])

#: Comparisons of two samples of one prompt, by people or programs. A page shows the first one left.
PREFERENCES = pa.schema(
    [
        _PROMPT,
        column("prompt", pa.string(), "Text of the prompt."),
        column("first_artifact", pa.string(), "Artifact of the first sample, kind/id."),
        column("first_sample", pa.string(), "Its id within that artifact."),
        column("second_artifact", pa.string(), "Artifact of the second sample, kind/id."),
        column("second_sample", pa.string(), "Its id within that artifact."),
        column("preferred", pa.float32(), "1: the first is better, 0: the second, 0.5: neither."),
        column("rater", pa.string(), "Name of the one who compared them."),
        column("number", pa.int64(), "Order of the answers, from 1; withdrawn ones leave gaps."),
        column("seconds", pa.float32(), "Time that the answer took."),
    ]
)


def write_table(path: Path, rows: Mapping[str, Sequence[Any]], schema: pa.Schema) -> None:
    """Write columns as one Parquet file with the schema's version in its metadata.

    Raises:
        pyarrow.ArrowInvalid: a column does not fit the schema.
    """
    table = pa.table({name: rows[name] for name in schema.names}, schema=versioned(schema))
    # Tables are many and small: zstd and dictionaries of numbers would double the time to open one.
    repeated = [field.name for field in schema if pa.types.is_string(field.type) and field.name != "sample_id"]
    pq.write_table(table, path, version="2.6", compression="snappy", use_dictionary=repeated)


def versioned(schema: pa.Schema) -> pa.Schema:
    """Return a schema with its version in the metadata."""
    return schema.with_metadata({_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def read_table(files: Files, name: str, schema: pa.Schema) -> pa.Table:
    """Read a table and check it against the schema; additional columns are not read."""
    where, blob = f"{files.where}/{name}", files.blob(name)
    try:
        file = pq.ParquetFile(arrow_file(blob))
        version = int((file.metadata.metadata or {}).get(_VERSION_KEY, b"1"))
        if version > SCHEMA_VERSION:
            raise CorruptError(
                f"{where} has schema version {version}; this version reads up to {SCHEMA_VERSION}. Upgrade flowmill."
            )
        older = version == 1 and schema.equals(SAMPLES)
        required = _SAMPLES_1 if older else schema
        present = set(file.schema_arrow.names)
        # One thread: shards are small, and starting threads would cost more than reading.
        table = file.read(columns=[column for column in required.names if column in present], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise CorruptError(f"{where} is not a readable Parquet file: {error}") from None
    _check_columns(table, required, where)
    return _from_version_1(table) if older else table


def _check_columns(table: pa.Table, schema: pa.Schema, where: str) -> None:
    if table.schema.equals(schema):
        return
    for expected in schema:
        index = table.schema.get_field_index(expected.name)
        if index < 0:
            raise CorruptError(f"{where} has no column '{expected.name}'; it is not a table of this kind.")
        kind = table.schema.field(index).type
        if not _same_type(kind, expected.type):
            raise CorruptError(f"{where}: column '{expected.name}' is {kind}, expected {expected.type}.")


def _same_type(actual: pa.DataType, expected: pa.DataType) -> bool:
    if pa.types.is_list(actual) and pa.types.is_list(expected):
        return _same_type(actual.value_type, expected.value_type)
    if pa.types.is_struct(actual) and pa.types.is_struct(expected):
        names = [field.name for field in expected]
        return [field.name for field in actual] == names and all(
            _same_type(actual.field(name).type, expected.field(name).type) for name in names
        )
    return bool(actual == expected)


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
    """Convert a samples table of version 1, which had columns for latents and means."""
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
