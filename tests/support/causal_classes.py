"""Tiny configs of the causal language models that transformers lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 64
#: Values of settings, by any name that a config may have for them.
_TINY: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("ffn_hidden_size", "d_inner"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "mamba_n_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "n_mamba_heads", "mamba_expand"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_head"), 8),
    **dict.fromkeys(("sliding_window", "attention_window", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("state_size", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "rotary_dim", "conv_kernel"), 4),
    **dict.fromkeys(("time_step_rank",), 4),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace",), 1),
    "num_experts_per_tok": 2,
    "is_decoder": True,
    "dtype": "float32",
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: What single types need besides.
_OTHER: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cpmant": {"dim_head": 8, "dim_ff": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"num_hidden_layers": 4, "layer_types": None, "n_input_layers": 1, "n_output_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 64,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
        "num_layers": 1,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        "attention_head_size": 8,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "num_buckets": 4,
        "feed_forward_size": 64,
        "attn_layers": ["local", "lsh"],
    },
}
#: Types whose parts are configs of their own: what they say of texts is a type of its own, or reads no texts alone.
COMPOSITE = frozenset(
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name != "mpt" and getattr(CONFIG_MAPPING[name], "sub_configs", None)
)
#: Types of which no tiny config is known here: sizes that depend on each other in ways of their own.
UNKNOWN = frozenset(
    {
        *("bailing_hybrid", "bamba", "cohere_compass_text", "dots1", "dots3_note_text", "falcon_h1", "gemma4_text"),
        *("gemma4_unified_text", "kimi_linear", "qwen4_exp_text", "recurrent_gemma", "zamba", "zamba2", "zaya"),
        *("xmod",),
    }
)
TYPES = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - COMPOSITE - UNKNOWN))


def tiny_config(name: str) -> Any:
    """Return a config of a type with a hundred thousand parameters or fewer."""
    kind = CONFIG_MAPPING[name]
    usual = kind()
    mapped = getattr(usual, "attribute_map", None) or {}
    known = (set(usual.to_dict()) | set(mapped)) - set(mapped)
    given = {key: value for key, value in _TINY.items() if key in known and getattr(usual, key, None) is not None}
    given |= {"is_decoder": True, "dtype": "float32", **_IDS} if "is_decoder" in known else {"dtype": "float32", **_IDS}
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    if kinds:
        count = max(2, len(kinds))
        given |= {"layer_types": (kinds * 2)[:count], "num_hidden_layers": count}
    if "q_lora_rank" in known:
        # Keys are made of latents, for every head.
        given["num_key_value_heads"] = 4
    given |= _OTHER.get(name, {})
    for _ in range(6):
        try:
            return kind(**given)
        except AttributeError as error:
            fixed = re.search(r"property '(\w+)' of", str(error))
            if fixed is None or fixed[1] not in given:
                raise
            del given[fixed[1]]
    raise AssertionError(f"no config of {name}")
