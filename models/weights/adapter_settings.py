"""Supported settings of adapters: fields that are read and fields without effect; all others are refused by name.

Settings are those of peft (``adapter_config.json``), also where diffusers writes them (``lora_adapter_metadata`` in a
safetensors header). Ignoring one could change an adapter's outputs. A new field of peft belongs in one of the tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowmill.models.library_loading import same
from flowmill.models.weights.lora_files import unfit

#: Read by ``flowmill.models.weights.lora_start``.
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


def _json(path: Path, name: str, text: str | None) -> Mapping[str, Any]:
    try:
        content = json.loads(text or "{}")
    except (ValueError, RecursionError):
        content = None
    if content is None and text is not None and text.strip() == "null":
        return {}
    if not isinstance(content, dict):
        raise unfit(path, f"has a '{name}' in its header that is no JSON object", "Remove it, or copy the file again")
    return content


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
