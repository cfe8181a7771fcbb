"""Reads two adjacent handwritten digits with a classifier trained on scikit-learn's real digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.svm import SVC

from flowmill.models.quickstart.corpus import real_digits
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, quoted_text, text_in


@dataclass(kw_only=True)
class DigitsReward:
    """Share of the two halves that are read as the digits of the prompt: 0, 0.5 or 1. ``svc`` reads 99 % of real digits
    it was not trained on. ``trees`` is a second opinion for evaluation: it is never optimized, so a model that learns
    to fool ``svc`` shows as a gap between the two."""

    perfect: ClassVar[float] = 1.0
    """Both halves match the prompt."""
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    classifier: Literal["svc", "trees"] = "svc"
    """A support vector machine, or extremely random trees, trained on scikit-learn's digits on the spot."""
    column: str | None = None
    """Column of the prompts with the number; None: the prompt has it in double quotes."""
    _model: SVC | ExtraTreesClassifier = field(init=False)

    def __post_init__(self) -> None:
        images, labels = real_digits()
        model = SVC(gamma=0.05, C=5) if self.classifier == "svc" else ExtraTreesClassifier(200, random_state=0)
        self._model = model.fit(images.reshape(len(images), -1), labels)

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the needs under some options."""
        column = options.get("column")
        return Needs(media="images", columns=() if column is None else (str(column),))

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return shares and the two digits that were read; ``media`` is (B, H, W, 3), with 8 rows and 16
        columns of equal size."""
        ink = 1 - media.astype(np.float32).mean(-1) / 255
        small = ink.reshape(len(media), 8, ink.shape[1] // 8, 16, ink.shape[2] // 16).mean((2, 4))
        halves = np.stack([small[:, :, :8], small[:, :, 8:]], 1).reshape(-1, 64)
        read = self._model.predict(halves).reshape(-1, 2)
        numbers = [quoted_text(prompt) for prompt in prompts]
        if self.column is not None:
            numbers = [text_in(fields, self.column) for fields in metadata]
        expected = np.array([[int(digit) for digit in number] for number in numbers])
        return Scores((read == expected).mean(1).astype(np.float32), [f"{left}{right}" for left, right in read])
