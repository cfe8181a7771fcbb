"""Calls a reward as its needs require, and checks the result: a failed score is never replaced by a default.
Legend: B samples, F frames of a clip."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from PIL import UnidentifiedImageError

from flowmill.configs.errors import FlowmillError, RewardError, RewardServiceError, without_process
from flowmill.configs.exits import is_interruption
from flowmill.configs.rewards import RewardSection
from flowmill.models.rewards.base import Batch, Needs, Reward, Scores
from flowmill.models.rewards.errors import describe, expected, in_short, log_traceback
from flowmill.models.rewards.returned import MalformedError, read_scores

#: Errors that a sample may have caused; a lost connection or a full disk is another matter.
OF_SAMPLES = (RewardError, FileNotFoundError, UnidentifiedImageError)
#: Those among them that concern all samples.
_OF_ALL = (MalformedError, RewardServiceError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """How samples are passed to a reward."""

    frames: int | str = 1
    """Frames of a clip to score: every n-th, 'first', or 'clip' for the whole clip at once."""
    batch_size: int | None = None
    """Rows per call; the last call is padded, as kernels depend on the number of rows; None: the reward's own."""
    exclude: bool = False
    """Record which samples fail instead of raising; errors that concern all of them are still raised."""

    @classmethod
    def of(cls, section: RewardSection) -> Handling:
        """Return the handling that a config sets."""
        return cls(frames=section.frames, batch_size=section.batch_size, exclude=section.excludes)


def score(reward: Reward, name: str, batch: Batch, handling: Handling = Handling()) -> Scores:
    """Call a reward on samples and check the result. Raises RewardError if the reward failed, or returned a wrong
    number of scores, or one that is not finite; OSError if the reward raised one, which may be temporary; a note names
    the samples."""
    needs = declared_needs(reward)
    if batch.media.ndim == 5 and needs.media in ("samples", "images") and handling.frames != "clip":
        return _score_frames(reward, name, batch, handling)
    rows = list(_by_group(batch) if needs.groupwise else _by_size(len(batch), handling.batch_size or needs.batch_size))
    parts = [_score_rows(reward, name, batch, *chosen, handling.exclude) for chosen in rows]
    values, notes = np.empty(len(batch), np.float32), [""] * len(batch)
    for (indices, _), part in zip(rows, parts, strict=True):
        values[indices] = part.values
        for row, note in zip(indices, part.notes or [""] * len(indices), strict=True):
            notes[row] = note
    return Scores(values, None if all(part.notes is None for part in parts) else notes)


def declared_needs(reward: Any) -> Needs:
    """Return the needs that a reward object declares, by its options or for all of them, or the default ones."""
    return reward.needs_for(vars(reward)) if hasattr(reward, "needs_for") else getattr(reward, "needs", Needs())


def _by_group(batch: Batch) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the rows of every group, in order, and no padding; without group ids there is one group."""
    groups: dict[str, list[int]] = {}
    for row in range(len(batch)):
        groups.setdefault(batch.groups[row] if batch.groups else "", []).append(row)
    for rows in groups.values():
        yield rows, []


def _by_size(count: int, size: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Yield rows, ``size`` at a time, and copies of the last row as padding of the last call."""
    size = size or count
    for start in range(0, count, size):
        rows = list(range(start, min(start + size, count)))
        yield rows, [rows[-1]] * (size - len(rows))


def _score_rows(
    reward: Reward, name: str, batch: Batch, rows: Sequence[int], padding: Sequence[int], exclude: bool
) -> Scores:
    """Score some rows in one call; if that fails and failures are excluded, call each row alone."""
    together = declared_needs(reward).groupwise
    try:
        # Where rows are called one by one after a failure, a search for the failing one is not needed.
        scores = _called(reward, name, batch.take([*rows, *padding]), blame=together or not exclude)
    except OF_SAMPLES as error:
        if not exclude or isinstance(error, _OF_ALL):
            raise
        if len(rows) == 1 or together:
            return Scores(np.full(len(rows), np.nan, np.float32), [_failed(error)] * len(rows))
        alone = [_score_rows(reward, name, batch, [row], [], exclude) for row in rows]
        notes = [part.notes[0] if part.notes is not None else "" for part in alone]
        return Scores(np.concatenate([part.values for part in alone]), notes)
    return Scores(scores.values[: len(rows)], None if scores.notes is None else scores.notes[: len(rows)])


