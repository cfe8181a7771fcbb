"""A tiny language model that adds two numbers, pre-trained on the spot until it is right now and then.

Legend: B rows, W positions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from models.quickstart.pretrain import Report

if TYPE_CHECKING:
    from torch import Tensor

_CHARACTERS = "0123456789+="
_PAD, _BOS, _EOS = 0, 1, 2
_BATCH, _WARMUP, _LEARNING_RATE = 128, 50, 2e-3
#: Sums whose accuracy is asked, how often, and from which step on.
_PROBE, _EVERY, _FROM = 300, 10, 150
_MOST_STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditionBuilder:
    """A Llama of 3 layers and 16 tokens; the prompt is ``12+34=``, the completion the sum and an end."""

    accuracy: float = 0.15
    """Pre-training ends when so many of sampled answers are right: a number of steps gives another model by seed."""
    seed: int = 0
    """Seed of weights and order."""
    heldout: int = 500
    """Sums below 100 + 100 that are never trained on."""

    latents: ClassVar[None] = None
    """It has none."""

    def __post_init__(self) -> None:
        """Check the accuracy.

        Raises:
            ValueError: it is no share that can be reached.
        """
        if not 0 < self.accuracy < 1:
            raise ValueError(f"accuracy is {self.accuracy}; it must lie between 0 and 1.")

    def build(self, folder: Path, report: Report) -> None:
        """Write a transformers folder with model and tokenizer."""
        model, tokenizer = tiny_model(self.seed), character_tokenizer()
        pretrain(model, sums(self.seed, self.heldout)[0], self.accuracy, self.seed, report)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def sums(seed: int, heldout: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return pairs of numbers below 100 to train on, and others that are held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    return pairs[heldout:], pairs[:heldout]


def tiny_model(seed: int, *, layers: int = 3) -> Any:
    """Return a fresh model, of 0.28 million parameters with 3 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=_PAD,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def character_tokenizer() -> Any:
    """Return a tokenizer with a token per character; texts begin with <bos>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": _PAD, "<bos>": _BOS, "<eos>": _EOS}
    vocabulary |= {character: number for number, character in enumerate(_CHARACTERS, 3)}
    made: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", _BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )


def pretrain(model: Any, pairs: Sequence[tuple[int, int]], accuracy: float, seed: int, report: Report) -> None:
    """Train until sampled answers are right so often, in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    order, probe = random.Random(seed), pairs[:_PROBE]
    for step in range(1, _MOST_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, step / _WARMUP)
        ids, labels = _batch([pairs[order.randrange(len(pairs))] for _ in range(_BATCH)])
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report("language model", step, _MOST_STEPS)
        if step >= _FROM and step % _EVERY == 0 and _sampled_accuracy(model, probe) >= accuracy:
            return


def _tokens(text: str) -> list[int]:
    return [_CHARACTERS.index(character) + 3 for character in text]


def _batch(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return (B, W) ids, padded on the right, and labels, -100 for what is not to be predicted."""
    rows = [([_BOS, *_tokens(f"{a}+{b}=")], [*_tokens(str(a + b)), _EOS]) for a, b in pairs]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), _PAD)
    labels = torch.full((len(rows), width), -100)
    for number, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[number, :end] = torch.tensor([*prompt, *answer])
        labels[number, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def _sampled_accuracy(model: Any, pairs: Sequence[tuple[int, int]]) -> float:
    """Return how likely sampled answers are right, mean over pairs: the product of the right tokens' probabilities."""
    ids, labels = _batch(pairs)
    log_p = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
    wanted = labels[:, 1:]
    chosen = log_p.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return float(torch.where(wanted >= 0, chosen, 0.0).sum(-1).exp().mean())
