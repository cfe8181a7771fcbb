"""Judges of image edits at any endpoint with OpenAI's protocol: a rubric scores several aspects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from flowmill.configs.errors import RewardError
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, Sources
from flowmill.models.rewards.vlm import Asking, Question, edited

_SUCCESS = (
    "You judge edits of images. The first image or images are what there was, the last is what was made of them by an "
    "instruction; where an edit failed they may look the same.\nGive two scores from 0 to 25. The first is for "
    "success: 0 if the last image does not follow the instruction at all, 25 if it follows it perfectly. The second is "
    "for restraint: 0 if the last image is another scene altogether, 25 if nothing was changed that the instruction "
    "does not ask for.\nAnswer with JSON, the reasoning short:\n"
    '{"reasoning": "...", "score": [success, restraint]}\nEditing instruction: {prompt}'
)
_ASPECTS = (
    "You judge edits of images. The first image or images are what there was, the last is what was made of them by "
    "this instruction: {prompt}\nRate four aspects from 1 (it fails) over 2 (clear flaws) and 3 (small flaws) to 4 "
    "(nothing to find fault with), fractions allowed. Justify each score with what you see before you give it.\n"
    "Text Faithfulness: is all done that the instruction asks for, and as it says? Image Faithfulness: is everything "
    "kept that it does not ask to change? Physical and Visual Quality: are light, perspective and anatomy right, and "
    "are there no artifacts? "
    "Text Rendering: is text that it asks for legible and right? N/A where it asks for none.\nAnswer in this form:\n"
    "# Detailed Judgement\n1. Text Faithfulness:\n## Justification: ...\n## Score: ...\n2. Image Faithfulness:\n"
    "## Justification: ...\n## Score: ...\n3. Physical and Visual Quality:\n## Justification: ...\n## Score: ...\n"
    "4. Text Rendering:\n## Justification: ...\n## Score: ...\n# Summary: ..."
)
_DIMENSIONS = (
    "You judge edits of images. The first image or images are what there was, the last is what was made of them by "
    "this instruction: {prompt}\nRate two dimensions from 1 (very poor) to 4 (very good), fractions allowed. "
    "Instruction Following: is what the instruction asks for done, wholly, and nothing else changed? Visual "
    "Quality: is the last image plausible, free of artifacts and pleasing?\nEnd with two lines:\n"
    "Instruction Following: N\nVisual Quality: N"
)
_NUMBER = r"(\d+(?:\.\d+)?)"
_LIST = re.compile(rf'"score"\s*:\s*\[\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\]')
_HEADINGS = ("text faithfulness", "image faithfulness", "physical and visual quality", "text rendering")
#: Marks between words. Their number is bounded, so that reading takes time in proportion to the text.
_MARKS = r"\W{0,40}"
_HEADING = re.compile(rf"^{_MARKS}\d\.{_MARKS}({'|'.join(_HEADINGS)})\b", re.MULTILINE | re.IGNORECASE)
_SCORE = re.compile(rf"\bscore{_MARKS}:{_MARKS}(?:{_NUMBER}|N/?A\b)", re.IGNORECASE)
_SUMMARY = re.compile(rf"^{_MARKS}summary\b", re.MULTILINE | re.IGNORECASE)


def _listed(text: str) -> list[float]:
    lists = _LIST.findall(text)
    return [float(number) for number in lists[-1]] if lists else []


def _by_aspect(text: str) -> list[float]:
    """Return the score below each heading; the one of text rendering is optional."""
    judged = _SUMMARY.split(text)[0]
    parts = _HEADING.split(judged)
    scores = {name.lower(): _SCORE.search(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}
    numbers = {name: None if match is None else match[1] for name, match in scores.items()}
    if any(numbers.get(name) is None for name in _HEADINGS[:3]):
        return []
    return [float(number) for number in numbers.values() if number is not None]


def _by_dimension(text: str) -> list[float]:
    """Return the last number after each of two names."""
    by_name = [
        re.findall(rf"{name}{_MARKS}:{_MARKS}{_NUMBER}", text, re.I)
        for name in ("Instruction Following", "Visual Quality")
    ]
    return [float(numbers[-1]) for numbers in by_name] if all(by_name) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """The question for a judge, and the parser of its answer."""

    question: str
    """With {prompt} for the instruction."""
    read: Callable[[str], list[float]]
    """Parses the scores of an answer; empty if one is missing."""
    lowest: float
    """The lowest possible score."""
    highest: float
    """The highest possible score."""


#: Answer formats of UnifiedReward-Edit (CodeGoat24/UnifiedReward ``edit_pointwise_instruction_following.py``),
#: RationalRewards (Flow-Factory ``rational_rewards_edit.py``) and the dimensions of EditReward (arXiv 2509.26346).
RUBRICS: Mapping[str, Rubric] = {
    "unified": Rubric(question=_SUCCESS, read=_listed, lowest=0.0, highest=25.0),
    "rational": Rubric(question=_ASPECTS, read=_by_aspect, lowest=1.0, highest=4.0),
    "edit_reward": Rubric(question=_DIMENSIONS, read=_by_dimension, lowest=1.0, highest=4.0),
}


@dataclass(kw_only=True)
class EditReward(Asking):
    """Asks a model to judge edits, with its source images. The scores of its aspects are combined and mapped from the
    rubric's range to 0 to 1: Flow-Factory takes the ``mean`` for RationalRewards, VIEScore (arXiv 2312.14867) the
    ``min`` for success and restraint. An answer that lacks a score is an error, never a low score."""

    name: ClassVar[str] = "edit_reward"
    needs: ClassVar[Needs] = Needs(media="images", references=True)
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    rubric: Literal["unified", "rational", "edit_reward"] = "unified"
    """Question and answer format: those of UnifiedReward-Edit, RationalRewards or EditReward."""
    question: Question | None = None
    """Replaces the rubric's question, with {prompt} for the instruction: the exact text a judge was trained with."""
    over: Literal["mean", "min"] = "mean"
    """How the scores of the aspects are combined."""
    max_tokens: int = 2048
    """Maximum tokens of an answer."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, references: Sources) -> Scores:
        """Return one score per (H, W, 3) uint8 image, 0 to 1, with the answer as a note."""
        answers = self.map(self._judge, media, prompts, references)
        return Scores(np.array([value for value, _ in answers], np.float32), [text for _, text in answers])

    def _judge(self, image: np.ndarray, prompt: str, started: Sequence[np.ndarray]) -> tuple[float, str]:
        rubric = RUBRICS[self.rubric]
        question = (self.question or rubric.question).replace("{prompt}", prompt)
        text = self.answer_images(edited(started, image), question, max_tokens=self.max_tokens).text
        scores = rubric.read(text)
        if not scores or not all(rubric.lowest <= score <= rubric.highest for score in scores):
            problem = f"has the scores {scores}" if scores else "lacks a score"
            raise RewardError(
                f"reward '{self.name}': the answer about prompt {prompt!r} {problem}, expected all of the rubric "
                f"'{self.rubric}', {rubric.lowest:g} to {rubric.highest:g}: {text[:200]!r}. Ask in another way (option "
                "'question'), by another rubric, or give the answer more room (option 'max_tokens')."
            )
        joined = min(scores) if self.over == "min" else sum(scores) / len(scores)
        return (joined - rubric.lowest) / (rubric.highest - rubric.lowest), text
