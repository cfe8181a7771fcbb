"""The answers of a run as rows of a file, in shapes that ``data`` of runs and of fits has."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.escaping import in_cell, quoted
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.metrics.samples import rows_of
from flowmill.tasks.ratings.answers import RatingAnswer, answers_of, no_answers

Form = Literal["csv", "jsonl"]
_Content = Mapping[tuple[str, str], tuple[str, str]]


def exported_rows(
    run: RunFolder, question: str, *, folder: str = "media", keep: Callable[[str, memoryview], None] | None = None
) -> list[dict[str, Any]]:
    """Return the answers to a question: a row per comparison, or a row per sample if all answers are stars.

    Skipped pairs are left out.

    Args:
        folder: name of the folder of images and clips, in rows.
        keep: takes name and bytes of each of their files.
    """
    answers = {number: each for number, each in answers_of(run, question).items() if not each.skipped}
    if not answers:
        raise StoreError(no_answers(run, question))
    requested: dict[str, set[str]] = {}
    for artifact, sample in (each for answer in answers.values() for each in answer.key):
        requested.setdefault(artifact, set()).add(sample)
    contents: dict[tuple[str, str], tuple[str, str]] = {}
    for artifact, samples in requested.items():
        for sample, shard, row in rows_of(run.store, ArtifactRef.parse(artifact), samples):
            text, form = shard.text(row), shard.media_format(row)
            if text is not None:
                contents[artifact, sample] = "response", text
                continue
            name = f"{artifact.replace('/', '-')}-{sample}.{form}"
            contents[artifact, sample] = "video" if form == "mp4" else "image", f"{folder}/{name}"
            if keep is not None:
                keep(name, shard.media_file(row))
    if all(each.task == "stars" for each in answers.values()):
        return [row for number, each in answers.items() for row in _ratings(number, each, contents)]
    return [_comparison(number, each, contents) for number, answer in answers.items() for each in answer.comparisons()]


def written(rows: Sequence[Mapping[str, Any]], form: Form) -> bytes:
    """Return rows in the form of a file; in CSV no remark of a rater is a formula."""
    if form == "jsonl":
        return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows({**row, "note": in_cell(row["note"])} for row in rows)
    return text.getvalue().encode()


def export_answers(run: RunFolder, question: str, file: Path) -> int:
    """Write the answers to a file, their images and clips into a folder of its name; return the number of rows."""
    form: Form | None = {".csv": "csv", ".jsonl": "jsonl"}.get(file.suffix)  # type: ignore[assignment]
    if form is None:
        raise ConfigError(f"--export: {quoted(file)} is neither .csv nor .jsonl. Choose one of these names.")
    folder = file.with_suffix("")

    def keep(name: str, data: memoryview) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    try:
        rows = exported_rows(run, question, folder=folder.name, keep=keep)
        write_whole(file, written(rows, form))
    except OSError as error:
        raise ConfigError(
            f"--export: {quoted(file)} cannot be written: {error}. Choose a file in a folder that can be written to."
        ) from None
    return len(rows)


def write_whole(file: Path, data: bytes) -> None:
    """Write a file in one step, so that a kill leaves the one before or none. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".rate-") as folder:
        (Path(folder) / file.name).write_bytes(data)
        (Path(folder) / file.name).replace(file)


def _comparison(number: int, answer: RatingAnswer, contents: _Content) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": answer.prompt}
    for side, sample in enumerate(answer.samples):
        kind, content = contents[sample]
        row[f"{kind}_{side}"] = content
    values = answer.values or (None, None)
    return {
        **row,
        "label_0": answer.preferred,
        "both_bad": answer.both_bad,
        **{f"value_{side}": value for side, value in enumerate(values)},
        **_common(number, answer),
        **{f"{name}_{side}": each for side, key in enumerate(answer.samples) for name, each in _names(key)},
    }


def _ratings(number: int, answer: RatingAnswer, contents: _Content) -> list[dict[str, Any]]:
    return [
        {"prompt": answer.prompt, contents[key][0]: contents[key][1], "rating": value}
        | _common(number, answer)
        | dict(_names(key))
        for key, value in zip(answer.samples, answer.values, strict=True)
    ]


def _common(number: int, answer: RatingAnswer) -> dict[str, Any]:
    return {
        "rater": answer.rater,
        "note": answer.note,
        "seconds": answer.seconds,
        "task": answer.task,
        "number": number,
        "prompt_id": answer.prompt_id,
    }


def _names(key: tuple[str, str]) -> list[tuple[str, str]]:
    return list(zip(("artifact", "sample"), key, strict=True))
