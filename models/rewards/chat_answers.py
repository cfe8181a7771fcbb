"""Parses the answers of a chat endpoint without OpenAI's client, whose models take a minute for a megabyte."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from flowmill.configs.answers import json_of, text_of
from flowmill.configs.errors import RewardError
from flowmill.models.serving.retry import PassingError

#: Alternatives for the first token that are read: OpenAI's limit is 20.
_LIKELIEST = 100
#: Characters an answer may have: a search notices its timeout some thousand steps late, each up to the answer's length.
_LONGEST = 1 << 17
#: Processor time of a search in seconds: ``regex`` has no other clock.
_SEARCHED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A model's answer."""

    text: str
    """Empty if there is none."""
    likely: Sequence[tuple[str, float]] = ()
    """Alternatives for the first token, with their log-probs in nats."""
    until: float = math.inf
    """Deadline for parsing all of it, by the monotonic clock."""

    def find_all(self, pattern: str, *, ignore_case: bool = False) -> list[str]:
        """Return the text of the first group of every match of a pattern; raise RewardError if searching takes longer
        than a second, or than the time left for the request."""
        flags = regex.IGNORECASE if ignore_case else 0
        left = min(_SEARCHED_S, max(0.05, self.until - time.monotonic()))
        try:
            # The text is immutable, so other threads can run during the search.
            matches = regex.finditer(pattern, self.text, flags, timeout=left, concurrent=True)
            return [match[min(1, match.re.groups)] or "" for match in matches]
        except TimeoutError:
            raise RewardError(
                f"the pattern '{pattern}' is not done with an answer of {len(self.text)} characters after "
                f"{left:.2g} s. Check the endpoint's answers, or write it without nested or adjacent repetitions."
            ) from None


def read_answer(content: bytes, *, until: float = math.inf) -> Answer:
    """Return the first choice of a chat completion. Raises PassingError if it is none, as of a proxy or a server that
    starts; ValueError if its text or log-probs cannot be read."""
    try:
        completion = json_of(content)
    except ValueError:
        completion = None
    choices = completion.get("choices") if isinstance(completion, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        raise PassingError(f"its answer is no chat completion: {text_of(content)[:200]!r}")
    text = message.get("content")
    if not isinstance(text, str | None):
        raise ValueError(f"its answer is no text but a {type(text).__name__}")
    if len(text or "") > _LONGEST:
        raise ValueError(f"its answer has {len(text or '')} characters, more than the {_LONGEST} that are read")
    return Answer(text=text or "", likely=_likely(choice.get("logprobs")), until=until)


def first_token(answer: Answer) -> dict[str, float]:
    """Return the probability of each lower-cased word as the answer's first token, of those the endpoint reports."""
    probabilities: dict[str, float] = {}
    for token, log_prob in answer.likely:
        word = token.strip().strip(".,").lower()
        probabilities[word] = probabilities.get(word, 0.0) + math.exp(log_prob)
    return probabilities


def _likely(log_probs: Any) -> tuple[tuple[str, float], ...]:
    """Return the likeliest first tokens of OpenAI's ``logprobs``, if any."""
    content = log_probs.get("content") if isinstance(log_probs, Mapping) else None
    if not isinstance(content, list) or not content:
        return ()
    top = content[0].get("top_logprobs") if isinstance(content[0], Mapping) else None
    if not isinstance(top, list):
        raise ValueError("it tells no top_logprobs of its first token")
    return tuple(_token(each) for each in top[:_LIKELIEST])


def _token(entry: Any) -> tuple[str, float]:
    token, log_prob = (entry.get("token"), entry.get("logprob")) if isinstance(entry, Mapping) else (None, None)
    number = log_prob if isinstance(log_prob, int | float) and not isinstance(log_prob, bool) else math.nan
    if not isinstance(token, str) or not number <= 1.0:
        raise ValueError(f"{str(entry)[:80]} is no token with its log-prob")
    return token, float(number)