def _failed(error: Exception) -> str:
    return without_process(f"failed: {in_short(error)}")


def _called(reward: Reward, name: str, batch: Batch, *, blame: bool) -> Scores:
    """Return the checked scores of one call of a reward; ``blame``: find the sample that fails."""
    try:
        result = _call_on_copy(reward, batch)
    except FlowmillError:
        raise
    except BaseException as error:
        # A reward may be custom code; its error is raised with its context.
        if is_interruption(error):
            raise
        _raise_failure(error, reward, name, batch, blame=blame)
    return read_scores(result, name, batch)


def _call_on_copy(reward: Any, batch: Batch) -> Any:
    """Return the result of a reward, called on its own copy of a batch, which it may modify; references are shared."""
    arguments = batch.media.copy(), list(batch.prompts), [copy.deepcopy(dict(row)) for row in batch.metadata]
    if not declared_needs(reward).references:
        return reward.score(*arguments)
    return reward.score(*arguments, [list(images) for images in batch.references])


def _raise_failure(error: BaseException, reward: Reward, name: str, batch: Batch, *, blame: bool) -> NoReturn:
    """Raise a reward's error with its samples; an OSError keeps its type, so that the call is retried."""
    if isinstance(error, OSError):
        where = describe(batch.origin, 0 if len(batch) == 1 else None, batch.prompts)
        error.add_note(f"Reward '{name}' raised it. Traceback: {log_traceback(error, name, where)}.")
        raise error
    where = describe(batch.origin, _culprit(reward, batch) if blame else 0, batch.prompts)
    raise RewardError(
        f"Reward '{name}' failed for {where}: {type(error).__name__}: {error}. {expected(batch.media)}. Its traceback "
        f"is in {log_traceback(error, name, where)}; FLOWMILL_TRACEBACK=1 shows it here. Mend the reward and run "
        "again; committed results stay."
    ) from error


def _culprit(reward: Reward, batch: Batch) -> int | None:
    """Return the first sample that also fails alone, if any."""
    if len(batch) == 1:
        return 0
    for row in range(len(batch)):
        alone = batch.take([row])
        try:
            _call_on_copy(reward, alone)
        except BaseException as error:
            # The error is raised already; this finds the sample.
            if is_interruption(error):
                raise
            return row
    return None


def _score_frames(reward: Reward, name: str, clips: Batch, handling: Handling) -> Scores:
    """Score all frames as images; return the mean per clip, and the note of the first frame, or of one that failed."""
    media = clips.media[:, :1] if handling.frames == "first" else clips.media[:, :: int(handling.frames)]
    count = media.shape[1]
    rows = [row for row in range(len(clips)) for _ in range(count)]
    # Groups are split by frame: a groupwise reward compares the same moments of different clips.
    groups = [f"{clips.groups[row]} {at % count}" for at, row in enumerate(rows)] if clips.groups else ()
    # Rows are repeated without the clips: a copy of each per frame would not fit into memory.
    texts = replace(clips, media=np.empty((len(clips), 0))).take(rows)
    images = replace(texts, media=media.reshape(-1, *media.shape[2:]), groups=groups)
    scores = score(reward, name, images, handling)
    by_clip = scores.values.reshape(-1, count)
    failed = np.isnan(by_clip)
    noted = failed.argmax(1)
    notes = None if scores.notes is None else [scores.notes[clip * count + at] for clip, at in enumerate(noted)]
    return Scores(by_clip.mean(1, dtype=np.float64).astype(np.float32), notes)
