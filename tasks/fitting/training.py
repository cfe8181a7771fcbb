"""Training of the head and adapters of a reward, in the loop of policies.

The same judgments, settings and threads give the same bits.

Legend: N media with their prompts, P prompts, K outputs of the head, R judgments, B rows of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flowmill.configs.errors import DivergedError, RewardError
from flowmill.configs.schema import OptimizeSection
from flowmill.models.maths.preferences import bradley_terry, davidson
from flowmill.models.policies.trainable import Trainable
from flowmill.storage.artifacts.checkpoints import latest_checkpoint
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.algorithms.base import Batch, Models, Requirements, RowLoss
from flowmill.tasks.modalities.rows import Units, single_rows
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.checkpoints import Checkpoints
from flowmill.tasks.training.loop import Reading, TrainerState, run_updates
from flowmill.tasks.training.optimizers import make_optimizer
from flowmill.tasks.training.state import METRICS, read_state

if TYPE_CHECKING:
    from flowmill.configs.reward_fit import FitConfig
    from flowmill.models.rewards.backbones import RewardBackbone

Curve = list[dict[str, float]]
#: Points of the curve, and media per call, of inputs in memory.
_PASSES, _POINTS, _CHUNK = 10, 20, 256
#: A norm that clips no gradient.
_ANY_NORM = 1e38


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
    """A head in training, and the loss of judgments.

    Preferences: negative log-likelihood. Ratings: squared error, in standard deviations.
    """

    requires = Requirements()

    layers: nn.Sequential
    """The head; after training its scores are logits with mean 0 over the training media, or ratings."""
    inputs: JudgedInputs
    judged: Examples
    log_tie: nn.Parameter | None
    """() log(nu) of Davidson's model."""

    def loss(self, batch: Batch, models: Models) -> RowLoss:
        """Return the loss of each judgment."""
        rows = torch.tensor([row for row, _ in batch.keys], device=self.judged.items.device)
        used, places = self.judged.items[rows].unique(return_inverse=True)
        part = Examples(items=places, values=self.judged.values[rows])
        return RowLoss(loss=self.losses(part, self._scores(used)), metrics={})

    def losses(self, rows: Examples, scores: Tensor) -> Tensor:
        """Return (R,) losses of judgments from the scores of their media."""
        if rows.rated:
            deviation, mean = self.level
            return (scores[rows.items[:, 0]] - (rows.values - mean) / deviation) ** 2
        difference, tie = rows.difference(scores), self.log_tie
        return bradley_terry(difference, rows.values) if tie is None else davidson(difference, rows.values, tie)

    @property
    def level(self) -> tuple[Tensor, Tensor]:
        """Standard deviation and mean of the ratings to train on."""
        return self.judged.values.std().clamp_min(1e-6), self.judged.values.mean()

    def _scores(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.inputs.of(rows)) * self.inputs.shares[self.inputs.prompts[rows]]
        return scores.sum(1)

    @torch.no_grad()
    def scores(self) -> Tensor:
        """Return (N,) scores, without a gradient."""
        rows = torch.arange(len(self.inputs.prompts), device=self.inputs.prompts.device)
        return torch.cat([self._scores(each) for each in rows.split(self.inputs.computed or _CHUNK)])

    @torch.no_grad()
    def point(self, update: int, heldout: Examples) -> dict[str, float]:
        """Return the mean losses after some updates; raise DivergedError if scores are not finite."""
        scores, sides = self.scores(), {"train": self.judged, "heldout": heldout}
        if not scores.isfinite().all():
            raise DivergedError
        return {"update": update, **{name: self.losses(rows, scores).mean().item() for name, rows in sides.items()}}

    @torch.no_grad()
    def rescale(self) -> None:
        """Let scores be logits with mean 0, or ratings; the first output is part of every score."""
        level = self.scores()[self.judged.items.unique()].mean()
        factor, shift = self.level if self.judged.rated else (torch.ones_like(level), -level)
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(factor)
        last.bias.mul_(factor)[0].add_(shift)


