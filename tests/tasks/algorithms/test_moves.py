"""How far a policy moved: KLs by hand, as sums over all outcomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.models.maths.transitions import gaussian_kl
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.algorithms.token_grpo import TokenGRPO
from flowmill.tasks.algorithms.tokens import TokenBatch
from flowmill.tasks.modalities.rows import first_units, plan_updates, single_rows
from tests.support.token_batches import token_batch
from tests.support.toy import REFERENCE, START, Toy, models_of, transitions, vector

OLD, NEW, BASE = ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.6, 0.3])


class Chosen:
    """Models of one token each: row t has token t."""

    measures = True

    def log_probs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        found = vector(NEW).log()[:, None]
        return found, torch.zeros_like(found)

    def reference_log_probs(self, batch: TokenBatch) -> Tensor:
        return vector(BASE).log()[:, None]


def texts() -> TokenBatch:
    return token_batch(torch.ones(3, 1, dtype=torch.bool), vector(OLD).log()[:, None])


@pytest.mark.parametrize("ratio", ["token", "sequence", "product"])
def test_token_kls_are_unbiased_over_the_behavior_policy(ratio: Any) -> None:
    """Each token as often as the behavior policy draws it: the means are the KLs, whatever the ratio is of."""
    metrics = TokenGRPO(ratio=ratio).loss(texts(), Chosen()).metrics  # type: ignore[arg-type]
    old, new, base = vector(OLD), vector(NEW), vector(BASE)
    assert float(old @ metrics["kl_epoch"]) == pytest.approx(float((old * (old / new).log()).sum()))
    assert float(old @ metrics["kl_base"]) == pytest.approx(float((new * (new / base).log()).sum()))
    assert float(metrics["kl_epoch"].min()) >= 0
    assert float(metrics["kl_base"].min()) >= 0


def test_a_token_that_is_given_up_counts_by_its_log_ratio() -> None:
    """Unlike approx_kl, whose mean is that of its rarest token."""
    models = Chosen()
    models.log_probs = lambda batch: (torch.full((3, 1), -15.0), torch.zeros(3, 1))  # type: ignore[method-assign]
    metrics = TokenGRPO().loss(texts(), models).metrics  # type: ignore[arg-type]
    assert float(metrics["kl_epoch"].max()) < 15
    assert float(metrics["approx_kl"].min()) > 1e5


@pytest.mark.parametrize("held", [False, True])
def test_the_kl_of_denoisers_to_the_base_model_is_that_of_their_steps(held: bool) -> None:
    """The base model is a frozen copy, or its weights in place of the trained ones."""
    toy = Toy(vector(START), vector(REFERENCE))
    models = models_of(toy, measures=True, base=(lambda: [vector(REFERENCE)]) if held else None)
    if held:
        toy.reference = vector(START)  # not asked
    rows = transitions([1.0, -1.0, 0.5, -0.5], vector(START))
    found = GRPO().loss(rows, models).metrics["kl_base"]
    velocities = [Toy.at(vector(theta), rows.latents, rows.grid.sigma) for theta in (START, REFERENCE)]
    expected = gaussian_kl(*(models.step(rows, velocity) for velocity in velocities))
    torch.testing.assert_close(found.detach(), expected)


def test_limits_follow_the_clip_range() -> None:
    """A log-ratio of ten times the clip range, of which approx_kl is half the square."""
    assert GRPO(clip_range=2e-3).kl_limit == pytest.approx(0.02**2 / 2)
    assert TokenGRPO(clip_range=0.1).kl_limit == 1.0


def test_the_first_units_of_a_plan_are_some_of_its_rows() -> None:
    plan = plan_updates(single_rows(np.arange(10), np.full(10, 3)), updates=4, inner_epochs=2, seed=0, epoch=1)
    found = first_units(plan, 12)
    assert found.rows.tolist() == [*plan[0].rows.tolist(), *plan[1].rows.tolist()][:12]
    assert len(found) == 12
    assert first_units(plan, 10**6).rows.tolist() == [row for part in plan for row in part.rows.tolist()]
    assert len(first_units(plan, 0)) == 1
