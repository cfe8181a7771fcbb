"""KTO and APO-zero equal TRL's losses, gradients and reference points, through the classes that training uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.configs.registry import create
from flowmill.tasks.algorithms import TOKEN_ALGORITHMS
from flowmill.tasks.algorithms.tokens import TokenBatch
from flowmill.tasks.modalities.rows import Units
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.training.loop import Reading, _reference_point
from tests.golden.tokens.test_token_losses import Case, Given, batch_of, cases, folder  # noqa: F401 - a fixture


class Mismatched(Given):
    """A model that also has log-probs of the texts after other prompts."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._case, self.trainable = case, SimpleNamespace(sharded=False)
        self.remembered: Any = {"kept": torch.zeros(1)}
        self.reference_point = 0.0

    def apart(self, batch: TokenBatch) -> bool:
        return batch.keys[0][1] == 1

    def log_probs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        if not self.apart(batch):
            return super().log_probs(batch)
        assert self.remembered is None, "what is known of rows under their own prompts is not of these"
        found = self._case.tensor("kl_log_probs")
        return found, torch.zeros_like(found)

    def reference_log_probs(self, batch: TokenBatch) -> Tensor:
        return self._case.tensor("kl_ref") if self.apart(batch) else super().reference_log_probs(batch)


@pytest.mark.parametrize("name", ["kto_plain", "kto_weights", "kto_negative_kl", "kto_one_kind", "apo_zero_unpaired"])
def test_trl_kto(folder: Path, name: str) -> None:  # noqa: F811 - the fixture
    case = cases(folder, "kto", name)[name]
    params = dict(case.about["params"])
    algorithm = create(
        TOKEN_ALGORITHMS, "kto" if params.pop("loss_type") == "kto" else "apo_zero", params, label="here"
    )
    models, batch = Mismatched(case), batch_of(case)
    rows = len(batch.mask)
    apart = replace(batch, mask=case.tensor("kl_mask").bool(), keys=tuple((row, 1) for row in range(rows)))
    units = Units(np.array([[row, 0] for row in range(rows)]), np.arange(rows + 1))
    reading = Reading(lambda units: batch, mismatched=(lambda units: apart) if algorithm.requires.mismatched else None)
    found = _reference_point(algorithm, models, units, reading, size=max(rows, 4), ranks=Ranks())  # type: ignore[arg-type]
    assert found.get("reference_point", 0.0) == pytest.approx(params["beta"] * float(case.arrays["kl"]), rel=1e-9)
    assert models.remembered is not None
    # Weights are float32, as in training.
    loss = algorithm.loss(batch, models).loss.mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), case.tensor("loss"), rtol=2e-7, atol=1e-12)
    torch.testing.assert_close(models.logits.grad, case.tensor("grad_logits"), rtol=1e-6, atol=1e-9)
