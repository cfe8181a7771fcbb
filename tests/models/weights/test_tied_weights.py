"""Tied weights of a model that is created empty: those that loading it ties, whichever of them its files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import MODEL, CausalLM, TrainableLM
from flowmill.models.weights.lora import LoraSpec
from tests.support.language_models import write_language_model

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
LORA = LoraSpec(rank=2, alpha=4, targets=("q_proj", "lm_head"))
IDS = torch.tensor([[1, 2, 3, 4]])


def made(folder: Path, lora: LoraSpec | None, **settings: Any) -> TrainableLM:
    return CausalLM.load(folder, PolicySettings(**settings), frozenset(), {}).trainable(lora, seed=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapters"])
@pytest.mark.parametrize("held", ["embeddings", "head", "both", "two"])
def test_a_model_made_empty_ties_what_loading_ties(
    tmp_path: Path, held: str, lora: LoraSpec | None, dtype: torch.dtype
) -> None:
    write_language_model(tmp_path, tied=True)
    stored = load_file(tmp_path / "model.safetensors")
    if held == "head":
        stored[HEAD] = stored.pop(EMBEDDINGS)
    elif held != "embeddings":
        stored[HEAD] = stored[EMBEDDINGS] * (2 if held == "two" else 1)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, empty = made(tmp_path, lora, dtype=dtype), made(tmp_path, lora, dtype=dtype, empty=True)
    assert loaded.shapes() == empty.shapes()
    empty.policy.stored[MODEL].give(empty.policy.model, torch.device("cpu"))
    assert loaded.shapes() == empty.shapes()
    # Trained names do not show frozen weights.
    for model in (loaded.policy.model, empty.policy.model):
        head = getattr(model.lm_head, "base_layer", model.lm_head)
        assert (head.weight is model.model.embed_tokens.weight) is (held != "two")
    assert torch.equal(loaded.policy.forward(IDS).logits, empty.policy.forward(IDS).logits)
    if lora is None:
        targets = {name: torch.empty_like(parameter) for name, parameter in loaded.named_parameters()}
        loaded.fill(targets, None)
        assert all(torch.equal(targets[name], parameter) for name, parameter in loaded.named_parameters())
