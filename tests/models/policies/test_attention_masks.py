"""Selections by masks on tensors without content."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flowmill.models.policies.attention_masks import WholeMasks
from flowmill.models.policies.compute_meter import forward_flops
from flowmill.models.quickstart.tiny import build_tiny


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_a_mask_picks_all_rows_and_its_inverse_none(device: str) -> None:
    with FakeTensorMode() if device == "fake" else torch.device("meta"), WholeMasks():
        rows = torch.empty(5, 3)
        mask, other = torch.ones(5, dtype=torch.long).bool(), torch.zeros(5, dtype=torch.long).bool()
        assert torch.all(rows == 0)
        found = [rows[mask], rows[~mask], rows[other], rows[~other]]
        assert [len(picked) for picked in found] == [5, 0, 5, 0]
        assert torch.cat(found).shape == (10, 3)
        assert rows[0].shape == (3,)


def test_masks_with_content_pick_what_they_say() -> None:
    with WholeMasks():
        rows, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
        assert rows[mask].tolist() == [0, 2]
        assert rows[~mask].tolist() == [1, 3]
        assert not torch.all(mask)


def test_what_a_model_that_picks_by_masks_computes_is_counted() -> None:
    transformer = build_tiny("hunyuan_video15").transformer
    text, image = torch.ones(1, 6, dtype=torch.long), torch.zeros(1, 3, 16)

    def flops(tokens: int) -> float:
        given = {
            "hidden_states": torch.zeros(1, 65, 2, 2, 2),
            "timestep": torch.zeros(1),
            "image_embeds": image,
            "encoder_hidden_states": torch.zeros(1, 6, 32),
            "encoder_attention_mask": text,
            "encoder_hidden_states_2": torch.zeros(1, tokens, 24),
            "encoder_attention_mask_2": torch.ones(1, tokens, dtype=torch.long),
        }
        found = forward_flops(transformer, (), given)
        assert found is not None
        return found

    # A further token of ByT5 goes through three matrices of its own, and then the rest.
    own = 2 * 2048 * (24 + 2048 + 32)
    assert own < flops(3) - flops(2) < 1.05 * own
