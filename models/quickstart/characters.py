"""Tiny language models of characters, pre-trained at build time on pairs of a prompt and an answer.
Legend: B rows, W positions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from flowmill.configs.option_types import OpenShare
from flowmill.models.quickstart.base import Report

PAD, BOS, EOS = 0, 1, 2
_WARMUP, _LEARNING_RATE = 50, 2e-3
R = TypeVar("R")
#: A prompt and an answer to it.
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Sizes of pre-training."""

    batch: int
    """Rows of a batch."""
    every: int = 20
    """Steps between checks for the end."""
    first: int = 0
    """First step with a check."""
    most: int
    """Maximum number of steps."""
    max_norm: float | None = 1.0
    """Gradients are clipped to this norm; None: they are not."""


_PACE = Pace(batch=128, every=10, first=150, most=2000, max_norm=None)


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


def text_logits(model: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """Return the (B, W, V) logits of rows of prompts and answers, and their (B, W) labels; see ``filled``."""
    ids, labels = filled(rows)
    return model(input_ids=ids).logits, labels


def train_answers(
    model: Any,
    logits: Callable[[Sequence[R]], tuple[Tensor, Tensor]],
    draw: Callable[[], R],
    probe: Sequence[R],
    enough: Callable[[Tensor], bool],
    *,
    pace: Pace,
    report: Callable[[int, int], None],
) -> None:
    """Train a model in place on the cross-entropy of answers, until it is good enough.

    Args:
        logits: returns (B, W, V) logits of rows, and (B, W) labels as of ``filled``.
        draw: returns the next row.
        probe: rows that quality is measured on.
        enough: whether the (B,) probabilities of their answers suffice.
        report: called with (done, total) after each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    for step in range(1, pace.most + 1):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, step / _WARMUP)
        of_tokens, labels = logits([draw() for _ in range(pace.batch)])
        predicted, targets = of_tokens[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(predicted, targets, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if pace.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), pace.max_norm)
        optimizer.step()
        report(step, pace.most)
        if step >= pace.first and step % pace.every == 0:
            with torch.no_grad():
                if enough(_probabilities(*logits(probe))):
                    return


def _probabilities(logits: Tensor, labels: Tensor) -> Tensor:
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

    def pretrain(
        self,
        model: Any,
        draw: Callable[[random.Random], Pair],
        probe: Sequence[Pair],
        enough: Callable[[Tensor], bool],
        *,
        seed: int,
        report: Report,
    ) -> None:
        """Train on pairs in place; see ``train_answers``. The number of steps depends on the seed. ``report``: called
        with (activity, done, total) after each step."""
        order = random.Random(seed)

        def logits(pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
            rows = [([BOS, *self.tokens(prompt)], [*self.tokens(answer), EOS]) for prompt, answer in pairs]
            return text_logits(model, rows)

        progress = partial(report, "language model")
        train_answers(model, logits, lambda: draw(order), probe, enough, pace=_PACE, report=progress)

    def tokens(self, text: str) -> list[int]:
        """Return the ids of a text's characters."""
        return [self.characters.index(character) + 3 + len(self.special) for character in text]
