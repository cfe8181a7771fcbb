"""Rewards of texts by rule: a completion must equal a column of the prompt's source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from models.rewards.base import Bounds, Needs, Scores


@dataclass(kw_only=True)
class ExactText:
    """1 where a completion, without spaces around it, is the text of a column, else 0."""

    perfect: ClassVar[float] = 1.0
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    column: str = "answer"
    """Column of the prompts with the right answer."""
    pattern: str | None = None
    """Regular expression whose first group, of its last match, is compared instead of the whole completion."""

    def __post_init__(self) -> None:
        """Check the pattern.

        Raises:
            ValueError: it is invalid, or has no group.
        """
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"pattern is {self.pattern!r}, which is no regular expression: {error}.") from None
            if groups < 1:
                raise ValueError(f"pattern is {self.pattern!r}; the compared part must stand in parentheses.")

    @property
    def needs(self) -> Needs:
        """Texts, and the column with answers."""
        return self.needs_for({"column": self.column})

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the needs under some options."""
        return Needs(media="texts", columns=(str(options.get("column", "answer")),))

    def score(self, media: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Compare completions with their answers."""
        import numpy as np

        found = [self._answer(text) for text in media]
        right = [text == str(about[self.column]).strip() for text, about in zip(found, metadata, strict=True)]
        return Scores(np.array(right, np.float32), found)

    def _answer(self, text: str) -> str:
        if self.pattern is None:
            return str(text).strip()
        matches = list(re.finditer(self.pattern, text))
        return str(matches[-1][1]).strip() if matches else ""
