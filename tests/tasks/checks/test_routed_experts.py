"""``check`` and ``run`` say which weights of a model get no adapters: those of routed experts are in no layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from flowmill.configs.load import parse_config
from flowmill.configs.model_families import spec_of
from flowmill.models.memory.language_architectures import language_config, meta_language_model
from flowmill.models.memory.published import published
from flowmill.models.policies import POLICIES
from flowmill.models.weights.lora import stack_note
from flowmill.tasks.checks.notes import training_notes
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import prepare, run_epoch
from tests.support.language_models import texts_data

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def test_experts_without_adapters_are_said_by_check_and_by_run(tmp_path: Path) -> None:
    data = texts_data(tmp_path)
    sizes = transformers.AutoConfig.from_pretrained(tmp_path / "lm")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **EXPERTS,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=sizes.eos_token_id,
        pad_token_id=sizes.pad_token_id,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "lm")
    data["model"]["lora"] = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}
    adapted = parse_config(data, where="here")
    notes = [note for note in training_notes(RunPlan(adapted), updates=1) if "routed experts" in note]
    assert len(notes) == 1
    assert "('model.layers.0.mlp.experts.gate_up_proj' and 3 more), get no adapters" in notes[0]
    context = prepare(adapted)
    said: list[str] = []
    context.reporter.message = said.append  # type: ignore[method-assign]
    run_epoch(context, 1)
    assert [text for text in said if "routed experts" in text] == notes
    whole = parse_config(data | {"model": data["model"] | {"lora": None}}, where="here")
    assert not [note for note in training_notes(RunPlan(whole), updates=1) if "routed experts" in note]


@pytest.mark.parametrize("path", sorted(published("language")))
def test_published_language_models_here_have_none(path: str) -> None:
    config = language_config(path)
    kinds = {"janus": "janus", "qwen2_5_vl": "vision_lm"}
    family = kinds.get(config.model_type, "causal_lm")
    assert spec_of(family).kind != "diffusion"
    assert stack_note(meta_language_model(config, models=_class(family).models)) is None


def _class(family: str) -> type:
    from flowmill.configs.registry import resolve

    found: type = resolve(POLICIES, family, label="policy")
    return found
