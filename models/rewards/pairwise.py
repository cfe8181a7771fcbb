"""A judge of pairs within a group: a sample's score is its win rate against the others (Pref-GRPO, arXiv 2508.20751).

Scores of single images lie close together, so their normalized differences are mostly noise, which policies learn to
exploit. A judge compares two images more reliably.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from flowmill.configs.errors import RewardError
from flowmill.configs.option_types import GroupRegex, Regex
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, Sources
from flowmill.models.rewards.vlm import Asking, Question, edited

_ASK = (
    "Which of the two images shows better what the text says, and looks better? Compare how well they fit the text, "
    "their composition and how real they are. Text: {prompt}\nEnd with one line: Image 1 is better, or: Image 2 is "
    "better"
)
_ASK_EDIT = (
    "Image 1 and Image 2 were made from the source by one instruction. Which of the two carries it out better, keeps "
    "better what it does not ask to change, and looks better? Instruction: {prompt}\nEnd with one line: Image 1 is "
    "better, or: Image 2 is better"
)


@dataclass(kw_only=True)
class WinRate(Asking):
    """Asks a model which is better for all pairs of a group: K (K - 1) / 2 requests, or twice that in both orders. The
    score is the share of the others that a sample beats: (wins + ties / 2) / (K - 1), 0 to 1."""

    name: ClassVar[str] = "win_rate"
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    question: Question | None = None
    """Question on every pair, with {prompt} for the prompt."""
    pattern: GroupRegex = r"(?:Image\s*)?([12])\s+is\s+better"
    """Regular expression whose first group is the better image, 1 or 2; the last match counts."""
    tie: Regex = r"\b(?:equal(?:ly)?|tie|same)\b"
    """Regular expression of a tie, for answers that the pattern does not match."""
    both_orders: bool = True
    """Judge each pair in both orders, as judges prefer one position; two different answers are a tie."""
    max_tokens: int = 2048
    """Maximum tokens of an answer."""
    references: bool = False
    """Show the prompt's source images first, and ask which edit is better."""

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the needs under some options: a whole group, and references where they are shown."""
        return Needs(media="images", groupwise=True, references=bool(options.get("references", False)))

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, references: Sources = ()) -> Scores:
        """Return (K,) win rates of the (H, W, 3) uint8 images of one group, with tallies; 0 for a single image."""
        pairs = list(combinations(range(len(media)), 2))
        orders = [pair for one, two in pairs for pair in [(one, two), (two, one)][: 1 + self.both_orders]]
        started = references[0] if references else ()
        answers = self.map(lambda pair: self._better(media[list(pair)], prompts[pair[0]], started), orders)
        results = np.full((len(media), len(media)), np.nan)
        for (first, second), answer in zip(orders, answers, strict=True):
            # With both orders the two answers are combined.
            before = results[first, second]
            share = answer if np.isnan(before) else _verdict(before, answer)
            results[first, second], results[second, first] = share, 1 - share
        return Scores(win_rates(results), _tallies(results))

    def _better(self, two: np.ndarray, prompt: str, started: Sequence[np.ndarray]) -> float:
        """Return 1 where the first of two images is better, 0 where the second is, 1/2 where none is."""
        question = (self.question or (_ASK_EDIT if self.references else _ASK)).replace("{prompt}", prompt)
        sources = edited(started, two[0])[:-1] if self.references else []
        shown = [*sources, ("Image 1:", two[0]), ("Image 2:", two[1])]
        answer = self.answer_images(shown, question, max_tokens=self.max_tokens)
        answers = answer.find_all(self.pattern, ignore_case=True)
        named = answers[-1] if answers else None
        if named in ("1", "2"):
            return float(named == "1")
        if named is None and answer.find_all(self.tie, ignore_case=True):
            return 0.5
        raise RewardError(
            f"reward '{self.name}': '{self.pattern}' finds no winner in the answer about a pair of prompt {prompt!r}: "
            f"{answer.text[-200:]!r}. Change the option 'question', or give answers more room (option 'max_tokens')."
        )


def _verdict(one: float, other: float) -> float:
    """Combine two answers on a pair: the winner of both, or of one if the other is a tie; else a tie."""
    total = one + other
    return 0.5 if total == 1 else float(total > 1)


def win_rates(results: np.ndarray) -> np.ndarray:
    """Return (K,) float32 win rates from (K, K) results: 1 a win, 1/2 a tie, 0 a loss, NaN on the diagonal. The rate of
    a single sample is 0."""
    others = max(1, len(results) - 1)
    return (np.nansum(results, axis=1) / others).astype(np.float32)


def _tallies(results: np.ndarray) -> list[str]:
    counted = [[int((row == value).sum()) for value in (1.0, 0.5, 0.0)] for row in results]
    return [f"{wins} won, {ties} tied, {losses} lost" for wins, ties, losses in counted]
