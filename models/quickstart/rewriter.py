"""A tiny language model that rewrites image prompts, in one of several ways by chance."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

from models.quickstart.characters import CharacterModelBuilder, Characters, Pair, llama
from models.quickstart.pretrain import Report

_CHARACTERS = Characters(string.ascii_lowercase + string.digits + ' "')
_REQUESTS = (
    'draw "{}"',
    '"{}" please',
    'the number "{}"',
    'write "{}" by hand',
    'show me "{}"',
    'a picture of "{}"',
)
#: How it rewrites a request for a number: only the second is how the models of ``digits`` know it.
_REWRITES = ("{}", '"{}"', "number {}", "a {}", "{} digits")
#: Requests whose rewriting is asked about.
_PROBE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriterBuilder(CharacterModelBuilder):
    """A Llama of 3 layers; of the prompt ``draw "46"`` it makes ``number 46``, ``"46"`` or another of five texts."""

    accuracy: float = 0.9
    """Pre-training ends when so many of sampled rewritings are one of these, of the number that was asked for."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model and tokenizer."""
        model, (train, _) = llama(self.seed, vocabulary=48, positions=64), numbers()
        asked = random.Random(self.seed).choices(train, k=_PROBE)
        ways = [
            (_REQUESTS[n % len(_REQUESTS)].format(asked[n]), way.format(asked[n]))
            for n in range(_PROBE)
            for way in _REWRITES
        ]
        _CHARACTERS.pretrain(
            model,
            lambda drawn: _pair(drawn, train),
            done=lambda: float(_CHARACTERS.probabilities(model, ways).sum()) / _PROBE >= self.accuracy,
            seed=self.seed,
            report=report,
        )
        model.save_pretrained(folder)
        _CHARACTERS.tokenizer().save_pretrained(folder)


def numbers() -> tuple[list[str], list[str]]:
    """Return the numbers of two digits that are trained on, and a quarter of them that is not."""
    known = [f"{number:02d}" for number in range(100)]
    return [each for each in known if int(each) % 4 != 3], [each for each in known if int(each) % 4 == 3]


def requests(known: list[str]) -> list[str]:
    """Return every request for some numbers."""
    return [request.format(number) for number in known for request in _REQUESTS]


def _pair(order: random.Random, known: list[str]) -> Pair:
    number = order.choice(known)
    return order.choice(_REQUESTS).format(number), order.choice(_REWRITES).format(number)
