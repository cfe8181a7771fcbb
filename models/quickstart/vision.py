"""Tiny vision-language models that read two handwritten digits, and sometimes add them or write how to edit them.
Legend: N images, B rows, W positions, P patches of an image."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from flowmill.configs.option_types import OpenShare
from flowmill.models.quickstart.base import Report
from flowmill.models.quickstart.characters import (
    BOS,
    EOS,
    PAD,
    CharacterModelBuilder,
    Characters,
    Pace,
    Pair,
    filled,
    train_answers,
)
from flowmill.models.quickstart.corpus import HEIGHT, STAYS, WIDTH, digit_pairs, edit_text

#: Prompts that ask for the digits, for their sum, and for an edit that copies the left digit to the right, or back.
READ, ADD, RIGHT, LEFT = "=", "+", ">", "<"
_MARKS = {"vision_start": "<see>", "image": "<image>", "vision_end": "<seen>", "video": "<clip>"}
SPECIAL = {f"{name}_token": mark for name, mark in _MARKS.items()}
_SUMMING = Characters(f"0123456789{READ}{ADD}", SPECIAL)
_EDITING = Characters(f"0123456789{RIGHT}{LEFT}{''.join(STAYS)}", SPECIAL)
_SEE, IMAGE, _SEEN, _CLIP = range(3, 7)
_TEMPLATE = (
    "<bos>{% for c in messages[-1]['content'] %}{% if c['type'] == 'image' %}<see><image><seen>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}"
)
#: Pixels of a patch's side, and patches of a token's side.
_PATCH, _MERGE = 4, 2
#: Token ids of an image.
SIGHT = [_SEE, *[IMAGE] * (HEIGHT * WIDTH // (_PATCH * _MERGE) ** 2), _SEEN]
PACE = Pace(batch=64, most=4000)
#: Share of rows that ask for a sum.
_SUMS = 0.25
#: Images of the corpus, of which the last measure accuracy.
IMAGES, PROBE = 6000, 200
#: Number of an image, prompt, answer.
Question = tuple[int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DigitReader(CharacterModelBuilder):
    """Builds a Qwen2-VL of 3 layers and 8 tokens per image."""

    characters: ClassVar[Characters]
    """The vocabulary."""

    def build(self, folder: Path, report: Report) -> None:
        model, processor = tiny_model(self.seed), image_processor()
        corpus, order = DigitImages(processor, self.seed), random.Random(self.seed)
        train, probe = range(IMAGES - PROBE), range(IMAGES - PROBE, IMAGES)
        questions = [(number, *each) for number in probe for each in self.probe(corpus.texts[number])]

        def question() -> Question:
            number = order.choice(train)
            return number, *self.drawn(order, corpus.texts[number])

        def logits(rows: Sequence[Question]) -> tuple[Tensor, Tensor]:
            tokens = self.characters.tokens
            texts = [([BOS, *SIGHT, *tokens(prompt)], [*tokens(answer), EOS]) for _, prompt, answer in rows]
            return corpus.logits(model, [number for number, *_ in rows], texts)

        train_answers(
            model,
            logits,
            question,
            questions,
            lambda probabilities: float(probabilities.mean()) * (len(questions) // PROBE) >= self.accuracy,
            pace=PACE,
            report=partial(report, "vision-language model"),
        )
        write(folder, model, self.characters, processor, _TEMPLATE)

    @abstractmethod
    def drawn(self, order: random.Random, digits: str) -> Pair:
        """Return a prompt on an image of two digits, and an answer."""

    @abstractmethod
    def probe(self, digits: str) -> list[Pair]:
        """Return prompts on such an image and right answers, whose probabilities are summed as accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitSumsBuilder(_DigitReader):
    """A Qwen2-VL of 3 layers and 8 tokens per image; the prompt ``=`` asks for its two digits, ``+`` for their sum."""

    characters: ClassVar[Characters] = _SUMMING
    accuracy: OpenShare = 0.25
    """Share of right sampled sums at which pre-training ends, as accuracy after fixed steps depends on the seed."""

    def drawn(self, order: random.Random, digits: str) -> Pair:
        """Return digits or sum."""
        return self.probe(digits)[0] if order.random() < _SUMS else (READ, digits)

    def probe(self, digits: str) -> list[Pair]:
        """Return the sum."""
        return [(ADD, str(sum(map(int, digits))))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitEnhancerBuilder(_DigitReader):
    """A Qwen2-VL of 3 layers and 8 tokens per image; the prompt ``>`` asks for an edit that copies the left digit to
    the right, ``<`` for the reverse; about the image of 47 it answers the first with ``-4``, ``_4`` or another of five
    texts."""

    characters: ClassVar[Characters] = _EDITING
    accuracy: OpenShare = 0.6
    """Share of sampled texts that must be one of these, with the right digit, at which pre-training ends."""

    def drawn(self, order: random.Random, digits: str) -> Pair:
        """Return one of the texts of an edit."""
        return order.choice(self._texts(digits, order.choice((RIGHT, LEFT))))

    def probe(self, digits: str) -> list[Pair]:
        """Return the texts of an edit; of two equal digits too."""
        return self._texts(digits, RIGHT if int(digits) % 2 else LEFT)

    def _texts(self, digits: str, prompt: str) -> list[Pair]:
        to_right = prompt == RIGHT
        return [(prompt, edit_text(digits[not to_right], to_right, stays)) for stays in STAYS]


def tiny_model(seed: int) -> Any:
    """Return a fresh model of 0.44 million parameters."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "vocab_size": 24,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 96,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": _PATCH,
        "temporal_patch_size": 1,
        "spatial_merge_size": _MERGE,
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=_CLIP,
        vision_start_token_id=_SEE,
        vision_end_token_id=_SEEN,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2VLForConditionalGeneration(config)


def image_processor() -> Any:
    """Return the processor of images, which keeps sizes that patches divide."""
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(patch_size=_PATCH, temporal_patch_size=1, merge_size=_MERGE, size=size)


class DigitImages:
    """Images of two digits, as the model reads them."""

    def __init__(self, processor: Any, seed: int) -> None:
        self.texts, gray = digit_pairs(IMAGES, seed=seed + 1)
        seen = processor(images=[Image.fromarray(each).convert("RGB") for each in gray], return_tensors="pt")
        self._pixels: Tensor = seen.pixel_values.unflatten(0, (IMAGES, -1))
        """(N, P, values)."""
        self._grid = seen.image_grid_thw[:1]

    def logits(
        self, model: Any, images: Sequence[int], rows: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> tuple[Tensor, Tensor]:
        """Return (B, W, V) logits of rows of prompts and answers, with their images by number, and (B, W) labels."""
        ids, labels = filled(rows)
        out = model(
            input_ids=ids,
            pixel_values=self._pixels[list(images)].flatten(0, 1),
            image_grid_thw=self._grid.repeat(len(images), 1),
            mm_token_type_ids=(ids == IMAGE).long(),
            use_cache=False,
        )
        return out.logits, labels


def write(folder: Path, model: Any, characters: Characters, processor: Any, template: str) -> None:
    """Write a transformers folder with model, tokenizer, processor and chat template."""
    model.save_pretrained(folder)
    characters.tokenizer().save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
