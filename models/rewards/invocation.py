"""Calls a reward as it wants to be called, and checks what it returns: a failed score is never replaced by a default.

Legend: B samples, F frames of a clip.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from PIL import UnidentifiedImageError

from configs.errors import FlowmillError, RewardError
from configs.rewards import RewardSection
from models.rewards.base import Batch, Needs, Reward, Scores
from models.rewards.errors import describe, expected, log_traceback
from models.rewards.returned import MalformedError, read_scores

#: What may be the fault of a sample; a lost connection or a full disk is not.
_OF_SAMPLES = (RewardError, FileNotFoundError, UnidentifiedImageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """How samples are handed to a reward."""

    frames: int | str = 1
    """Of clips: every n-th frame is scored, 'first', or 'clip' as a whole."""
    over_frames: str = "mean"
    """'mean' or 'min' of the scores of a clip's frames."""
    batch_size: int | None = None
    """Rows per call, the last ones padded, as kernels differ with their number; None: what the reward says."""
    exclude: bool = False
    """Record which samples fail instead of raising; what concerns them all is raised nevertheless."""

    @classmethod
    def of(cls, section: RewardSection) -> Handling:
        """Return how a config wants it."""
        return cls(
            frames=section.frames,
            over_frames=section.over_frames,
            batch_size=section.batch_size,
            exclude=section.excludes,
        )


def score(reward: Reward, name: str, batch: Batch, handling: Handling = Handling()) -> Scores:
    """Call a reward on samples and check what it returns.

    Args:
        reward: the reward.
        name: what to call it in messages.
        batch: the samples.
        handling: how they are handed over.

    Raises:
        RewardError: the reward failed, or returned another number of scores, or one that is not finite.
        OSError: the reward failed with one, which may pass; a note says where.
    """
    needs = needs_of_made(reward)
    if batch.media.ndim == 5 and needs.media in ("samples", "images") and handling.frames != "clip":
        return _score_frames(reward, name, batch, handling)
    rows = list(_by_group(batch) if needs.groupwise else _by_size(len(batch), handling.batch_size or needs.batch_size))
    parts = [_score_rows(reward, name, batch, *chosen, handling.exclude) for chosen in rows]
    values, notes = np.empty(len(batch), np.float32), [""] * len(batch)
    for (kept, _), part in zip(rows, parts, strict=True):
        values[kept] = part.values
        for row, note in zip(kept, part.notes or [""] * len(kept), strict=True):
            notes[row] = note
    return Scores(values, None if all(part.notes is None for part in parts) else notes)


def needs_of_made(reward: Any) -> Needs:
    """Return what a reward that is made declares; nothing special where it says nothing."""
    found: Needs = getattr(reward, "needs", Needs())
    return found


def _by_group(batch: Batch) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the rows of every group, in order, and no padding; without groups all are one."""
    groups: dict[str, list[int]] = {}
    for row in range(len(batch)):
        groups.setdefault(batch.groups[row] if batch.groups else "", []).append(row)
    for rows in groups.values():
        yield rows, []


def _by_size(count: int, size: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Yield rows, ``size`` at a time, and as many times the last row as it takes to fill the last call."""
    size = size or count
    for start in range(0, count, size):
        rows = list(range(start, min(start + size, count)))
        yield rows, [rows[-1]] * (size - len(rows))


def _score_rows(
    reward: Reward, name: str, batch: Batch, rows: Sequence[int], padding: Sequence[int], exclude: bool
) -> Scores:
    """Score some rows in one call; where that fails and failures are excluded, find the rows that fail alone."""
    together = needs_of_made(reward).groupwise
    try:
        # Where rows that fail are called one by one anyway, nobody need look for the first of them.
        scores = _called(reward, name, batch.take([*rows, *padding]), blame=together or not exclude)
    except _OF_SAMPLES as error:
        if not exclude or isinstance(error, MalformedError):
            raise
        if len(rows) == 1 or together:
            return Scores(np.full(len(rows), np.nan, np.float32), [_failed(error)] * len(rows))
        alone = [_score_rows(reward, name, batch, [row], [], exclude) for row in rows]
        notes = [part.notes[0] if part.notes is not None else "" for part in alone]
        return Scores(np.concatenate([part.values for part in alone]), notes)
    return Scores(scores.values[: len(rows)], None if scores.notes is None else scores.notes[: len(rows)])


