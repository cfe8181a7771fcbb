"""A run as a notebook shows it: its scores before and after, with samples of both."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowmill.run_reader import RunReader

#: Samples of each evaluation, the longest side of a picture in pixels, and characters of a text.
_SAMPLES, _SIDE, _TEXT = 4, 160, 300


def as_html(run: RunReader) -> str:
    """Return a run as HTML: a table of mean scores, and the first samples of the first and the last evaluation."""
    title = f"<b>{html.escape(run.name)}</b>, epochs trained: {len(run.epochs)}"
    if not run.evaluations:
        return f"<p>{title}; no evaluation yet</p>"
    epochs = list(dict.fromkeys((run.evaluations[0], run.evaluations[-1])))
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for row in run.figures().to_pylist():
        if row["figure"] == "mean":
            scores.setdefault((row["list"], row["reward"]), {})[row["epoch"]] = row["value"]
    table = [_row("scores", [f"epoch {epoch}" for epoch in epochs])]
    for (split, reward), by_epoch in scores.items():
        table.append(_row(f"{reward} ({split})", [f"{by_epoch.get(epoch, float('nan')):.3f}" for epoch in epochs]))
    evaluated = {epoch: run.evaluation(epoch).slice(0, _SAMPLES).to_pylist() for epoch in epochs}
    samples = [_row("samples", [_short(row["prompt"]) for row in evaluated[epochs[-1]]])]
    samples += [_row(f"epoch {epoch}", _shown(run, epoch, rows)) for epoch, rows in evaluated.items()]
    return f"<p>{title}</p><table>{''.join(table)}</table><table>{''.join(samples)}</table>"


def _shown(run: RunReader, epoch: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return samples of an evaluation as HTML: texts, or images and the first of several frames; a dash for samples
    without media, such as those of ``rollout.media.format: none``."""
    from flowmill.tasks.reports.report.page import data_url

    if "text" in rows[0]:
        return [_short(row["text"]) for row in rows]
    drawn = [row["sample_id"] for row in rows if row["media_format"]]
    cells, pictures = list[str](), run.images(epoch, drawn, evaluation=True) if drawn else {}
    for row in rows:
        if row["sample_id"] not in pictures:
            cells.append("-")
            continue
        images, file = pictures[row["sample_id"]], io.BytesIO()
        image = (images[0] if isinstance(images, list) else images).copy()
        image.thumbnail((_SIDE, _SIDE))
        image.save(file, "PNG")
        cells.append(f'<img src="{data_url(file.getvalue())}">')
    return cells


def _short(text: str) -> str:
    return html.escape(text if len(text) <= _TEXT else f"{text[:_TEXT]}...")


def _row(head: str, cells: Sequence[str]) -> str:
    """Return a row of a table; its cells are HTML."""
    return f"<tr><th>{html.escape(head)}</th>{''.join(f'<td>{each}</td>' for each in cells)}</tr>"
