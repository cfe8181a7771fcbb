"""GenEval2 (github.com/facebookresearch/GenEval2): questions on every prompt's atoms, answered by a vision model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, text_in
from flowmill.models.rewards.vlm import ONE_TOKEN, Asking

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
#: Stands for a probability of 0 in a geometric mean: the endpoint reports the 20 likeliest tokens only.
_LEAST = 1e-6


@dataclass(kw_only=True)
class GenEval2(Asking):
    """Soft-TIFA: the mean of P(right answer) over the questions of a prompt (``evaluation.py:soft_tifa``). Each
    question ends with 'Answer in one word.'; the probability is that of the answer as the first token, a number also in
    digits. ``gm``: the geometric mean, for whole prompts; ``am``: the arithmetic mean, for their atoms."""

    name: ClassVar[str] = "geneval2"
    needs: ClassVar[Needs] = Needs(media="images", columns=("vqa_list",))
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    mean: Literal["gm", "am"] = "gm"
    """Geometric or arithmetic."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image, 0 to 1, with the probability of every answer. Raises ValueError
        if a prompt has no questions; RewardError if the endpoint refuses, or reports no probabilities; ConnectionError
        if it cannot be reached or is overloaded, after several tries."""
        questions = [(row, *pair) for row, fields in enumerate(metadata) for pair in _questions(fields, prompts[row])]
        probabilities = self.map(lambda one: self._probability(media[one[0]], one[1], one[2]), questions)
        values, notes = [], []
        for row in range(len(prompts)):
            likely = [value for (of, _, _), value in zip(questions, probabilities, strict=True) if of == row]
            values.append(_mean(likely, self.mean))
            notes.append(" ".join(f"{value:.2f}" for value in likely))
        return Scores(np.array(values, np.float32), notes)

    def _probability(self, image: np.ndarray, question: str, answer: str) -> float:
        likely = self.first_token(self.answer(image, f"{question} Answer in one word.", **ONE_TOKEN), question)
        words = {answer.lower()}
        if question.startswith("How many") and answer.lower() in _NUMBERS:
            words.add(str(_NUMBERS.index(answer.lower())))
        elif not question.startswith("How many"):
            words = {"yes"}
        return min(1.0, sum(likely.get(word, 0.0) for word in words))


def _questions(fields: Mapping[str, Any], prompt: str) -> list[tuple[str, str]]:
    pairs = fields.get("vqa_list")
    if not pairs:
        raise ValueError(f"prompt {prompt!r} has no questions in the column 'vqa_list' of GenEval2's data")
    as_text = lambda value: text_in({"vqa_list": value}, "vqa_list")  # noqa: E731
    return [(as_text(question), as_text(answer)) for question, answer in pairs]


def _mean(values: Sequence[float], kind: str) -> float:
    if kind == "am":
        return sum(values) / len(values)
    return math.exp(sum(math.log(max(value, _LEAST)) for value in values) / len(values))
