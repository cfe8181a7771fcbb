"""What a reward must provide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from configs.errors import RewardError


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
) -> Scores:
    """Call a reward and check what it returns; a failed or missing score is never replaced by a default.

    Args:
        reward: the reward.
        name: what to call it in messages.
        media: (B, H, W, 3) uint8 images or (B, F, H, W, 3) uint8 clips.
        prompts: B prompts.
        metadata: B mappings.
        frames: of clips: every n-th frame is scored and the scores are averaged, 'first', or 'clip' as a whole.

    Raises:
        RewardError: the reward returned another number of scores, or one that is not finite.
    """
    if media.ndim == 5 and frames != "clip":
        return _score_frames(reward, name, media, prompts, metadata, frames)
    result = reward.score(media, prompts, metadata)
    scores = result if isinstance(result, Scores) else Scores(np.asarray(result, np.float32))
    values = np.asarray(scores.values, np.float32).reshape(-1)
    if len(values) != len(prompts):
        raise RewardError(
            f"Reward '{name}' returned {len(values)} scores for {len(prompts)} images. It must return one per image."
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise RewardError(
            f"Reward '{name}' returned {values[bad[0]]} for prompt {prompts[bad[0]]!r} ({len(bad)} of {len(values)} "
            "scores are not finite). A gradient cannot be made from that: mend the reward, then run again; the "
            "rollouts are kept."
        )
    return Scores(values, scores.notes)


def _score_frames(
    reward: Reward,
    name: str,
    clips: np.ndarray,
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    frames: int | str,
) -> Scores:
    """Score chosen frames as images; return their mean per clip, and the remark about the first."""
    chosen = clips[:, :1] if frames == "first" else clips[:, :: int(frames)]
    count = chosen.shape[1]
    images = chosen.reshape(-1, *chosen.shape[2:])
    repeated = [prompt for prompt in prompts for _ in range(count)]
    scores = score(reward, name, images, repeated, [row for row in metadata for _ in range(count)])
    notes = None if scores.notes is None else list(scores.notes)[::count]
    return Scores(scores.values.reshape(-1, count).mean(1, dtype=np.float64).astype(np.float32), notes)


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
