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
    """Scores images. The class may set ``perfect``, the score that counts as an exact match (default 1.0)."""

    def score(
        self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Scores | Sequence[float] | np.ndarray:
        """Return one score per sample.

        Args:
            media: (B, H, W, 3) uint8 images.
            prompts: B prompts.
            metadata: B mappings with the other columns of the prompt source.
        """
        ...


def score(
    reward: Reward, name: str, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> Scores:
    """Call a reward and check what it returns; a failed or missing score is never replaced by a default.

    Raises:
        RewardError: the reward returned another number of scores, or one that is not finite.
    """
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


def perfect_score(reward: Reward) -> float:
    """Return the score that counts as an exact match."""
    return float(vars(type(reward)).get("perfect", 1.0))


def quoted_text(prompt: str) -> str:
    """Return the text between the first pair of double quotes, or the whole prompt without quotes.

    Flow-GRPO's ``ocr.py`` takes the quoted text and fails without quotes; Flow-Factory takes the whole prompt.
    """
    parts = prompt.split('"')
    return parts[1] if len(parts) >= 3 else prompt
