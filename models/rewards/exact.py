"""Rewards of texts by rule: a completion must equal a column of the prompt's source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flowmill.configs.option_types import GroupRegex
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, text_in


@dataclass(kw_only=True)
class ExactText:
    """1 where a completion, without spaces around it, is the text of a column, else 0."""

    perfect: ClassVar[float] = 1.0
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    column: str = "answer"
    """Column of the prompts with the right answer."""
    pattern: GroupRegex | None = None
    """Regular expression whose first group, of its last match, is compared instead of the whole completion."""

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the needs under some options."""
        return Needs(media="texts", columns=(str(options.get("column", "answer")),))

    def score(self, media: Sequence[str], prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Compare completions with their answers."""
        answers = [self._answer(text) for text in media]
        right = [text == text_in(fields, self.column).strip() for text, fields in zip(answers, metadata, strict=True)]
        return Scores(np.array(right, np.float32), answers)

    def _answer(self, text: str) -> str:
        if self.pattern is None:
            return str(text).strip()
        matches = list(re.finditer(self.pattern, text))
        return str(matches[-1][1]).strip() if matches else ""
