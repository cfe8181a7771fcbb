"""The one generation loop of causal language models: a KV cache, one batch of fixed size, a draw of its own per token.

Legend: B rows, P width of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from models.devices import moved
from models.maths.tokens import draw

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["eos", "length", "stop"]


class Forward(Protocol):
    """What generation asks of a model."""

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return logits of the next token, (B, V), and the cache with the new tokens.

        Args:
            ids: (B, L) int64 new tokens.
            mask: (B, all tokens so far) int64, 0 for padding.
            positions: (B, L) int64.
            cache: what the call before returned; None at first.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn and where a completion ends."""

    max_new: int
    """Tokens at most."""
    temperature: float
    """Divides logits."""
    eos: frozenset[int]
    """Tokens that end a completion; the one that does is part of it."""
    stopped: Callable[[Sequence[int]], bool] = lambda ids: False
    """Whether a completion (token ids) ends in what stops it."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that ``stopped`` stops at whatever is before them, for engines that end texts by themselves."""


@dataclass(slots=True)
class Completion:
    """What was drawn for a prompt."""

    ids: list[int] = field(default_factory=list)
    """Tokens, the last of which may have ended it."""
    log_probs: list[float] = field(default_factory=list)
    """As they were drawn; a forward over the whole differs from them by rounding."""
    finish: Finish = "length"
    """Why it ended."""


@torch.no_grad()
def generate(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    width: int,
    uniforms: Callable[[int], Tensor] | None,
    device: torch.device,
) -> list[Completion]:
    """Complete B prompts; no row depends on another, but for rounding where the shape of the batch changes.

    Rows that have ended stay in the batch, so that its shape is the same for all of them.

    Args:
        forward: the model.
        prompts: token ids, at least one and at most ``width`` each.
        sampling: how tokens are drawn.
        width: P; shorter prompts are padded on the left.
        uniforms: position -> (B,) float64 in [0, 1); None: the likeliest tokens.
        device: where the model is.
    """
    pads = [width - len(prompt) for prompt in prompts]
    ids = moved(torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]), device)
    mask = moved(torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]), device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found, running, cache = [Completion() for _ in prompts], [True] * len(prompts), None
    for position in range(sampling.max_new):
        logits, cache = forward(ids, mask, positions, cache)
        drawn = None if uniforms is None else uniforms(position)
        tokens, log_probs = draw(logits, drawn, sampling.temperature)
        running = _note(found, running, tokens.tolist(), log_probs.tolist(), sampling)
        if not any(running):
            break
        ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
    return found


def reading_once(forward: Forward, distinct: int) -> Forward:
    """Return a forward that reads each prompt once for all rows of a batch that have it, and deals out its cache.

    Prompts are read in a batch of fixed size, filled up with copies, so that its shape does not follow from what is in
    it. A batch with more of them, and one that would be no smaller, is read row by row.

    Args:
        forward: the model, with a cache of transformers.
        distinct: that size.
    """

    def read(ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        if cache is not None or distinct >= len(ids):
            return forward(ids, mask, positions, cache)
        # Padding may hold anything.
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
    found: Sequence[Completion],
    running: Sequence[bool],
    tokens: Sequence[int],
    log_probs: Sequence[float],
    sampling: Sampling,
) -> list[bool]:
    """Add a token to every completion that has not ended; return which go on."""
    still = []
    for row, goes_on, token, log_prob in zip(found, running, tokens, log_probs, strict=True):
        if goes_on:
            row.ids.append(token)
            row.log_probs.append(log_prob)
            if token in sampling.eos:
                row.finish, goes_on = "eos", False
            elif sampling.stopped(row.ids):
                row.finish, goes_on = "stop", False
        still.append(goes_on)
    return still
