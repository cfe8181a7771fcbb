"""Every class that transformers lists for causal LMs computes the same however a text is drawn, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Cache, GPT2Config, LlamaForCausalLM, Phi3Config

from flowmill.configs.errors import ConfigError, FlowmillError
from flowmill.models.engines.local import BOUNDS
from flowmill.models.maths.generation import TokenSampling, generate, reading_once
from flowmill.models.maths.row_tails import RowTails
from flowmill.models.maths.tokens import WIDTH, token_log_probs
from flowmill.models.memory.language_architectures import check_class, meta_language_model
from flowmill.models.policies.attention import LANGUAGE_BACKENDS
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.language_classes import attention_of, cache_name, check_causal
from flowmill.models.policies.language_model_folders import context_length
from flowmill.models.quickstart.addition import tiny_model
from flowmill.models.weights.stored_weights import StoredWeights
from tests.support.causal_classes import TYPES, VOCABULARY, tiny_config

#: Types that are refused, and what is said of each.
REFUSED = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant"), "takes no positions"),
    **dict.fromkeys(("marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet"), "takes no positions"),
    **dict.fromkeys(("trocr", "whisper"), "takes no positions"),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), "counts positions from the id"),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), "counts positions from the id"),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlnet", "xlstm"), "takes no positions"),
    **dict.fromkeys(("deepseek_v4", "minimax", "openai-gpt"), "has no cache"),
    **dict.fromkeys(("reformer", "xlm"), "has no cache"),
}
PROMPTS = ((1, 5, 9, 30), (1, 5, 9, 30), (1, 7, 3, 21, 44, 8, 50, 13, 6, 40), (1, 60))
NEW = 14


def test_every_type_that_is_named_is_one_of_transformers() -> None:
    assert set(REFUSED) <= set(TYPES)
    assert len(TYPES) > 140


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_what_is_drawn_is_what_the_forward_says_or_the_class_is_refused(name: str) -> None:
    config = tiny_config(name)
    without = meta_language_model(config)
    assert (without.config._attn_implementation == "sdpa") == type(without)._supports_sdpa
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"model.path 'lm' holds a {type(without).__name__} that {REFUSED[name]}"):
            check_causal(Path("lm"), without)
        return
    check_causal(Path("lm"), without)
    model = made(config)
    policy = CausalLM(PolicySettings(), model, None)
    uniforms = torch.rand(len(PROMPTS), NEW, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = generate(
        reading_once(policy.next_logits, 3),
        PROMPTS,
        TokenSampling(max_new=NEW, temperature=1.0, eos=frozenset()),
        width=12,
        uniforms=lambda position: uniforms[:, position],
        device=torch.device("cpu"),
    )
    assert len({tuple(each.ids) for each in found}) > 2, "not all rows are the same"
    rows = torch.full((len(PROMPTS), 32), 5)
    for row, (prompt, each) in enumerate(zip(PROMPTS, found, strict=True)):
        rows[row, : len(prompt) + NEW] = torch.tensor([*prompt, *each.ids])
    with torch.no_grad():
        logits = policy.forward(rows).logits
        plain = model(input_ids=rows, use_cache=False).logits
        firsts = [len(prompt) for prompt in PROMPTS]
        tails = RowTails.of(rows, firsts, [first + NEW for first in firsts])
        assert tails is not None
        drawn_alone = policy.forward(rows, used=tails).logits
    assert drawn_alone.shape[1] == WIDTH, "logits of prompts are not computed"
    assert torch.equal(logits, plain), "explicit positions are those that the class counts by itself"
    whole = token_log_probs(logits, rows, 1.0)
    alone = tails.rows(token_log_probs(drawn_alone, tails.tail_ids, 1.0))
    for row, (prompt, each) in enumerate(zip(PROMPTS, found, strict=True)):
        drawn, said = torch.tensor(each.log_probs), whole[row, len(prompt) : len(prompt) + NEW]
        assert float((drawn - said).abs().max()) < 0.1 * BOUNDS[torch.float32]
        torch.testing.assert_close(alone[row, len(prompt) : len(prompt) + NEW], said, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TYPES} - {*REFUSED}))
def test_weights_are_read_again_as_the_class_has_them(name: str, tmp_path: Path) -> None:
    check_read(tiny_config(name), tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2"])
def test_experts_that_are_stored_apart_are_read_as_one_weight_and_by_ranks(name: str, tmp_path: Path) -> None:
    model = check_read(tiny_config(name), tmp_path)
    stored = StoredWeights.of(tmp_path, model)
    assert stored.converted
    pieces = {part for each in stored.converted.values() for part in each.sources}
    init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = {key: value.detach() for key, value in model.named_parameters() if key in stored.converted}
        ranks = {key: zeros(value.shape, device_mesh=mesh, placements=[Shard(0)]) for key, value in whole.items()}
        stored.read(ranks)
        assert all(torch.equal(ranks[key].to_local(), whole[key].chunk(2)[1]) for key in whole)
    finally:
        destroy_process_group()
    file = tmp_path / "model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if key != max(pieces)}, file)
    with pytest.raises(FlowmillError, match=r"model\.path: .* (Copy or download the model again|another model)"):
        StoredWeights.of(tmp_path, model).read(whole)


def check_read(config: Any, folder: Path) -> Any:
    """Check that the parameters of a random model of a class are read from its own files; return the model."""
    model = made(config)
    model.save_pretrained(folder)
    targets = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    StoredWeights.of(folder, model).read(targets)
    assert not [name for name, parameter in model.named_parameters() if not torch.equal(targets[name], parameter)]
    return model


def made(config: Any) -> Any:
    """Return a random model whose tokens are far from equally likely, whatever its config begins with."""
    torch.manual_seed(0)
    attention = attention_of(AutoModelForCausalLM, config, None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) < 20_000_000
    assert int(model.get_input_embeddings().weight.shape[0]) >= VOCABULARY
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def test_attention_is_what_the_class_has() -> None:
    about = tiny_model(0).config
    assert [attention_of(AutoModelForCausalLM, about, name) for name in (None, "sdpa", "eager")] == [
        *("sdpa", "sdpa", "eager")
    ]
    without = tiny_config("gpt_neo")
    assert attention_of(AutoModelForCausalLM, without, None) == "eager"
    with pytest.raises(ConfigError, match=r"attention is 'sdpa', but model\.path holds a GPTNeo.* which has eager"):
        attention_of(AutoModelForCausalLM, without, "sdpa")
    # A class may name kernels that are downloaded in place of a package.
    with pytest.raises(ConfigError, match=r"'flash_attention_2', but model\.path holds a GptOssForCausalLM"):
        attention_of(AutoModelForCausalLM, tiny_config("gpt_oss"), "flash_attention_2")
    assert next(iter(LANGUAGE_BACKENDS)) == "sdpa"


def test_a_class_that_cannot_be_made_or_used_is_refused_from_its_config(tmp_path: Path) -> None:
    tiny_config("mamba").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="holds a MambaForCausalLM that takes no positions"):
        check_class(tmp_path, None)
    tiny_config("roberta").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"critic\.path .* holds a RobertaModel that counts positions"):
        check_class(tmp_path, None, critic=True)
    GPT2Config(n_embd=30, n_head=4, n_layer=1, vocab_size=8, n_positions=8).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded: `embed_dim` must be divisible"):
        check_class(tmp_path, None)


def test_the_cache_has_the_name_that_the_library_gives_it() -> None:
    out = tiny_model(0)(torch.ones(1, 2, dtype=torch.int64), use_cache=True)
    assert [name for name, value in out.items() if isinstance(value, Cache)] == [cache_name()]


def test_a_name_that_the_library_no_longer_has_is_said_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda model, input_ids, places=None: None)
    with pytest.raises(ConfigError, match=r"transformers [\d.]+ is installed, whose language models take other arg"):
        check_causal(Path("lm"), tiny_model(0))


def test_two_rotary_tables_are_a_model_of_the_first_ones_length() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 1e4}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}
    about = Phi3Config(**sizes, original_max_position_embeddings=24, rope_parameters=rope, pad_token_id=0)
    assert context_length(about) == 24
    assert context_length(Phi3Config(**sizes, pad_token_id=0)) == 256
