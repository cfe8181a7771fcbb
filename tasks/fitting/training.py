"""Training of the head and adapters of a reward. The same judgments, settings and threads give the same bits.

Legend: N media with their prompts, P prompts, K outputs of the head, R judgments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from flowmill.configs.errors import RewardError
from flowmill.models.maths.preferences import bradley_terry, davidson
from flowmill.tasks.fitting.checkpoints import Curve, FitCheckpoints

if TYPE_CHECKING:
    from torch import Tensor

    from flowmill.configs.reward_fit import FitConfig
    from flowmill.models.rewards.backbones import RewardBackbone

#: Points of the curve, and media per call, of inputs in memory.
_PASSES, _POINTS, _CHUNK = 10, 20, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedInputs:
    """The media, and the prompts for which they are scored."""

    of: Callable[[Tensor], Tensor]
    """Returns the (B, ...) inputs of the head for (B,) rows of the media."""
    computed: int | None
    """Rows of one such call, which calls the backbone; None: inputs are in memory."""
    prompts: Tensor
    """(N,) rows of ``shares``."""
    shares: Tensor
    """(P, K) shares of the outputs of the head in the score."""

    def scores(self, layers: nn.Sequential, rows: Tensor) -> Tensor:
        """Return the scores of some rows of the media."""
        scores: Tensor = layers(self.of(rows)) * self.shares[self.prompts[rows]]
        return scores.sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Judgments as tensors."""

    items: Tensor
    """(R, 2) or (R, 1) rows of inputs."""
    values: Tensor
    """(R,) float32 judgments, or ratings."""

    @property
    def rated(self) -> bool:
        """Whether they are ratings."""
        return self.items.shape[1] == 1

    def difference(self, scores: Tensor) -> Tensor:
        """Return (R,) score of the first less that of the second."""
        return scores[self.items[:, 0]] - scores[self.items[:, 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A trained head, with the adapters of its backbone."""

    layers: nn.Sequential
    """The head; its scores are logits with mean 0 over the training media, or ratings."""
    log_tie: Tensor | None
    """() log(nu) of Davidson's model."""
    curve: Curve
    """Mean losses of all judgments by update."""


def train_head(
    backbone: RewardBackbone,
    inputs: JudgedInputs,
    judged: Examples,
    heldout: Examples,
    config: FitConfig,
    *,
    adapters: Mapping[str, nn.Parameter],
    checkpoints: FitCheckpoints,
) -> Fit:
    """Return a head trained on judgments, from the last checkpoint on; held-out ones are measured only.

    Preferences: mean negative log-likelihood. Ratings: mean squared error, in standard deviations.

    Args:
        backbone: it makes the head.
        inputs: inputs of the head.
        judged: the judgments to train on.
        heldout: the others.
        config: optimizer, ties and seed.
        adapters: trained parameters of the backbone, by name.
        checkpoints: those of this fit.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(config.seed)
        layers = backbone.head(inputs.of(judged.items[0, :1])).to(inputs.shares.device)
    tie = nn.Parameter(inputs.shares.new_zeros(())) if config.ties == "davidson" and not judged.rated else None
    mean, deviation = judged.values.mean(), judged.values.std().clamp_min(1e-6)
    losses = partial(_losses, mean=mean, deviation=deviation, tie=tie)
    parameters = {**adapters, **dict(layers.named_parameters()), **({} if tie is None else {"tie": tie})}
    optimizer = torch.optim.AdamW(parameters.values(), config.learning_rate, weight_decay=config.weight_decay)
    draw = torch.Generator().manual_seed(config.seed)
    updates = config.updates or math.ceil(_PASSES * len(judged.values) / config.batch_size)
    points = math.ceil(updates / (_POINTS if inputs.computed is None else _POINTS // 4))
    done, curve = checkpoints.resume(parameters, optimizer)
    for update in range(updates + 1):
        chosen = torch.randint(len(judged.values), (config.batch_size,), generator=draw).to(judged.items.device)
        if update < done:
            continue
        if update % points == 0 or update == updates:
            scores, sides = scores_of(layers, inputs), {"train": judged, "heldout": heldout}
            point = {name: losses(rows, scores).mean().item() for name, rows in sides.items()}
            curve.append({"update": update, **point})
            if not scores.isfinite().all():
                raise RewardError(
                    f"After {update} updates scores are not finite. Lower 'learning_rate' ({config.learning_rate:g})."
                )
        if update < updates:
            optimizer.zero_grad()
            for part in chosen.split(inputs.computed // 2 if inputs.computed else len(chosen)):
                used, places = judged.items[part].unique(return_inverse=True)
                batch = Examples(items=places, values=judged.values[part])
                (losses(batch, inputs.scores(layers, used)).sum() / len(chosen)).backward()
            optimizer.step()
            checkpoints.take(update + 1, parameters, optimizer, curve)
    level = scores_of(layers, inputs)[judged.items.unique()].mean()
    _rescale(layers, *((deviation, mean) if judged.rated else (torch.ones_like(level), -level)))
    return Fit(layers=layers, log_tie=None if tie is None else tie.detach(), curve=curve)


def _losses(rows: Examples, scores: Tensor, *, mean: Tensor, deviation: Tensor, tie: Tensor | None) -> Tensor:
    """Return (R,) losses of judgments from the scores of their media; mean and deviation are those of ratings."""
    if rows.rated:
        return (scores[rows.items[:, 0]] - (rows.values - mean) / deviation) ** 2
    difference = rows.difference(scores)
    return bradley_terry(difference, rows.values) if tie is None else davidson(difference, rows.values, tie)


@torch.no_grad()
def scores_of(layers: nn.Sequential, inputs: JudgedInputs) -> Tensor:
    """Return (N,) scores, without a gradient."""
    rows = torch.arange(len(inputs.prompts), device=inputs.prompts.device)
    return torch.cat([inputs.scores(layers, each) for each in rows.split(inputs.computed or _CHUNK)])


@torch.no_grad()
def _rescale(layers: nn.Sequential, factor: Tensor, shift: Tensor) -> None:
    """Let the score be factor * score + shift; the first output is part of every score."""
    last = layers[-1]
    assert isinstance(last, nn.Linear)
    last.weight.mul_(factor)
    last.bias.mul_(factor)[0].add_(shift)
