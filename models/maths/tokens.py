"""Log-probs of tokens from logits, and how a token is drawn. Pure.

Legend: B rows, W positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from models.devices import moved
from models.maths.precision import widened

if TYPE_CHECKING:
    from torch import Tensor

#: Widths of training batches are multiples of this: a row's log-probs are then the same bits whatever its neighbors.
WIDTH = 16
#: Wider ones are the same bits at multiples of this.
_STEP = 4


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return log p(ids[t] | ids[<t]), (B, W) float32: position t from the logits at t - 1, position 0 is 0.

    Args:
        logits: (B, W, V).
        ids: (B, W) int64.
        temperature: divides logits.
    """
    return _chosen(torch.log_softmax(logits[:, :-1].float() / temperature, -1), ids)


def log_probs_and_entropy(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return ``token_log_probs``, and of the same softmax the entropy each token was drawn with, without gradient.

    Both are (B, W) float32; position 0 is 0.
    """
    log_p = torch.log_softmax(logits[:, :-1].float() / temperature, -1)
    known = log_p.detach()
    return _chosen(log_p, ids), torch.nn.functional.pad(-(known.exp() * known).sum(-1), (1, 0))


def _chosen(log_p: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(log_p.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))


def draw(logits: Tensor, uniforms: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Return a token of each row, (B,) int64, and its log-prob, (B,) float32: by inverse CDF, see ``widened``.

    Args:
        logits: (B, V).
        uniforms: (B,) float64 in [0, 1), one per row; None: the likeliest token.
        temperature: divides logits.
    """
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    if uniforms is None:
        chosen = log_p.argmax(-1)
    else:
        bounds = widened(log_p).exp().cumsum(-1)
        points = (moved(uniforms.to(bounds.dtype), bounds.device) * bounds[:, -1])[:, None]
        chosen = torch.searchsorted(bounds, points, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return chosen, log_p.gather(-1, chosen[:, None])[:, 0]


def padded_width(length: int, most: int | None = None) -> int:
    """Return the width of a batch whose longest row has so many tokens.

    Args:
        length: of that row.
        most: tokens of a run's longest row, where that is known: no batch is wider than it needs. Where that is below
            ``WIDTH``, it is the width of all batches.
    """
    width = -(-length // WIDTH) * WIDTH
    return width if most is None or length > most else min(width, -(-most // _STEP) * _STEP)
