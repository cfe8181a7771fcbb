"""Every algorithm with the options that change its loss, and batches for each.

A new algorithm is a line in ``CASES`` or ``TOKEN_CASES``: test_algorithms.py and test_extreme_ratios.py then try its
loss, on a policy with a closed form (tests/support/toy.py) or on given log-probs. Values worked out by hand are in
test_by_hand.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flowmill.configs.registry import create
from flowmill.models.maths.transitions import FlowSDE
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.algorithms.base import Algorithm, RowLoss
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels, ForwardBatch, TransitionBatch
from flowmill.tasks.algorithms.tokens import TokenBatch
from tests.support.token_batches import token_batch
from tests.support.toy import BEHAVIOR, SHAPE, Toy, draws, liking, models_of, noised, states, transitions, vector

Options = dict[str, Any]
#: Losses of stored steps.
STEPS: list[tuple[str, Options]] = [
    ("grpo", {}),
    ("grpo", {"reduce": "sum", "clip_range": 0.2}),
    ("grpo", {"from_means": True}),
    ("grpo", {"surrogate": "spo", "clip_range": 0.2}),
    *[("grpo", {"clip_range": 0.5, "kl_coef": 0.3, "kl": kl}) for kl in ("gaussian", "flow_grpo", "velocity", "mean")],
    ("tempflow", {}),
    ("flash_grpo", {}),
    ("flash_grpo", {"reduce": "sum", "clip_range": 0.2}),
    ("grpo_guard", {}),
    ("grpo_guard", {"divide_by_dt": False}),
    ("grpo_guard", {"reduce": "sum"}),
    *[(name, {"surrogate": "spo"}) for name in ("tempflow", "flash_grpo", "grpo_guard")],
    ("flow_dppo", {}),
    ("flow_dppo", {"threshold": 1.0, "kl_coef": 0.1}),
    ("fdfo", {}),
    ("fdfo", {"kl_coef": 0.2}),
    ("opd", {"teacher": "somewhere"}),
]
#: Losses of noised samples.
SAMPLES: list[tuple[str, Options]] = [
    ("nft", {}),
    ("nft", {"beta": 0.1}),
    *[("awm", {"weighting": kind}) for kind in ("uniform", "t", "t2", "huber", "ghuber", "adaptive")],
    ("awm", {"kl_coef": 0.2, "clip_range": 0.2}),
    ("v_grpo", {}),
    *[(name, {"surrogate": "spo"}) for name in ("awm", "v_grpo")],
    ("dpo", {"beta": 2.0}),
    ("dpo", {"beta": 3.0, "kl_coef": 0.2}),
    ("dpo", {"beta": 2.0, "winner_margin": 0.5}),
    ("kto", {"beta": 2.0}),
    ("kto", {"beta": 3.0, "kl_coef": 0.2}),
    ("apo_zero", {"beta": 2.0}),
    *[("sft", {"prediction": kind, "kl_coef": 0.2}) for kind in ("velocity", "epsilon", "v_prediction", "sample")],
    ("dgpo", {"beta": 1.0}),
    *[("crd", {"distance": kind, "temperature": t}) for kind in ("mse", "bce") for t in (-1.0, 0.0, 0.5)],
    ("crd", {"adaptive": False, "detach_center": True}),
    ("ram", {}),
    ("ram", {"multiplier": 0.5, "kl_coef": 0.2}),
]
#: Losses that climb rewards or their stored gradients.
CLIMBING: list[tuple[str, Options]] = [
    *[("reward_gradient", {"target": target, "kl_coef": kl}) for target in ("bounded", "linear") for kl in (0.0, 0.2)],
    *[("refl", {"steps": steps, "kl_coef": kl}) for steps in (1, 3) for kl in (0.0, 0.2)],
    ("refl", {"margin": 1.0, "scale": 0.5}),
    ("direct_align", {"kl_coef": 0.2}),
    ("direct_align", {"step": 0.05, "times": {"high": 0.9}, "positive": ("a", "bc"), "negative": ("def",)}),
]
CASES = [*STEPS, *SAMPLES, *CLIMBING]
#: Losses of texts.
TOKEN_CASES: list[tuple[str, Options]] = [
    *[
        ("grpo", {"surrogate": surrogate, "ratio": ratio, "kl_coef": 0.1, "kl": "k3"})
        for surrogate in ("clip", "cispo", "spo")
        for ratio in ("token", "sequence", "product")
    ],
    *[("grpo", {"tis": 2.0, "tis_outside": form}) for form in ("clip", "mask", "mask_rows")],
    ("dapo", {"kl_coef": 0.1, "kl": "k2"}),
    ("dr_grpo", {"constant": 4}),
    *[(name, {}) for name in ("gspo", "cispo", "rloo", "kto", "apo_zero", "sft", "ppo", "reinforce_plus_plus")],
    *[("dpo", {"form": form}) for form in ("sigmoid", "hinge", "ipo")],
    ("dpo", {"likelihood": 1.0}),
]
EVERY = pytest.mark.parametrize(("name", "options"), CASES, ids=str)
EVERY_TOKEN = pytest.mark.parametrize(("name", "options"), TOKEN_CASES, ids=str)

ADVANTAGES, UNITS = (1.5, -0.5, 0.7, -1.2), (0, 0, 1, 1)
#: Texts of four tokens of which the policy chose some.
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()


def make(name: str, options: Mapping[str, Any]) -> Algorithm:
    algorithm: Algorithm = create(ALGORITHMS, name, dict(options), label="algorithm")
    return algorithm


def make_token(name: str, options: Mapping[str, Any]) -> Any:
    return create(TOKEN_ALGORITHMS, name, dict(options), label="algorithm")


def rows_of(
    algorithm: Algorithm,
    advantages: Sequence[float] = ADVANTAGES,
    *,
    behavior: Tensor | None = None,
    units: Sequence[int] = (0, 0, 1, 1, 2, 2),
    **more: Any,
) -> DiffusionBatch:
    """Return a batch of what an algorithm trains on; stored steps are drawn by ``behavior``."""
    kind, rows = algorithm.requires.data, len(advantages)
    if kind == "states":
        return states(algorithm.requires.calls, rows=rows)
    if kind == "transitions":
        batch = transitions(advantages, vector(BEHAVIOR) if behavior is None else behavior, **more)
        return dataclasses.replace(batch, units=torch.tensor(units[:rows]))
    slopes = draws(1, rows, *SHAPE, seed=7)[0]
    return dataclasses.replace(noised(advantages, units[:rows], **more), gradients=slopes)


def losses(algorithm: Algorithm, rows: DiffusionBatch, toy: Toy, behavior: Any = BEHAVIOR, **more: Any) -> RowLoss:
    """Return what an algorithm makes of rows; with ``behavior`` None that is the policy itself."""
    held = toy.theta.detach() if behavior is None else behavior
    return algorithm.loss(rows, models_of(toy, held, rewards=liking, **more))


def gradient(algorithm: Algorithm, rows: DiffusionBatch, toy: Toy, behavior: Any = None) -> Tensor:
    (slope,) = torch.autograd.grad(losses(algorithm, rows, toy, behavior).loss.mean(), toy.theta)
    return slope


def scores(rows: DiffusionBatch, theta: Tensor) -> Tensor:
    """Return how likely each row is under a policy: its log-prob, or minus its error."""
    velocity = Toy.at(theta, rows.latents, rows.grid.sigma)
    if isinstance(rows, TransitionBatch):
        return FlowSDE(0.7).step(rows.latents, velocity, rows.grid).log_prob(rows.next_latents)
    assert isinstance(rows, ForwardBatch)
    return -((velocity - rows.target) ** 2).flatten(1).mean(1)


def chosen(value: Any, rows: Sequence[int]) -> Any:
    """Return some rows of a batch, or of a part of one."""
    if isinstance(value, Tensor):
        return value[list(rows)]
    if isinstance(value, tuple):
        return tuple(value[row] for row in rows)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: chosen(part, rows) for name, part in parts.items()})
    return value


def linear(scale: float) -> Toy:
    """Return the policy v = scale x + 0.1, whose base model has the scale 0.3."""
    return Toy(vector([scale, 0.0, 0.1, 0.1, 0.1]), vector([0.3, 0.0, 0.1, 0.1, 0.1]))


def models_of_linear(policy: Toy, **more: Any) -> DiffusionModels:
    """Return models whose behavior policy has the scale 0.5."""
    return models_of(policy, linear(0.5).theta.detach(), **more)


def token_rows(advantages: Sequence[float], *, dtype: torch.dtype = torch.float32, **changes: Any) -> TokenBatch:
    """Return five texts in two pairs, the last only pads; log-probs before and values are 0."""
    zeros = torch.zeros(MASK.shape, dtype=dtype)
    own: dict[str, Any] = {
        "returns": zeros,
        "values": zeros,
        "advantages": torch.tensor(advantages, dtype=dtype),
        "weights": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=dtype),
        "units": torch.tensor([0, 0, 1, 1, 2]),
        "count": 4,
    }
    return token_batch(changes.pop("mask", MASK), zeros, **{**own, **changes})


class Fixed:
    """Models whose log-probs are given; values of a critic are the same numbers."""

    frozen = measures = False
    reference_point = 0.0

    def __init__(self, log_probs: Tensor, reference: Tensor) -> None:
        self._log_probs, self._reference = log_probs, reference

    def log_probs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        return self._log_probs, torch.zeros_like(self._log_probs)

    def log_probs_and_values(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        return *self.log_probs(batch), self._log_probs

    def reference_log_probs(self, batch: TokenBatch) -> Tensor:
        return self._reference
