"""Samples and judgments of a run as files of a dataset repository: Parquet files or tars of WebDataset, and a card.

Equal content gives equal bytes. Paths of this machine and names of raters do not leave it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from configs.errors import StoreError
from configs.fingerprint import canonical_json
from configs.paths import portable
from storage.backends.disk_errors import named_disk
from storage.layout import ArtifactRef
from tasks.export.request import Part
from tasks.metrics.evaluations import split_of
from tasks.metrics.samples import rows_of
from tasks.metrics.view import RunView
from tasks.ratings.answers import answers_of
from tasks.reports.streams import SampleRows, content_of, features_of
from tasks.runs.context import RunContext

#: Columns with the content of a sample.
CONTENT = ("image", "video", "text")
#: Extension of the files of each format.
FORMS = {"parquet": "parquet", "webdataset": "tar"}
#: Judgments of one file.
_PER_FILE = 256
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a published dataset."""

    part: Part
    """Its part."""
    split: str
    """Its split: train, or the prompt list of an evaluation."""
    name: str
    """Its path in the repository."""
    path: Path
    """Its path here."""
    rows: int
    """Number of its rows."""
    licenses: Mapping[str, int]
    """Number of rows by the license that their metadata state; empty text: none."""
    content: str
    """Name of the column with samples, or of the better sample of a pair."""


def is_published(name: str) -> bool:
    """Return whether a file of a repository has a name of these."""
    folder, _, rest = name.partition("/")
    return folder in get_args(Part) and rest.endswith((".parquet", ".tar"))


def parts_of(context: RunContext, epochs: Collection[int], parts: Collection[Part]) -> dict[Part, list[int]]:
    """Return the epochs of each part that a run has; those of parts without epochs are [0].

    Args:
        context: the run.
        epochs: epochs to publish; all when empty.
        parts: parts to publish; all when empty.

    Raises:
        StoreError: the run has nothing of a part, or of an epoch.
    """
    view, given = RunView(context), context.plan.given
    found: dict[Part, list[int]] = {
        "rollouts": [] if given else view.rolled_out,
        "given": [0] if given and context.chain.find(0, "ingest") is not None else [],
        "evaluations": list(view.evaluations),
        "preferences": [0] if any(each.preferred is not None for each in answers_of(context.run).values()) else [],
    }
    for part in ("rollouts", "evaluations") if epochs else ():
        found[part] = [epoch for epoch in found[part] if epoch in epochs]
    wanted = {part: each for part, each in found.items() if each and part in (parts or found)}
    epochs_made = {*found["rollouts"], *found["evaluations"]}
    missing = [*sorted(set(parts) - set(wanted)), *(f"epoch {each}" for each in sorted({*epochs} - epochs_made))]
    if missing or not wanted:
        has = f"it has rollouts of epochs {view.rolled_out} and evaluations of epochs {list(view.evaluations)}"
        raise StoreError(f"Run '{context.run.name}' has no {', '.join(missing) or 'samples'}; {has}.")
    return wanted


def write_files(context: RunContext, folder: Path, parts: Mapping[Part, Sequence[int]], form: str) -> list[DataFile]:
    """Write the files of all parts into a folder, one per committed shard of samples.

    Raises:
        StoreError: a part has no rows, or neither images nor texts; or the folder cannot be written.
        CorruptError: a committed file is damaged.
    """
    made = []
    for part, epochs in parts.items():
        for epoch in epochs:
            for split, stem, rows in tables_of(context, part, epoch):
                name = f"{part}/{stem}.{FORMS[form]}"
                content = next((each for each in (*CONTENT, "chosen") if rows and rows[0].get(each) is not None), None)
                if content is None:
                    raise StoreError(f"The {part} of run '{context.run.name}' hold neither images nor texts.")
                with named_disk(str(folder)):
                    (folder / part).mkdir(exist_ok=True)
                    (_write_tar if form == "webdataset" else _write_table)(folder / name, rows)
                made.append(
                    DataFile(
                        part=part,
                        split=split,
                        name=name,
                        path=folder / name,
                        rows=len(rows),
                        licenses=Counter(_license(row) for row in rows),
                        content=content,
                    )
                )
    return made


