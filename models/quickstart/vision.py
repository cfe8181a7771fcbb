"""A tiny vision-language model that reads two handwritten digits, and sometimes adds them.
Legend: N images, B rows, W positions, P patches of an image."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from configs.option_types import OpenShare
from models.quickstart.characters import (
    BOS,
    EOS,
    PAD,
    CharacterModelBuilder,
    Characters,
    answer_loss,
    answer_probabilities,
    filled,
    train_until,
)
from models.quickstart.corpus import HEIGHT, WIDTH, digit_pairs
from models.quickstart.pretrain import Report

if TYPE_CHECKING:
    from torch import Tensor

#: Prompts that ask for the digits, and for their sum.
READ, ADD = "=", "+"
_CHARACTERS = Characters(
    f"0123456789{READ}{ADD}",
    {"vision_start_token": "<see>", "image_token": "<image>", "vision_end_token": "<seen>", "video_token": "<clip>"},
)
_SEE, _IMAGE, _SEEN, _CLIP = range(3, 7)
_TEMPLATE = (
    "<bos>{% for c in messages[-1]['content'] %}{% if c['type'] == 'image' %}<see><image><seen>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}"
)
#: Pixels of a patch's side, patches of a token's side, and tokens of an image.
_PATCH, _MERGE = 4, 2
_TOKENS = HEIGHT * WIDTH // (_PATCH * _MERGE) ** 2
_BATCH = 64
#: Share of rows that ask for a sum; steps between checks for the end, and the most steps.
_SUMS, _EVERY, _MOST_STEPS = 0.25, 20, 4000
#: Images of the corpus, of which the last measure accuracy.
_IMAGES, _PROBE = 6000, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitSumsBuilder(CharacterModelBuilder):
    """A Qwen2-VL of 3 layers and 8 tokens per image; the prompt ``=`` asks for its two digits, ``+`` for their sum."""

    accuracy: OpenShare = 0.25
    """Share of right sampled sums at which pre-training ends, as accuracy after fixed steps depends on the seed."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model, tokenizer and processor."""
        model, processor = tiny_model(self.seed), image_processor()
        self._pretrain(model, _Corpus(processor, self.seed), report)
        model.save_pretrained(folder)
        _CHARACTERS.tokenizer().save_pretrained(folder)
        processor.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(_TEMPLATE)

    def _pretrain(self, model: Any, corpus: _Corpus, report: Report) -> None:
        order, known = random.Random(self.seed), range(_IMAGES - _PROBE)

        def loss() -> Tensor:
            asked = [(order.choice(known), ADD if order.random() < _SUMS else READ) for _ in range(_BATCH)]
            return answer_loss(*corpus.logits(model, asked))

        def good(step: int) -> bool:
            return step % _EVERY == 0 and corpus.accuracy(model) >= self.accuracy

        train_until(model, loss, good, most=_MOST_STEPS, report=partial(report, "vision-language model"), max_norm=1.0)


def tiny_model(seed: int) -> Any:
    """Return a fresh model of about 0.44 million parameters."""
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
        image_token_id=_IMAGE,
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


class _Corpus:
    """Images of two digits, and questions about them."""

    def __init__(self, processor: Any, seed: int) -> None:
        self._texts, gray = digit_pairs(_IMAGES, seed=seed + 1)
        seen = processor(images=[Image.fromarray(each).convert("RGB") for each in gray], return_tensors="pt")
        self._pixels: Tensor = seen.pixel_values.unflatten(0, (_IMAGES, -1))
        """(N, P, values)."""
        self._grid = seen.image_grid_thw[:1]

    def logits(self, model: Any, asked: Sequence[tuple[int, str]]) -> tuple[Tensor, Tensor]:
        """Return (B, W, V) logits and (B, W) labels of images by number, each with its prompt."""
        rows = [
            ([BOS, _SEE, *[_IMAGE] * _TOKENS, _SEEN, *_CHARACTERS.tokens(prompt)], self._answer(number, prompt))
            for number, prompt in asked
        ]
        ids, labels = filled(rows)
        out = model(
            input_ids=ids,
            pixel_values=self._pixels[[number for number, _ in asked]].flatten(0, 1),
            image_grid_thw=self._grid.repeat(len(asked), 1),
            mm_token_type_ids=(ids == _IMAGE).long(),
            use_cache=False,
        )
        return out.logits, labels

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """Return the mean probability of right sums of images that are not trained on."""
        asked = [(number, ADD) for number in range(_IMAGES - _PROBE, _IMAGES)]
        return float(answer_probabilities(*self.logits(model, asked)).mean())

    def _answer(self, number: int, prompt: str) -> list[int]:
        digits = self._texts[number]
        return [*_CHARACTERS.tokens(digits if prompt == READ else str(sum(map(int, digits)))), EOS]
