"""A judge of pairs within a group: a sample's score is how many of the others it beats (Pref-GRPO, arXiv 2508.20751).

Scores of single images lie close together, so that their normalized differences are mostly noise, which policies learn
to exploit; which of two images is better a judge can tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from configs.errors import RewardError
from models.rewards.base import Bounds, Needs, Scores
from models.rewards.vlm import Asking, edited

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
    """Asks a model which of two is better, of all pairs of a group: K (K - 1) / 2, or as many again in both orders.

    The score is the share of the others that a sample beats: (wins + ties / 2) / (K - 1), 0 to 1.
    """

    name: ClassVar[str] = "win_rate"
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    question: str | None = None
    """Asked of every pair, with {prompt} for the prompt."""
    pattern: str = r"(?:Image\s*)?([12])\s+is\s+better"
    """Finds the better one in the answer, in its first group: 1 or 2; of several the last counts."""
    tie: str = r"\b(?:equal(?:ly)?|tie|same)\b"
    """Finds that none is, where the pattern finds nothing."""
    both_orders: bool = True
    """Ask about each pair twice, either first: judges prefer places; two different answers are a tie."""
    max_tokens: int = 2048
    """Of an answer."""
    references: bool = False
    """Show the images that the prompt starts from first, and ask which edit is better."""

    def __post_init__(self) -> None:
        """Make the client; nothing is asked yet.

        Raises:
            ConfigError: the package is not installed, or there is no endpoint.
            ValueError: an option is out of range.
        """
        super().__post_init__()
        self.check_asked(self.question, self.pattern, group="number of the better image")
        re.compile(self.tie)

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return that a whole group is needed, and references where they are to be shown."""
        return Needs(media="images", groupwise=True, references=bool(options.get("references", False)))

    @property
    def needs(self) -> Needs:
        """A whole group, and references where they are to be shown."""
        return self.needs_for({"references": self.references})

    def score(
        self,
        media: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        references: Sequence[Sequence[np.ndarray]] = (),
    ) -> Scores:
        """Return (K,) win rates of the (H, W, 3) uint8 images of one group, with what each won; 0 for one alone.

        Raises:
            RewardError: an answer names no winner, or the endpoint refuses the request.
            ConnectionError: the endpoint cannot be reached or is overloaded, after several tries.
        """
        pairs = list(combinations(range(len(media)), 2))
        orders = [pair for one, two in pairs for pair in [(one, two), (two, one)][: 1 + self.both_orders]]
        started = references[0] if references else ()
        answers = self.map(lambda pair: self._better(media[list(pair)], prompts[pair[0]], started), orders)
        results = np.full((len(media), len(media)), np.nan)
        for (first, second), answer in zip(orders, answers, strict=True):
            # Asked in both orders, what is kept is the mean of the two.
            before = results[first, second]
            share = answer if np.isnan(before) else _verdict(before, answer)
            results[first, second], results[second, first] = share, 1 - share
        return Scores(win_rates(results), _tallies(results))

    def _better(self, two: np.ndarray, prompt: str, started: Sequence[np.ndarray]) -> float:
        """Return 1 where the first of two images is better, 0 where the second is, 1/2 where none is."""
        question = (self.question or (_ASK_EDIT if self.references else _ASK)).replace("{prompt}", prompt)
        sources = edited(started, two[0])[:-1] if self.references else []
        shown = [*sources, ("Image 1:", two[0]), ("Image 2:", two[1])]
        answer = self.answer_about(shown, question, max_tokens=self.max_tokens)
        found = answer.find_all(self.pattern, ignore_case=True)
        named = found[-1] if found else None
        if named in ("1", "2"):
            return float(named == "1")
        if named is None and answer.find_all(self.tie, ignore_case=True):
            return 0.5
        raise RewardError(
            f"reward '{self.name}': '{self.pattern}' finds no winner in the answer about a pair of prompt {prompt!r}: "
            f"{answer.text[-200:]!r}. Change the option 'question', or give answers more room (option 'max_tokens')."
        )


def _verdict(one: float, other: float) -> float:
    """Return what two answers about a pair say together: a win where they agree or one is a tie, else a tie."""
    total = one + other
    return 0.5 if total == 1 else float(total > 1)


def win_rates(results: np.ndarray) -> np.ndarray:
    """Return (K,) float32 shares of the others each beats, of (K, K) results: 1 a win, 1/2 a tie, 0 a loss, NaN itself.

    One alone beats nobody.
    """
    others = max(1, len(results) - 1)
    rates: np.ndarray = (np.nansum(results, axis=1) / others).astype(np.float32)
    return rates


def _tallies(results: np.ndarray) -> list[str]:
    counted = [[int((row == value).sum()) for value in (1.0, 0.5, 0.0)] for row in results]
    return [f"{wins} won, {ties} tied, {losses} lost" for wins, ties, losses in counted]
