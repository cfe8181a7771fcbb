"""Likelihoods of judgments of pairs, as functions of the difference of two scores. Pure.

A judgment is 1 where the first of a pair is preferred, 0 where the second is, and 1/2 for a tie.

Legend: R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(difference: Tensor, preferred: Tensor) -> Tensor:
    """Return (R,) negative log-likelihoods of judgments under P(first) = sigmoid(s1 - s2) (Bradley and Terry 1952).

    A tie counts as half a win of each, as in the rating of chess players by Elo and of models in Chatbot Arena
    (arXiv 2403.04132).

    Args:
        difference: (R,) score of the first less that of the second.
        preferred: (R,) judgments.
    """
    return -(preferred * logsigmoid(difference) + (1 - preferred) * logsigmoid(-difference))


def davidson(difference: Tensor, preferred: Tensor, log_tie: Tensor) -> Tensor:
    """Return (R,) negative log-likelihoods of judgments under Davidson's model of ties (1970).

    With strengths p = exp(s), P(first) = p1 / (p1 + p2 + nu sqrt(p1 p2)) and P(tie) = nu sqrt(p1 p2) / (the same).

    Args:
        difference: (R,) score of the first less that of the second.
        preferred: (R,) judgments.
        log_tie: (), log(nu), learned with the scores.
    """
    outcomes = _outcomes(difference, log_tie)
    return -outcomes.gather(1, (2 - 2 * preferred).round().long()[:, None]).squeeze(1)


def expected_preference(difference: Tensor, log_tie: Tensor | None = None) -> Tensor:
    """Return (R,) expected judgments, P(first) + P(tie) / 2.

    Args:
        difference: (R,) score of the first less that of the second.
        log_tie: () of Davidson's model; None: Bradley and Terry's.
    """
    if log_tie is None:
        return difference.sigmoid()
    chances = _outcomes(difference, log_tie).exp()
    return chances[:, 0] + chances[:, 1] / 2


def _outcomes(difference: Tensor, log_tie: Tensor) -> Tensor:
    """Return (R, 3) log-probabilities of first, tie and second, all divided by sqrt(p1 p2)."""
    return torch.stack([difference / 2, log_tie.expand_as(difference), -difference / 2], 1).log_softmax(1)
