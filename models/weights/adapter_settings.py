"""Supported settings of adapters: fields that are read and fields without effect; all others are refused by name.

Settings are those of peft (``adapter_config.json``), of diffusers (``lora_adapter_metadata`` in a safetensors header),
and of kohya's scripts, LyCORIS and ai-toolkit (other entries of the header). Ignoring a setting could change an
adapter's outputs. A new field of peft belongs in one of the tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.library_loading import same
from models.weights.lora_files import unfit

#: Read by ``models.weights.lora_start``.
FOLLOWED = frozenset({"lora_alpha", "use_rslora", "alpha_pattern"})
#: Fields that do not change an adapter's outputs, and the reason.
MOOT: Mapping[str, str] = {
    **dict.fromkeys(
        "r rank_pattern target_modules exclude_modules layers_to_transform layers_pattern".split(),
        "the names and shapes of the tensors give the layers and the rank",
    ),
    **dict.fromkeys(
        "megatron_core loftq_config corda_config lora_ga_config qalora_group_size ensure_weight_tying".split(),
        "only has an effect with another setting, which is refused",
    ),
    "task_type": "names the wrapper of the model, not the computation of a layer",
    "auto_mapping": "names classes of the adapted model",
    "base_model_name_or_path": "a name; layers and shapes must fit the model",
    "revision": "of that name",
    "peft_version": "of the program that wrote it",
    "inference_mode": "whether peft would train it",
    "lora_dropout": "acts while peft trains; here dropout is off, so that sampling and training agree",
    "fan_in_fan_out": "how the model's layer stores its weight, which its class defines",
    "runtime_config": "where peft computes",
    "eva_config": "how initial weights were found; the trained weights are in the tensors",
}
#: Supported values of other fields; all other values are refused.
ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias"), (False, None)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("trainable_token_indices", "layer_replication"), (None, [], {})),
    **dict.fromkeys(
        "megatron_config velora_config monteclora_config use_bdlora arrow_config kasa_config".split(), (None, False, {})
    ),
}
_MERGE = "Merge it into the model's weights and start from those"
_REMEDIES = {
    "init_lora_weights": (
        "It is relative to weights that its initialization changed. Convert it with peft's save_pretrained(..., "
        "path_initial_model_for_weight_conversion=...), or merge it into the model's weights and start from those"
    ),
    "alora_invocation_tokens": (
        "It only acts after these tokens, while training and draws here use one model for all tokens. Give an adapter "
        "without them"
    ),
}
#: The entry of a safetensors header that has peft's settings (diffusers' ``LORA_ADAPTER_METADATA_KEY``).
_DIFFUSERS = "lora_adapter_metadata"
#: Prefixes of notes about training data, rates and names (kohya's scripts, ai-toolkit, the standard for model files).
_NOTES = ("ss_", "sshs_", "modelspec.")
_MODULE, _ARGUMENTS = "ss_network_module", "ss_network_args"
#: Networks of kohya's scripts that are low-rank adapters; LyCORIS has several kinds.
_NETWORKS = ("networks.lora", "lycoris.kohya")
#: Arguments of networks that do not change outputs: ranks and alphas are in the tensors, others only act in training.
MOOT_ARGUMENTS = frozenset(
    (
        "conv_dim conv_alpha conv_lora_dim linear_dim linear_alpha preset dropout rank_dropout module_dropout "
        "rank_dropout_scale block_dims block_alphas conv_block_dims conv_block_alphas block_lr_zero_threshold "
        "down_lr_weight mid_lr_weight up_lr_weight loraplus_lr_ratio loraplus_unet_lr_ratio "
        "loraplus_text_encoder_lr_ratio train_t5xxl train_blocks train_double_block_indices train_single_block_indices "
        "split_qkv in_dims img_attn_dim txt_attn_dim img_mlp_dim txt_mlp_dim img_mod_dim txt_mod_dim single_dim "
        "single_mod_dim verbose include_patterns exclude_patterns bypass_mode use_tucker use_conv_cp decompose_both "
        "factor constraint rescaled block_size full_matrix unbalanced_factorization"
    ).split()
)
#: Supported algorithms of LyCORIS.
_ALGORITHMS = ("lora", "locon")


def check_settings(path: Path, where: str, settings: Mapping[str, Any]) -> None:
    """Check that peft settings describe low-rank adapters relative to the model's own weights; raise ConfigError.
    ``where``: the file or entry with the settings."""
    for name, value in settings.items():
        if name in FOLLOWED or name in MOOT or any(same(value, each) for each in ALLOWED.get(name, (None, False, {}))):
            continue
        raise unfit(path, f"has '{name}: {_short(value)}' in {where}", _REMEDIES.get(name, _MERGE))


def check_header(path: Path, header: Mapping[str, str]) -> None:
    """Check that the header of a safetensors file describes low-rank adapters of weights; raise ConfigError."""
    settings = _json(path, _DIFFUSERS, header.get(_DIFFUSERS))
    # diffusers prefixes each name with the model's.
    for name, value in settings.items():
        check_settings(path, f"{_DIFFUSERS} of its header", {name.rpartition(".")[2]: value})
    module, arguments = header.get(_MODULE), _json(path, _ARGUMENTS, header.get(_ARGUMENTS))
    if module is not None and not module.startswith(_NETWORKS):
        raise unfit(path, f"has '{_MODULE}: {_short(module)}' in its header", _MERGE)
    for name, value in arguments.items():
        if name == "algo" and str(value).lower() in _ALGORITHMS:
            continue
        if name not in MOOT_ARGUMENTS and str(value).lower() not in ("false", "none", "0", ""):
            raise unfit(path, f"has '{name}: {_short(value)}' in {_ARGUMENTS} of its header", _MERGE)
    for name, text in header.items():
        # Trainers without their own format write peft's names.
        if not name.startswith(_NOTES) and name in ALLOWED:
            check_settings(path, "its header", {name: _value(text)})


def _json(path: Path, name: str, text: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if found is None and text is not None and text.strip() == "null":
        return {}
    if not isinstance(found, dict):
        raise unfit(path, f"has a '{name}' in its header that is no JSON object", "Remove it, or copy the file again")
    return found


def _value(text: str) -> Any:
    return {"true": True, "false": False, "none": None, "null": None, "": None}.get(text.strip().lower(), text)


def _short(value: Any) -> str:
    found = str(value)
    return found if len(found) <= 100 else f"{found[:100]}..."
