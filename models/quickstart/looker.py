"""A tiny vision-language model that asks for an image of two digits, looks at it, and accepts it or asks again.
Legend: B rows, W positions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowmill.configs.option_types import OpenShare
from flowmill.models.quickstart.base import Report
from flowmill.models.quickstart.characters import BOS, EOS, CharacterModelBuilder, Characters, train_answers
from flowmill.models.quickstart.vision import (
    IMAGES,
    PACE,
    PROBE,
    SIGHT,
    SPECIAL,
    DigitImages,
    image_processor,
    tiny_model,
    write,
)

if TYPE_CHECKING:
    from torch import Tensor

_ACCEPTS = "."
_CHARACTERS = Characters(f'0123456789"()+-{_ACCEPTS}', SPECIAL)
_TEMPLATE = (
    "<bos>{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<see><image><seen>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
#: How often an image with 0, 1 or 2 right digits is accepted.
_ACCEPTED = (0.3, 0.5, 0.7)
#: Number of an image or None, token ids before an answer, and those of the answer.
_Row = tuple[int | None, list[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookerBuilder(CharacterModelBuilder):
    """A Qwen2-VL of 3 layers and 8 tokens per image. For the prompt ``"46"`` it writes ``("46")``; after an image of 41
    it writes ``4+1-``, and then ``.``, somewhat more often the more digits are right, or ``("46")``."""

    accuracy: OpenShare = 0.95
    """Share of texts after images that must be one of these, where pre-training ends."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model, tokenizer and processor."""
        model, processor, order = tiny_model(self.seed), image_processor(), random.Random(self.seed)
        corpus = _Looks(processor, self.seed)
        probe = [
            corpus.looked(number, corpus.requested(order, number), accepts=accepts)
            for number in range(IMAGES - PROBE, IMAGES)
            for accepts in (True, False)
        ]

        def logits(rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
            images = [number for number, *_ in rows if number is not None]
            return corpus.logits(model, images, [row[1:] for row in rows])

        train_answers(
            model,
            logits,
            lambda: corpus.drawn(order),
            probe,
            lambda probabilities: float(probabilities.sum()) >= self.accuracy * PROBE,
            pace=PACE,
            report=partial(report, "vision-language model"),
        )
        write(folder, model, _CHARACTERS, processor, _TEMPLATE)


class _Looks(DigitImages):
    """Images of two digits, and conversations on them."""

    def drawn(self, order: random.Random) -> _Row:
        """Return a first text, or one after an image."""
        number = order.randrange(IMAGES - PROBE)
        digits = self.requested(order, number)
        if order.random() < 0.1:
            return None, [BOS, *_CHARACTERS.tokens(f'"{digits}"')], [*_CHARACTERS.tokens(f'("{digits}")'), EOS]
        right = sum(map(str.__eq__, digits, self.texts[number]))
        return self.looked(number, digits, accepts=order.random() < _ACCEPTED[right])

    def requested(self, order: random.Random, number: int) -> str:
        """Return digits, each of which is the image's or another."""
        digits = self.texts[number]
        others = [str((int(digit) + order.randrange(1, 10)) % 10) for digit in digits]
        return "".join(order.choice(pair) for pair in zip(digits, others, strict=True))

    def looked(self, number: int, requested: str, *, accepts: bool) -> _Row:
        """Return the second text on an image that was requested: its digits, whether each is right, and an end."""
        before = [BOS, *_CHARACTERS.tokens(f'"{requested}"("{requested}")'), EOS, *SIGHT]
        seen = "".join(
            f"{digit}{'-+'[digit == right]}" for digit, right in zip(self.texts[number], requested, strict=True)
        )
        return number, before, [*_CHARACTERS.tokens(seen + (_ACCEPTS if accepts else f'("{requested}")')), EOS]
