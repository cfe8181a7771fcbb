"""Renders the columns of a store's tables from their Arrow schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from flowmill.storage.trajectories.base import ARRAYS
from flowmill.storage.trajectories.schema import DESCRIPTION, REFERENCES, SAMPLES
from flowmill.storage.trajectories.tables import written_schema
from flowmill.tasks.reports.dataset import exported_schema

_LABEL = "<label>"


def tables() -> Mapping[str, pa.Schema]:
    """Return every table by the file it is in."""
    return {
        "trajectories/ID/SHARD/samples.parquet, evaluations/ID/SHARD/samples.parquet": SAMPLES,
        "rewards/ID/SHARD/rewards.parquet": written_schema("rewards"),
        "values/ID/SHARD/values.parquet": written_schema("values"),
        "gradients/ID/SHARD/gradients.parquet": written_schema("gradients"),
        "advantages/ID/SHARD/advantages.parquet": written_schema("advantages"),
        "advantages/ID/SHARD/token_advantages.parquet": written_schema("token_advantages"),
        "advantages/ID/SHARD/return_turns.parquet": written_schema("return_turns"),
        "trajectories/ID/SHARD/variants.parquet": written_schema("variants"),
        "preferences/ID/SHARD/preferences.parquet": written_schema("preferences"),
        "prompts/ID/SHARD/prompts.parquet": written_schema("prompts"),
        "prompts/ID/SHARD/references.parquet": REFERENCES,
        "flowmill store export": exported_schema([f"reward_{_LABEL}", "advantage"], texts=True),
    }


def render() -> str:
    """Return a section for each table, and one for the arrays of samples."""
    lines: list[str] = []
    for title, schema in tables().items():
        lines += [f"## {title}", "", "| column | type | null | |", "|---|---|---|---|", *map(_row, schema), ""]
    return "\n".join([*lines, *_arrays()])


def _row(field: pa.Field) -> str:
    said = field.metadata[DESCRIPTION].decode()
    return f"| `{field.name}` | {_type(field.type)} | {'yes' if field.nullable else 'no'} | {said} |"


def _type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list of {_type(kind.value_type)}"
    if pa.types.is_struct(kind):
        return ", ".join(f"{field.name} {_type(field.type)}" for field in kind)
    return str(kind).replace("float", "float32")


def _arrays() -> Iterator[str]:
    yield from ["## Arrays", "", "| name | |", "|---|---|"]
    yield from (f"| `{name}` | {said} |" for name, said in ARRAYS.items())
