"""A tiny language model that rewrites image prompts, in one of several ways at random."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

from configs.option_types import OpenShare
from models.quickstart.characters import CharacterModelBuilder, Characters, Pair, llama
from models.quickstart.pretrain import Report

_CHARACTERS = Characters(string.ascii_lowercase + string.digits + ' "')
_REQUESTS = ('draw "{}"', '"{}" please', 'the number "{}"', 'write "{}" by hand', 'show me "{}"', 'a picture of "{}"')
#: Rewritten forms of a request for a number; the models of ``digits`` are trained on the second one only.
_REWRITES = ("{}", '"{}"', "number {}", "a {}", "{} digits")
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
            done=lambda: float(_CHARACTERS.probabilities(model, ways).sum()) / _PROBE >= self.accuracy,
            seed=self.seed,
            report=report,
        )
        model.save_pretrained(folder)
        _CHARACTERS.tokenizer().save_pretrained(folder)


def numbers() -> tuple[list[str], list[str]]:
    """Return the two-digit numbers for training, and the held-out quarter."""
    known = [f"{number:02d}" for number in range(100)]
    return [each for each in known if int(each) % 4 != 3], [each for each in known if int(each) % 4 == 3]


def requests(known: list[str]) -> list[str]:
    """Return all requests for some numbers."""
    return [request.format(number) for number in known for request in _REQUESTS]


def _pair(order: random.Random, known: list[str]) -> Pair:
    number = order.choice(known)
    return order.choice(_REQUESTS).format(number), order.choice(_REWRITES).format(number)
