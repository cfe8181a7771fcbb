"""Log-probs of tokens from logits, and sampling of tokens. Pure.
Legend: B rows, W positions, V vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowmill.models.devices import moved, widened

#: Widths of training batches are multiples of this: a row's log-probs are then bitwise independent of its neighbors.
WIDTH = 16
#: For wider batches multiples of this suffice.
_STEP = 4


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return log p(ids[t] | ids[<t]), (B, W) float32: position t from the logits at t - 1, position 0 is 0.

    Args:
        logits: (B, W, V), or without those after the last token, which are not used.
        ids: (B, W) int64.
        temperature: divides logits.
    """
    return _chosen(_log_probs(logits, ids, temperature), ids)


def log_probs_and_entropy(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return ``token_log_probs``, and the entropy of each token's distribution, without gradient. Both are (B, W)
    float32; position 0 is 0."""
    log_p = _log_probs(logits, ids, temperature)
    detached = log_p.detach()
    return _chosen(log_p, ids), torch.nn.functional.pad(-(detached.exp() * detached).sum(-1), (1, 0))


def _log_probs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits[:, : ids.shape[1] - 1].float() / temperature, -1)


def _chosen(log_p: Tensor, ids: Tensor) -> Tensor:
    # Ids of images are negative; their log-probs are never used.
    return torch.nn.functional.pad(log_p.gather(-1, ids[:, 1:, None].clamp(min=0))[..., 0], (1, 0))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Determines the widths of batches of whole rows."""

    most: int | None = None
    """Tokens of a run's longest row, if available; limits widths."""
    limit: int | None = None
    """The model's maximum tokens: beyond it positions may be missing, or keys rotated in another way."""

    def of(self, length: int) -> int:
        """Return the width of a batch whose longest row has ``length`` tokens. Where ``most`` is below ``WIDTH``, or
        rounded up beyond ``limit``, it is the width of all batches."""
        width, most = _rounded(length, WIDTH), self.most
        limit = math.inf if self.limit is None else self.limit
        if most is None or length > most:
            return int(max(length, min(width, limit)))
        rounded = _rounded(most, _STEP)
        return min(width, rounded) if rounded <= limit else most


def _rounded(length: int, step: int) -> int:
    return -(-length // step) * step
