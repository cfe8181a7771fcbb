"""A tiny vision-language model that asks for an image of two digits, looks at it, and accepts it or asks again.
Legend: B rows, W positions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowmill.configs.option_types import OpenShare
from flowmill.models.quickstart.base import Report
from flowmill.models.quickstart.characters import (
    BOS,
    EOS,
    CharacterModelBuilder,
    Characters,
    answer_loss,
    answer_probabilities,
    filled,
    train_until,
)
from flowmill.models.quickstart.corpus import digit_pairs
from flowmill.models.quickstart.vision import image_processor, tiny_model

_ACCEPTS = "."
_CHARACTERS = Characters(
    f'0123456789"()+-{_ACCEPTS}',
    {"vision_start_token": "<see>", "image_token": "<image>", "vision_end_token": "<seen>", "video_token": "<clip>"},
)
_SEE, _IMAGE, _SEEN = range(3, 6)
#: Tokens of an image.
_SIGHT = [_SEE, *[_IMAGE] * 8, _SEEN]
_TEMPLATE = (
    "<bos>{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<see><image><seen>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
#: How often an image with 0, 1 or 2 right digits is accepted.
_ACCEPTED = (0.3, 0.5, 0.7)
#: Images of the corpus, of which the last measure accuracy; rows of a batch; steps between checks, and the most steps.
_IMAGES, _PROBE, _BATCH, _EVERY, _MOST_STEPS = 6000, 200, 64, 20, 4000
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
            for number in range(_IMAGES - _PROBE, _IMAGES)
            for accepts in (True, False)
        ]

        def loss() -> Tensor:
            return answer_loss(*corpus.logits(model, [corpus.drawn(order) for _ in range(_BATCH)]))

        @torch.no_grad()
        def good(step: int) -> bool:
            if step % _EVERY:
                return False
            return float(answer_probabilities(*corpus.logits(model, probe)).sum()) >= self.accuracy * _PROBE

        train_until(model, loss, good, most=_MOST_STEPS, report=partial(report, "vision-language model"), max_norm=1.0)
        model.save_pretrained(folder)
        _CHARACTERS.tokenizer().save_pretrained(folder)
        processor.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(_TEMPLATE)


class _Looks:
    """Images of two digits, and conversations on them."""

    def __init__(self, processor: Any, seed: int) -> None:
        self.texts, gray = digit_pairs(_IMAGES, seed=seed + 1)
        seen = processor(images=[Image.fromarray(each).convert("RGB") for each in gray], return_tensors="pt")
        self._pixels: Tensor = seen.pixel_values.unflatten(0, (_IMAGES, -1))
        self._grid = seen.image_grid_thw[:1]

    def drawn(self, order: random.Random) -> _Row:
        """Return a first text, or one after an image."""
        number = order.randrange(_IMAGES - _PROBE)
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
        before = [BOS, *_CHARACTERS.tokens(f'"{requested}"("{requested}")'), EOS, *_SIGHT]
        seen = "".join(
            f"{digit}{'-+'[digit == right]}" for digit, right in zip(self.texts[number], requested, strict=True)
        )
        return number, before, [*_CHARACTERS.tokens(seen + (_ACCEPTS if accepts else f'("{requested}")')), EOS]

    def logits(self, model: Any, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
        """Return (B, W, V) logits and (B, W) labels."""
        ids, labels = filled([row[1:] for row in rows])
        images = [number for number, *_ in rows if number is not None]
        out = model(
            input_ids=ids,
            pixel_values=self._pixels[images].flatten(0, 1),
            image_grid_thw=self._grid.repeat(len(images), 1),
            mm_token_type_ids=(ids == _IMAGE).long(),
            use_cache=False,
        )
        return out.logits, labels
