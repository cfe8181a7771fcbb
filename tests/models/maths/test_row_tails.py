"""Logits of the last positions of rows alone: log-probs, entropies and gradients are those of whole rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowmill.models.maths.row_tails import RowTails
from flowmill.models.maths.tokens import WIDTH
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM, TrainableLM
from flowmill.models.policies.parts import Part
from tests.support.language_models import write_language_model

W = 4 * WIDTH
#: First chosen token and length of each row.
ROWS = [(40, 60), (50, 64), (9, 20), (33, 34)]
FIRSTS, LENGTHS = [first for first, _ in ROWS], [length for _, length in ROWS]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> TrainableLM:
    folder: Path = tmp_path_factory.mktemp("lm") / "lm"
    write_language_model(folder)
    return CausalLM.load(folder, PolicySettings(), frozenset({Part.DENOISER}), {}).trainable(None, seed=0)


def ids_of(rows: int) -> torch.Tensor:
    return torch.randint(3, 14, (rows, W), generator=torch.Generator().manual_seed(rows))


def chosen() -> torch.Tensor:
    places = torch.arange(W)
    return (places >= torch.tensor(FIRSTS)[:, None]) & (places < torch.tensor(LENGTHS)[:, None])


def test_log_probs_entropies_and_gradients_are_those_of_whole_rows(policy: TrainableLM) -> None:
    ids, mask, weights = ids_of(len(ROWS)), chosen(), list(policy.policy.model.parameters())
    tails = RowTails.of(ids, FIRSTS, LENGTHS)
    assert tails is not None
    assert tails.tail_ids.shape == (len(ROWS), 2 * WIDTH + 1)
    assert policy.policy.forward(ids, used=tails).logits.shape[1] == 2 * WIDTH, "no others are computed"
    assert policy.policy.forward(ids).logits.shape[1] == W, "the head is as before"
    computed = []
    for used in (None, tails):
        log_probs, entropy = policy.log_probs(ids, 0.7, used)
        gradients = torch.autograd.grad(log_probs[mask].square().sum(), weights)
        computed.append((log_probs[mask], entropy[mask], gradients))
        assert used is None or not log_probs[:, :8].any(), "other positions have no value"
    (whole, tail) = computed
    assert torch.equal(whole[0], tail[0])
    assert torch.equal(whole[1], tail[1])
    for wanted, found in zip(whole[2], tail[2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_tails_of_other_rows_change_nothing(policy: TrainableLM) -> None:
    """Not in the last bit: batches are divided in other ways when a stage resumes."""
    ids, mask = ids_of(len(ROWS)), chosen()
    together = policy.log_probs(ids, 1.0, RowTails.of(ids, FIRSTS, LENGTHS))[0]
    for row, (first, length) in enumerate(ROWS):
        copies = ids[row : row + 1].expand(len(ROWS), -1)
        used = RowTails.of(copies, [first] * len(ROWS), [length] * len(ROWS))
        assert torch.equal(policy.log_probs(copies, 1.0, used)[0][0][mask[row]], together[row][mask[row]])


@pytest.mark.parametrize(("first", "length"), [(0, W), (1, W), (WIDTH - 1, W)], ids=["no prompt", "one token", "short"])
def test_rows_that_are_their_tails_have_none(first: int, length: int) -> None:
    assert RowTails.of(ids_of(2), [first, W - 1], [length, W]) is None


def test_outputs_of_a_model_without_a_head_are_cut() -> None:
    ids = ids_of(2)
    tails = RowTails.of(ids, [40, 50], [60, 64])
    assert tails is not None
    numbers = torch.arange(2.0 * W).reshape(2, W, 1)
    cut = tails.tails(numbers)
    assert torch.equal(tails.tails(cut), cut)
    assert torch.equal(cut[:, :2, 0], torch.tensor([[31.0, 32.0], [W + 31.0, W + 32.0]]))
    assert cut.shape == (2, 2 * WIDTH, 1)
    found = tails.rows(numbers[:, 31:, 0])
    assert torch.equal(found, torch.where(torch.arange(W) < 31, 0, numbers[..., 0]))
