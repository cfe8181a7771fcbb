"""Tiny language models of characters, pre-trained at build time on pairs of a prompt and an answer.
Legend: B rows, W positions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowmill.configs.option_types import OpenShare
from flowmill.models.quickstart.base import Report

PAD, BOS, EOS = 0, 1, 2
_BATCH, _WARMUP, _LEARNING_RATE = 128, 50, 2e-3
#: Steps between checks for the end of pre-training, and the first step with a check.
_EVERY, _FROM = 10, 150
_MOST_STEPS = 2000
#: A prompt and an answer to it.
Pair = tuple[str, str]


def llama(seed: int, *, vocabulary: int, positions: int, layers: int = 3) -> Any:
    """Return a fresh model, of 0.28 million parameters with 3 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def filled(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """Return (B, W) ids of prompts and answers, padded on the right, and labels, -100 where nothing is predicted."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.full((len(rows), width), PAD), torch.full((len(rows), width), -100)
    for number, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[number, :end] = torch.tensor([*prompt, *answer])
        labels[number, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of answers: logits (B, W, V), labels (B, W) as of ``filled``."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def train_until(
    model: Any,
    loss: Callable[[], Tensor],
    good: Callable[[int], bool],
    *,
    most: int,
    report: Callable[[int, int], None],
    max_norm: float | None = None,
) -> None:
    """Train a model in place until it is good enough.

    Args:
        loss: returns the loss of the next batch.
        good: whether the model is good enough after a step.
        most: maximum number of steps.
        report: called with (done, total) after each step.
        max_norm: gradients are clipped to this norm.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    for step in range(1, most + 1):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, step / _WARMUP)
        value = loss()
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        report(step, most)
        if good(step):
            return


def answer_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (B,) probabilities of answers, the products over their tokens."""
    log_p, targets = torch.log_softmax(logits[:, :-1].float(), -1), labels[:, 1:]
    chosen = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets >= 0, chosen, 0.0).sum(-1).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class CharacterModelBuilder:
    """Base class of builders that train until answers reach the requested quality."""

    accuracy: OpenShare
    """Share of right sampled answers at which pre-training ends, as accuracy after fixed steps depends on the seed."""
    seed: int = 0
    """Seed of weights and order."""

    latents: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class Characters:
    """The vocabulary of a character model: a token per character, after those for padding, beginning and end."""

    characters: str
    special: Mapping[str, str] = field(default_factory=dict)
    """Further special tokens, by attribute of the tokenizer; they come before the characters."""

    def tokenizer(self) -> Any:
        """Return a tokenizer of transformers; texts begin with <bos>."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
        vocabulary |= {token: number for number, token in enumerate((*self.special.values(), *self.characters), 3)}
        backend: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token="<pad>",
            eos_token="<eos>",
            bos_token="<bos>",
            clean_up_tokenization_spaces=False,
            # An empty set would be written to the tokenizer's file, and change its digest.
            **({"extra_special_tokens": dict(self.special)} if self.special else {}),
        )

    def batch(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Return (B, W) ids, padded on the right, and labels, -100 for positions that are not predicted."""
        return filled([([BOS, *self.tokens(prompt)], [*self.tokens(answer), EOS]) for prompt, answer in pairs])

    @torch.no_grad()
    def probabilities(self, model: Any, pairs: Sequence[Pair]) -> Tensor:
        """Return (B,) probabilities of the answers of pairs, the products over their tokens."""
        ids, labels = self.batch(pairs)
        return answer_probabilities(model(input_ids=ids).logits, labels)

    def pretrain(
        self, model: Any, draw: Callable[[random.Random], Pair], *, done: Callable[[], bool], seed: int, report: Report
    ) -> None:
        """Train on pairs until ``done``, in place. ``done``: whether the model is good enough; the number of steps
        depends on the seed; ``report``: called with (activity, done, total) after each step."""
        order = random.Random(seed)

        def loss() -> Tensor:
            ids, labels = self.batch([draw(order) for _ in range(_BATCH)])
            return answer_loss(model(input_ids=ids).logits, labels)

        def good(step: int) -> bool:
            return step >= _FROM and step % _EVERY == 0 and done()

        train_until(model, loss, good, most=_MOST_STEPS, report=partial(report, "language model"))

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text's characters."""
        return [self.characters.index(character) + 3 + len(self.special) for character in text]
