"""A tiny language model that rewrites image prompts, in one of several ways at random."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flowmill.configs.option_types import OpenShare
from flowmill.models.quickstart.base import Report
from flowmill.models.quickstart.characters import (
    BOS,
    EOS,
    CharacterModelBuilder,
    Characters,
    Pace,
    Pair,
    llama,
    text_logits,
    train_answers,
)

_CHARACTERS = Characters(string.ascii_lowercase + string.digits + ' "')
_SCORED = Characters(_CHARACTERS.characters + ".")
_REQUESTS = ('draw "{}"', '"{}" please', 'the number "{}"', 'write "{}" by hand', 'show me "{}"', 'a picture of "{}"')
#: Rewritten forms of a request for a number; the models of ``digits`` are trained on the second one only.
_REWRITES = ("{}", '"{}"', "number {}", "a {}", "{} digits")
#: The text that accepts an image, and how often it answers each score of one.
_ACCEPTS, _SCORES = "ok", {"0.00": 0.3, "0.50": 0.5, "1.00": 0.7}
#: Number of requests that accuracy is measured on.
_PROBE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriterBuilder(CharacterModelBuilder):
    """A Llama of 3 layers; it rewrites the prompt ``draw "46"`` as ``number 46``, ``"46"`` or another of five texts."""

    accuracy: OpenShare = 0.9
    """Share of sampled texts that must be one of these, with the right number, at which pre-training ends."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model and tokenizer."""
        model, (train, _) = llama(self.seed, vocabulary=48, positions=64), numbers()
        probe = random.Random(self.seed).choices(train, k=_PROBE)
        ways = [
            (_REQUESTS[n % len(_REQUESTS)].format(probe[n]), way.format(probe[n]))
            for n in range(_PROBE)
            for way in _REWRITES
        ]
        _CHARACTERS.pretrain(
            model,
            lambda drawn: _pair(drawn, train),
            ways,
            lambda probabilities: float(probabilities.sum()) / _PROBE >= self.accuracy,
            seed=self.seed,
            report=report,
        )
        model.save_pretrained(folder)
        _CHARACTERS.tokenizer().save_pretrained(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviserBuilder(CharacterModelBuilder):
    """A rewriter that goes on after the score of its image with ``ok``, somewhat more often after a higher one, or with
    another rewritten form."""

    accuracy: OpenShare = 0.97
    """Share of sampled texts that must be ``ok`` or a form with the right number, where pre-training ends."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model and tokenizer."""
        model, (train, _), order = llama(self.seed, vocabulary=48, positions=64), numbers(), random.Random(self.seed)
        probe = [row for number in order.choices(train, k=_PROBE) for row in _texts(order, number)]
        train_answers(
            model,
            partial(text_logits, model),
            lambda: _turn(order, order.choice(train)),
            probe,
            lambda probabilities: float(probabilities.sum()) >= self.accuracy * 2 * _PROBE,
            pace=Pace(batch=128, most=3000),
            report=partial(report, "language model"),
        )
        model.save_pretrained(folder)
        _SCORED.tokenizer().save_pretrained(folder)


def numbers() -> tuple[list[str], list[str]]:
    """Return the two-digit numbers for training, and the remaining quarter."""
    texts = [f"{number:02d}" for number in range(100)]
    return [each for each in texts if int(each) % 4 != 3], [each for each in texts if int(each) % 4 == 3]


def requests(chosen: list[str]) -> list[str]:
    """Return all requests for some numbers."""
    return [request.format(number) for number in chosen for request in _REQUESTS]


def _pair(order: random.Random, chosen: list[str]) -> Pair:
    number = order.choice(chosen)
    return order.choice(_REQUESTS).format(number), order.choice(_REWRITES).format(number)


#: Token ids before an answer, and those of the answer.
_Row = tuple[list[int], list[int]]


def _texts(order: random.Random, number: str) -> list[_Row]:
    """Return all answers to a request for a number, and to a score of its image."""
    request, texts = order.choice(_REQUESTS).format(number), [each.format(number) for each in _REWRITES]
    said = order.choice(texts), order.choice([*_SCORES])
    return [*(_row(request, text) for text in texts), *(_row(request, text, said) for text in (*texts, _ACCEPTS))]


def _turn(order: random.Random, number: str) -> _Row:
    """Return a first or second answer to a request for a number."""
    request, texts = order.choice(_REQUESTS).format(number), [each.format(number) for each in _REWRITES]
    if order.random() < 0.5:
        return _row(request, order.choice(texts))
    score = order.choice([*_SCORES])
    answer = _ACCEPTS if order.random() < _SCORES[score] else order.choice(texts)
    return _row(request, answer, (order.choice(texts), score))


def _row(request: str, answer: str, before: tuple[str, str] | None = None) -> _Row:
    said = [] if before is None else [*_SCORED.tokens(before[0]), EOS, *_SCORED.tokens(before[1])]
    return [BOS, *_SCORED.tokens(request), *said], [*_SCORED.tokens(answer), EOS]
