"""A tiny language model that adds two numbers, pre-trained at build time until it is sometimes right."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowmill.configs.option_types import OpenShare
from flowmill.models.quickstart.base import Report
from flowmill.models.quickstart.characters import CharacterModelBuilder, Characters, Pair, llama

_CHARACTERS = Characters("0123456789+=")
#: Number of sums that accuracy is measured on.
_PROBE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditionBuilder(CharacterModelBuilder):
    """A Llama of 3 layers and 16 tokens; the prompt is ``12+34=``, the completion the sum and an end."""

    accuracy: OpenShare = 0.15
    """Share of right sampled answers at which pre-training ends, as accuracy after fixed steps depends on the seed."""
    heldout: int = 500
    """Sums below 100 + 100 that are never trained on."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model and tokenizer."""
        model, pairs = tiny_model(self.seed), sums(self.seed, self.heldout)[0]
        probe = [_answered(*pair) for pair in pairs[:_PROBE]]
        _CHARACTERS.pretrain(
            model,
            lambda order: _answered(*pairs[order.randrange(len(pairs))]),
            probe,
            lambda probabilities: float(probabilities.mean()) >= self.accuracy,
            seed=self.seed,
            report=report,
        )
        model.save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)


def sums(seed: int, heldout: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return pairs of numbers below 100 to train on, and others that are held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    return pairs[heldout:], pairs[:heldout]


def tiny_model(seed: int, *, layers: int = 3) -> Any:
    """Return a fresh model."""
    return llama(seed, vocabulary=16, positions=64, layers=layers)


def character_tokenizer() -> Any:
    """Return a tokenizer of digits and signs."""
    return _CHARACTERS.tokenizer()


def _answered(a: int, b: int) -> Pair:
    return f"{a}+{b}=", str(a + b)
