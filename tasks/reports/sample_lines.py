"""The first samples of an evaluation as lines of text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Iterator

from flowmill.configs.escaping import quoted, visible
from flowmill.tasks.metrics.evaluations import SPLITS, evaluation_grids
from flowmill.tasks.metrics.view import RunView
from flowmill.tasks.reports.report.headline import evaluated
from flowmill.tasks.reports.report.samples import first_of_each, shots_of

#: Characters of a prompt or text.
_MOST = 300


def sample_lines(view: RunView, epoch: int, count: int) -> Iterator[str]:
    """Yield a line for one sample of each of the first ``count`` prompts of an evaluation, held-out ones if there are
    some: scores, prompt and text; then one with the file of the images, if it has images.
    """
    scores = list(evaluated(view, epoch).values())
    split = next((name for name in SPLITS if any(row.split == name for row in scores)), None)
    rows = first_of_each([row for row in scores if row.split == split], count)
    shots = shots_of(view, epoch, rows, evaluation=True)
    if shots:
        when = f"after epoch {epoch}" if epoch else "before training"
        yield f"samples {when}, {'held-out' if split == 'heldout' else 'train'} prompts:"
    for row in rows:
        if (shot := shots.get(row.sample_id)) is not None:
            text = "" if shot.text is None else f" -> {_short(shot.text) or '(empty)'}"
            yield f"  {shot.verdict}: {_short(shot.prompt)}{text}"
    images = evaluation_grids(view.chain, epoch).get(split or "") if shots else None
    if images is not None:
        yield f"  images: {quoted(images)}"


def _short(text: str) -> str:
    line = visible(text)
    return line if len(line) <= _MOST else f"{line[:_MOST]}..."
