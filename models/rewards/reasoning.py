"""Scores answers to the tasks of reasoning-gym (arXiv 2505.24760, Apache-2.0) with its verifiers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flowmill.configs.extras import require_extra
from flowmill.configs.option_types import GroupRegex
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, text_in


@dataclass(kw_only=True)
class ReasoningGym:
    """Score of the verifier of a prompt's task, 0 to 1; 0 for a completion without an answer. Prompts have the columns
    ``dataset`` (name of the task), ``answer`` and ``entry`` (the task's own metadata as JSON)."""

    needs: ClassVar[Needs] = Needs(media="texts", columns=("dataset", "answer", "entry"))
    perfect: ClassVar[float] = 1.0
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    pattern: GroupRegex = r"<answer>(.*?)</answer>"
    """Regular expression whose first group, of its last match, is the answer."""

    def __post_init__(self) -> None:
        """Check the package; raise ConfigError if reasoning-gym is not installed."""
        require_extra("reasoning", "reasoning_gym", label="reward 'reasoning_gym'")

    def score(self, media: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return the verifiers' scores of (B,) completions."""
        answers = [self._answer(str(text)) for text in media]
        scores = [_verified(*each) for each in zip(answers, prompts, metadata, strict=True)]
        return Scores(np.array(scores, np.float32), [answer or "" for answer in answers])

    def _answer(self, text: str) -> str | None:
        matches = list(re.finditer(self.pattern, text, re.DOTALL))
        return str(matches[-1][1]).strip() if matches else None


def _verified(answer: str | None, prompt: str, fields: Mapping[str, Any]) -> float:
    from reasoning_gym import get_score_answer_fn  # type: ignore[import-not-found]

    if answer is None:
        return 0.0
    # Of some tasks many answers are right, and none is named.
    right = None if fields["answer"] is None else text_in(fields, "answer")
    entry = {"question": prompt, "answer": right, "metadata": json.loads(text_in(fields, "entry"))}
    return float(get_score_answer_fn(text_in(fields, "dataset"))(answer=answer, entry=entry))
