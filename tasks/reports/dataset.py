"""Export of a run as one table for other tools: samples joined with images, rewards and advantages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.extras import require_extra
from flowmill.storage.trajectories.schema import ADVANTAGES, DESCRIPTION, SAMPLES, column
from flowmill.tasks.export.copying import new_folder
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.runs.context import RunContext

FORMATS = ("parquet", "datasets", "delta")
_PLAIN = ("sample_id", "prompt_id", "group_id", "prompt", "metadata", "epoch", "replica", "seed", "policy")
_LISTS = ("steps", "log_probs", "sigmas")
#: How Hugging Face datasets stores an image inside a table.
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def export_run(
    context: RunContext, folder: Path, form: str, *, epochs: Sequence[int], progress: Callable[[int, int], None]
) -> int:
    """Write one row per sample of a run, one file per epoch; return the number of rows.

    Args:
        folder: a folder that does not exist yet, or is empty.
        form: parquet: plain Parquet files; datasets: the same with an image feature, for ``datasets.load_dataset``;
            delta: a Delta Lake table.
        epochs: the epochs to export; all when empty.
        progress: (epochs done, total).
    """
    if form not in FORMATS:
        raise ConfigError(f"--format '{form}' does not exist; there are {', '.join(FORMATS)}.")
    view = RunView(context)
    sampled = view.rolled_out
    chosen = [epoch for epoch in sampled if not epochs or epoch in epochs]
    if not chosen:
        has = f"it has {sampled[0]} to {sampled[-1]}" if sampled else "it has none"
        raise StoreError(f"Run '{context.run.name}' has no rollouts of these epochs; {has}.")
    rows = 0
    with new_folder(folder) as whole:
        write = _delta_writer(whole) if form == "delta" else _parquet_writer(whole, image=form == "datasets")
        for done, epoch in enumerate(chosen, 1):
            table = _table(view, epoch)
            write(epoch, table)
            rows += table.num_rows
            progress(done, len(chosen))
    return rows


def _table(view: RunView, epoch: int) -> pa.Table:
    """Return the samples of an epoch with their scores, and the first image of each."""
    samples = view.samples(epoch)
    media: dict[str, bytes | None] = {}
    for sample, shard, row in view.shown(epoch, samples["sample_id"].to_pylist()):
        media.setdefault(sample, bytes(shard.media_file(row)) if shard.media_format(row) else None)
    named = {name: name.replace("reward.", "reward_", 1) for name in samples.column_names}
    scores = [name for name in named.values() if name.startswith("reward_") or name == "advantage"]
    table = samples.rename_columns(list(named.values()))
    table = table.append_column("media", pa.array(map(media.__getitem__, table["sample_id"].to_pylist()), pa.binary()))
    schema = exported_schema(scores, texts="text" in table.column_names)
    return table.select(schema.names).cast(schema)


def exported_schema(scores: Sequence[str], *, texts: bool) -> pa.Schema:
    """Return the columns of an exported table.

    Args:
        scores: score columns: ``reward_<label>`` and ``advantage``.
        texts: whether samples are texts.
    """
    notes = {name: f"Reward or monitor '{name.removeprefix('reward_')}'; null where it gave none." for name in scores}
    notes["advantage"] = ADVANTAGES.field("advantage").metadata[DESCRIPTION].decode()
    return pa.schema(
        [
            *(SAMPLES.field(name) for name in (*_PLAIN, *_LISTS)),
            *(column(name, pa.float32(), notes[name], nullable=True) for name in scores),
            *([column("text", pa.string(), "Completion of a language model.", nullable=True)] if texts else []),
            SAMPLES.field("media_format"),
            column(
                "media",
                pa.binary(),
                "The image or clip as it is stored, the first of a text; null without one.",
                nullable=True,
            ),
        ]
    )


def _parquet_writer(folder: Path, *, image: bool) -> Callable[[int, pa.Table], None]:
    def write(epoch: int, table: pa.Table) -> None:
        pq.write_table(
            _with_image(table) if image else table, folder / f"train-{epoch:05d}.parquet", compression="zstd"
        )

    return write


def _with_image(table: pa.Table) -> pa.Table:
    """Return the table with its images, if any, in a column ``image`` that datasets decodes."""
    formats = set(table.column("media_format").to_pylist())
    if formats == {""}:
        return table.drop_columns(["media", "media_format"])
    if formats - {"", "png", "webp"}:
        raise ConfigError("--format datasets holds images; this run has clips. Use --format parquet.")
    values = [{"bytes": data, "path": None} for data in table.column("media").to_pylist()]
    table = table.drop_columns(["media", "media_format"]).append_column("image", pa.array(values, _IMAGE))
    features = {field.name: _feature(field.type) for field in table.schema}
    info = {"info": {"features": {**features, "image": {"_type": "Image"}}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(info)})


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    name = {"float": "float32", "double": "float64"}.get(str(kind), str(kind))
    return {"dtype": name, "_type": "Value"}


def _delta_writer(folder: Path) -> Callable[[int, pa.Table], None]:
    require_extra("delta", "deltalake", label="--format delta")
    from deltalake import write_deltalake
    from deltalake.exceptions import DeltaError

    def write(epoch: int, table: pa.Table) -> None:
        try:
            write_deltalake(str(folder), table, mode="append", partition_by=["epoch"])
        except DeltaError as error:
            raise OSError(str(error)) from error

    return write