def _failed(error: Exception) -> str:
    cause = error if error.__cause__ is None else error.__cause__
    return f"failed: {type(cause).__name__}: {cause}"


def _called(reward: Reward, name: str, batch: Batch, *, blame: bool) -> Scores:
    """Return what one call of a reward gives, of the right shape and finite; ``blame``: tell which sample fails."""
    try:
        result = _asked(reward, batch)
    except FlowmillError:
        raise
    except Exception as error:  # noqa: BLE001 - a reward may be anybody's code; its error is raised, with its place
        _tell(error, reward, name, batch, blame=blame)
    return read_scores(result, name, batch)


def _asked(reward: Any, batch: Batch) -> Any:
    """Return what a reward says of its own copy of a batch: what it writes there nobody else gets, and is not stored.

    The images that prompts start from are shared, and cannot be written to.
    """
    given = batch.media.copy(), list(batch.prompts), [copy.deepcopy(dict(row)) for row in batch.metadata]
    if not needs_of_made(reward).references:
        return reward.score(*given)
    return reward.score(*given, [list(images) for images in batch.references])


def _tell(error: Exception, reward: Reward, name: str, batch: Batch, *, blame: bool) -> NoReturn:
    """Raise a reward's error with what it failed on. A lost connection stays what it is, so that it is tried again."""
    if isinstance(error, OSError):
        where = describe(batch.origin, 0 if len(batch) == 1 else None, batch.prompts)
        error.add_note(f"Reward '{name}' raised it. Traceback: {log_traceback(error, name, where)}.")
        raise error
    where = describe(batch.origin, _culprit(reward, batch) if blame else 0, batch.prompts)
    raise RewardError(
        f"Reward '{name}' failed for {where}: {type(error).__name__}: {error}. {expected(batch.media)}. Its traceback "
        f"is in {log_traceback(error, name, where)}; FLOWMILL_TRACEBACK=1 shows it here. Mend the reward and run "
        "again; what is committed stays."
    ) from error


def _culprit(reward: Reward, batch: Batch) -> int | None:
    """Return the first sample that fails alone too; None if none does."""
    if len(batch) == 1:
        return 0
    if not getattr(reward, "alone", True):
        return None
    for row in range(len(batch)):
        alone = batch.take([row])
        try:
            _asked(reward, alone)
        except Exception:  # noqa: BLE001 - which error it is was said already; this finds the sample
            return row
    return None


def _score_frames(reward: Reward, name: str, clips: Batch, handling: Handling) -> Scores:
    """Score all frames as images; return mean or minimum per clip, and the remark about the first or the worst."""
    media = clips.media[:, :1] if handling.frames == "first" else clips.media[:, :: int(handling.frames)]
    count = media.shape[1]
    rows = [row for row in range(len(clips)) for _ in range(count)]
    # Groups stay apart by frame: what is compared are the same moments of different clips.
    groups = [f"{clips.groups[row]} {at % count}" for at, row in enumerate(rows)] if clips.groups else ()
    images = replace(clips.take(rows), media=media.reshape(-1, *media.shape[2:]), groups=groups)
    scores = score(reward, name, images, handling)
    by_clip = scores.values.reshape(-1, count)
    failed = np.isnan(by_clip)
    told = np.where(failed.any(1), failed.argmax(1), 0 if handling.over_frames == "mean" else by_clip.argmin(1))
    notes = None if scores.notes is None else [scores.notes[clip * count + at] for clip, at in enumerate(told)]
    mean = handling.over_frames == "mean"
    values = by_clip.mean(1, dtype=np.float64).astype(np.float32) if mean else by_clip.min(1)
    return Scores(values, notes)