def train_head(
    backbone: RewardBackbone,
    inputs: JudgedInputs,
    judged: Examples,
    heldout: Examples,
    config: FitConfig,
    *,
    adapters: Mapping[str, nn.Parameter],
    store: ArtifactStore,
    ref: ArtifactRef,
) -> tuple[Fit, Curve]:
    """Return a head trained on judgments, from the last checkpoint on, and its mean losses by update.

    Args:
        backbone: it makes the head.
        inputs: inputs of the head.
        judged: the judgments to train on.
        heldout: the others, which are measured only.
        config: optimizer, ties and seed.
        adapters: trained parameters of the backbone, by name.
        store: where checkpoints are committed.
        ref: the reward, which owns them.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(config.seed)
        layers = backbone.head(inputs.of(judged.items[0, :1])).to(inputs.shares.device)
    tie = nn.Parameter(inputs.shares.new_zeros(())) if config.ties == "davidson" and not judged.rated else None
    fit = Fit(layers=layers, inputs=inputs, judged=judged, log_tie=tie)
    rates = {"learning_rate": config.learning_rate, "weight_decay": config.weight_decay}
    section = OptimizeSection(**rates, max_grad_norm=_ANY_NORM)
    state = _state(layers, [*adapters.values(), *([] if tie is None else [tie])], section)
    updates = config.updates or math.ceil(_PASSES * len(judged.values) / config.batch_size)
    draw, size = torch.Generator().manual_seed(config.seed), (config.batch_size,)
    once = np.ones(len(judged.values), np.int64)
    plan = [single_rows(torch.randint(len(once), size, generator=draw).numpy(), once) for _ in range(updates)]
    points = math.ceil(updates / (_POINTS if inputs.computed is None else _POINTS // 4))

    def after(done: int) -> None:
        if done % points == 0 or done == updates:
            state.metrics[-1] |= fit.point(done, heldout)
        if config.checkpoint_every and done % config.checkpoint_every == 0:
            checkpoints.take(state, done)

    loop: dict[str, Any] = {"section": section, "ranks": Ranks(), "after_update": after}
    loop["micro_batch_size"] = inputs.computed // 2 if inputs.computed else config.batch_size
    reading = Reading(partial(_batch, inputs.shares.device))
    try:
        first, checkpoint = fit.point(0, heldout), latest_checkpoint(store, ref)
        if checkpoint is not None and (checkpoint[1] / METRICS).exists():
            read_state(state, checkpoint[1])
        with Checkpoints(store, ref, Ranks()) as checkpoints:
            run_updates(state, fit, Models(trainable=state.trainable), plan, reading=reading, **loop)
    except DivergedError:
        rate = f"{config.learning_rate:g}"
        text = f"After {len(state.metrics)} updates scores are not finite. Lower 'learning_rate' ({rate})."
        raise RewardError(text) from None
    fit.rescale()
    return fit, [first, *({name: each[name] for name in first} for each in state.metrics if "heldout" in each)]


def _state(layers: nn.Sequential, further: list[nn.Parameter], section: OptimizeSection) -> TrainerState:
    # What training reads of a policy.
    parts: Any = SimpleNamespace(trained={"reward": nn.ModuleList([layers, nn.ParameterList(further)])}, untrained=())
    trainable = Trainable(parts, None, seed=0)
    return TrainerState(trainable, make_optimizer(trainable.parameters(), section), None, 0)


def _batch(device: torch.device, units: Units) -> Batch:
    count = len(units.rows)
    ones, zeros = torch.ones(count, device=device), torch.zeros(count, dtype=torch.int64)
    return Batch(
        advantages=ones,
        weights=ones,
        units=torch.arange(count, device=device),
        importance=ones,
        count=count,
        age=zeros,
        step=zeros,
        keys=tuple((row, position) for row, position in units.rows.tolist()),
    )