def _license(row: Row) -> str:
    about = json.loads(row.get("metadata", "{}"))
    return str(about.get("license", about.get("licence", "")))


def tables_of(context: RunContext, part: Part, epoch: int) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield split, name and rows of each file of a part, without places of this machine."""
    if part == "preferences":
        rows = list(_preferences(context))
        for start in range(0, len(rows), _PER_FILE):
            yield "train", f"train-{start // _PER_FILE:05d}", rows[start : start + _PER_FILE]
        return
    samples = SampleRows(context, epoch, evaluation=part == "evaluations")
    data = context.config.data
    for number, record in enumerate(samples.records):
        found = list(samples.of_shard(record))
        for row in found:
            row["metadata"] = canonical_json(portable(json.loads(row["metadata"])))
        split = split_of(record.shard) if part == "evaluations" else "train"
        name = f"{split}-{epoch:05d}-{number:05d}"
        rows = _pairs(found) if part == "given" and data is not None and data.paired else found
        if rows:
            yield split, name, rows


def _content(row: Mapping[str, Any]) -> Any:
    return next((row[name] for name in CONTENT if row.get(name) is not None), None)


def _pairs(rows: Sequence[Row]) -> list[Row]:
    """Return the chosen and the rejected sample of each pair as one row, as the section 'data' reads it."""
    pairs: dict[str, list[Row]] = {}
    for row in rows:
        pairs.setdefault(row["group_id"], []).append(row)
    return [
        {
            **{name: both[0][name] for name in ("group_id", "prompt", "metadata")},
            "chosen": _content(both[0]),
            "rejected": _content(both[1]),
        }
        for both in pairs.values()
    ]


def _preferences(context: RunContext) -> Iterator[Row]:
    """Yield the answers of raters as pairs of samples; of a tie the first is 'chosen'. Raters are numbered."""
    answers = [each for each in answers_of(context.run).values() if each.preferred is not None]
    raters = rater_names({each.rater for each in answers})
    wanted: dict[str, set[str]] = {}
    for answer in answers:
        for artifact, sample in answer.key:
            wanted.setdefault(artifact, set()).add(sample)
    media = {
        (artifact, sample): _content(content_of(shard, number))
        for artifact, samples in wanted.items()
        for sample, shard, number in rows_of(context.store, ArtifactRef.parse(artifact), samples)
    }
    for number, answer in enumerate(answers):
        sides = [(answer.first_artifact, answer.first_sample), (answer.second_artifact, answer.second_sample)]
        chosen, rejected = sides if answer.preferred else sides[::-1]
        yield {
            "group_id": f"p{number:08d}",
            "prompt": answer.prompt,
            "chosen": media[chosen],
            "rejected": media[rejected],
            "tie": answer.preferred not in (0, 1),
            "rater": raters[answer.rater],
            "chosen_sample": "/".join(chosen),
            "rejected_sample": "/".join(rejected),
            "chosen_left": chosen == sides[0],
        }


def rater_names(raters: Collection[str]) -> dict[str, str]:
    """Return the published name of each rater: a number."""
    return {rater: f"rater {number}" for number, rater in enumerate(sorted(raters), 1)}


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    schema = features_of(rows[0]).arrow_schema
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, compression="zstd")


def _write_tar(path: Path, rows: Sequence[Row]) -> None:
    """Write a tar with the members ``<key>.<extension>`` of each row: its files, its text, and ``json`` with the rest.

    The files of a pair are ``chosen.<extension>`` and ``rejected.<extension>``.
    """
    import webdataset as wds

    with wds.TarWriter(str(path), mtime=0, user="", group="") as archive:
        for row in rows:
            files: dict[str, Any] = {}
            for name, value in row.items():
                if isinstance(value, Mapping):
                    form = value["path"].rpartition(".")[2]
                    files[f"{name}.{form}" if "chosen" in row else form] = value["bytes"]
            rest = {name: value for name, value in row.items() if not isinstance(value, Mapping)}
            archive.write({"__key__": row.get("sample_id", row["group_id"]), **files, "json": rest})
