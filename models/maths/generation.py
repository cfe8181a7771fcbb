"""The one generation loop of causal language models: a KV cache, one batch of fixed size, a separate draw per token.
Legend: B rows, P width of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from flowmill.models.devices import moved
from flowmill.models.maths.tokens import draw

Finish = Literal["eos", "length", "stop"]


class Forward(Protocol):
    """The interface of models in generation."""

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return logits of the next token, (B, V), and the cache with the new tokens.

        Args:
            ids: (B, L) int64 new tokens.
            mask: (B, all tokens so far) int64, 0 for padding.
            positions: (B, L) int64.
            cache: the cache from the previous call; None at first.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """How tokens are drawn and where a completion ends."""

    max_new: int
    temperature: float
    """Divides logits."""
    eos: frozenset[int]
    """Tokens that end a completion, of which they are part."""
    stopped: Callable[[Sequence[int]], bool] = lambda ids: False
    """Whether a completion (token ids) ends with a stop text."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens at which ``stopped`` always stops, for engines that end texts by themselves."""


@dataclass(slots=True)
class Completion:
    """A sampled completion of a prompt."""

    ids: list[int] = field(default_factory=list)
    """Tokens, with the end token if there is one."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probs during sampling; those of a forward over the whole row differ by rounding."""
    finish: Finish = "length"


@torch.no_grad()
def generate(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    sampling: TokenSampling,
    *,
    width: int,
    uniforms: Callable[[int], Tensor] | None,
    device: torch.device,
    starts: Sequence[int] | None = None,
) -> list[Completion]:
    """Complete B prompts; rows are independent, except for rounding where the shape of the batch changes.

    Finished rows stay in the batch, so that its shape stays the same.

    Args:
        prompts: token ids, at least one and at most ``width`` each.
        width: P; shorter prompts are padded on the left.
        uniforms: position -> (B,) float64 in [0, 1); None: the likeliest tokens.
        starts: position of the first new token of each row; None: the number of tokens of its prompt.
    """
    pads = [width - len(prompt) for prompt in prompts]
    ids = moved(torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]), device)
    mask = moved(torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]), device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    follow = positions[:, -1:] + 1 if starts is None else moved(torch.tensor(starts)[:, None], device)
    completions, running, cache = [Completion() for _ in prompts], [True] * len(prompts), None
    for position in range(sampling.max_new):
        logits, cache = forward(ids, mask, positions, cache)
        drawn = None if uniforms is None else uniforms(position)
        tokens, log_probs = draw(logits, drawn, sampling.temperature)
        running = _note(completions, running, tokens.tolist(), log_probs.tolist(), sampling)
        if not any(running):
            break
        ids, positions, follow = tokens[:, None], follow, follow + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
    return completions


def reading_once(forward: Forward, distinct: int) -> Forward:
    """Return a forward that processes each distinct prompt once and copies its cache to all rows with that prompt.

    Prompts are processed in a batch of fixed size, padded with copies, so that its shape does not depend on its
    contents. A batch with more prompts, or one that would be no smaller, is processed with all its rows.

    ``distinct``: the size of that batch.
    """

    def read(ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        if cache is not None or distinct >= len(ids):
            return forward(ids, mask, positions, cache)
        # Ids of padding are arbitrary.
        texts = [tuple(row) for row in torch.where(mask.bool(), ids, -1).tolist()]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        if len(numbers) > distinct:
            return forward(ids, mask, positions, None)
        places = [numbers[text] for text in texts]
        chosen = [places.index(number) for number in range(len(numbers))]
        first = torch.tensor([*chosen, *[chosen[-1]] * (distinct - len(chosen))], device=ids.device)
        logits, cache = forward(ids[first], mask[first], positions[first], None)
        rows = torch.tensor(places, device=ids.device)
        cache.reorder_cache(rows)
        return logits[rows], cache

    return read


def _note(
    completions: Sequence[Completion],
    running: Sequence[bool],
    tokens: Sequence[int],
    log_probs: Sequence[float],
    sampling: TokenSampling,
) -> list[bool]:
    """Add a token to every unfinished completion; return which of them are still unfinished."""
    still = []
    for row, goes_on, token, log_prob in zip(completions, running, tokens, log_probs, strict=True):
        if goes_on:
            row.ids.append(token)
            row.log_probs.append(log_prob)
            if token in sampling.eos:
                row.finish, goes_on = "eos", False
            elif sampling.stopped(row.ids):
                row.finish, goes_on = "stop", False
        still.append(goes_on)
    return still
