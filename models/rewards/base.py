"""What a reward must provide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import numpy as np

from configs.errors import FlowmillError, RewardError
from models.rewards.failures import Origin as Origin
from models.rewards.failures import describe, expected, log_traceback


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores and, optionally, what the reward saw."""

    values: np.ndarray
    """(B,) float32, higher is better."""
    notes: Sequence[str] | None = None
    """One remark per sample (the text an OCR read, say), shown under images."""


class Reward(Protocol):
    """Scores images. The class may set ``perfect``, the score that counts as an exact match."""

    def score(
        self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores | Sequence[float] | np.ndarray:
        """Return one score per sample.

        Args:
            media: (B, H, W, 3) uint8 images, or (B, F, H, W, 3) clips where the config hands over whole clips.
            prompts: B prompts.
            metadata: B mappings with the other columns of the prompt source.
        """
        ...


def score(
    reward: Reward,
    name: str,
    media: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    frames: int | str = 1,
    over_frames: str = "mean",
    origin: Origin | None = None,
) -> Scores:
    """Call a reward and check what it returns; a failed or missing score is never replaced by a default.

    Args:
        reward: the reward.
        name: what to call it in messages.
        media: (B, H, W, 3) uint8 images or (B, F, H, W, 3) uint8 clips.
        prompts: B prompts.
        metadata: B mappings.
        frames: of clips: every n-th frame is scored, 'first', or 'clip' as a whole.
        over_frames: 'mean' or 'min' of the scores of a clip's frames.
        origin: where the media come from, for messages.

    Raises:
        RewardError: the reward failed, or returned another number of scores, or one that is not finite.
        OSError: the reward failed with one, which may pass; a note says where.
    """
    if media.ndim == 5 and frames != "clip":
        chosen = media[:, :1] if frames == "first" else media[:, :: int(frames)]
        return _score_frames(reward, name, chosen, prompts, metadata, over_frames, origin)
    try:
        result = reward.score(media, prompts, metadata)
        scores = result if isinstance(result, Scores) else Scores(np.asarray(result, np.float32))
        values = np.asarray(scores.values, np.float32)
    except FlowmillError:
        raise
    except Exception as error:  # noqa: BLE001 - a reward may be anybody's code; its error is raised, with its place
        _blame(error, reward, name, media, prompts, metadata, origin)
    _check_shape(values, name, media, prompts, origin)
    values = values.reshape(-1)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise RewardError(
            f"Reward '{name}' returned {values[bad[0]]} for {describe(origin, int(bad[0]), prompts)} ({len(bad)} of "
            f"{len(values)} scores are not finite). A gradient cannot be made from that: mend the reward, then run "
            "again; the rollouts are kept."
        )
    return Scores(values, scores.notes)


def _check_shape(
    values: np.ndarray, name: str, media: np.ndarray, prompts: Sequence[str], origin: Origin | None
) -> None:
    """Refuse anything but one score per sample, in a column or not.

    Raises:
        RewardError: there are more, fewer, or several per sample.
    """
    count = len(prompts)
    if values.shape not in ((count,), (count, 1)):
        found = len(values) if values.ndim == 1 else values.size
        where = describe(origin, 0, prompts) + (" and others" if count > 1 else "")
        raise RewardError(
            f"Reward '{name}' returned {found} scores for {count} images: shape {values.shape}, expected ({count},), "
            f"for {where}. {expected(media)}, one per sample."
        )


def _blame(
    error: Exception,
    reward: Reward,
    name: str,
    media: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    origin: Origin | None,
) -> NoReturn:
    """Raise a reward's error with what it failed on. A lost connection stays what it is, so that it is tried again."""
    if isinstance(error, OSError):
        where = describe(origin, 0 if len(prompts) == 1 else None, prompts)
        error.add_note(f"Reward '{name}' raised it. Traceback: {log_traceback(error, name, where)}.")
        raise error
    where = describe(origin, _culprit(reward, media, prompts, metadata), prompts)
    raise RewardError(
        f"Reward '{name}' failed for {where}: {type(error).__name__}: {error}. {expected(media)}. Its traceback is in "
        f"{log_traceback(error, name, where)}; FLOWMILL_TRACEBACK=1 shows it here. Mend the reward and run again; what "
        "is committed stays."
    ) from error


def _culprit(
    reward: Reward, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> int | None:
    """Return the first sample that fails alone too; None if none does."""
    if len(prompts) == 1:
        return 0
    for row in range(len(prompts)):
        try:
            reward.score(media[row : row + 1], prompts[row : row + 1], metadata[row : row + 1])
        except Exception:  # noqa: BLE001 - which error it is was said already; this finds the sample
            return row
    return None


def _score_frames(
    reward: Reward,
    name: str,
    clips: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    over_frames: str,
    origin: Origin | None,
) -> Scores:
    """Score all frames as images; return mean or minimum per clip, and the remark about the first or the worst."""
    count = clips.shape[1]
    images = clips.reshape(-1, *clips.shape[2:])
    repeated = [prompt for prompt in prompts for _ in range(count)]
    each = None if origin is None else replace(origin, samples=[s for s in origin.samples for _ in range(count)])
    scores = score(reward, name, images, repeated, [row for row in metadata for _ in range(count)], origin=each)
    by_clip = scores.values.reshape(-1, count)
    told = np.zeros(len(by_clip), np.int64) if over_frames == "mean" else by_clip.argmin(1)
    notes = None if scores.notes is None else [scores.notes[clip * count + at] for clip, at in enumerate(told)]
    values = by_clip.mean(1, dtype=np.float64).astype(np.float32) if over_frames == "mean" else by_clip.min(1)
    return Scores(values, notes)


def perfect_score(reward: Reward) -> float | None:
    """Return the score that counts as an exact match, None where the reward knows of none."""
    defined = (vars(cls)["perfect"] for cls in type(reward).__mro__ if "perfect" in vars(cls))
    perfect = next(defined, None)
    return None if perfect is None else float(perfect)


def quoted_text(prompt: str) -> str:
    """Return the text between the first pair of double quotes, or the whole prompt without quotes.

    Flow-GRPO's ``ocr.py`` takes the quoted text and fails without quotes; Flow-Factory takes the whole prompt.
    """
    parts = prompt.split('"')
    return parts[1] if len(parts) >= 3 else prompt
