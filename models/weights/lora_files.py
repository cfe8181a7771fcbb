"""LoRA files as a pipeline's ``load_lora_weights`` reads them, whose bytes depend on their content alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.libraries import diffusers_class
from models.weights.safetensors_header import canonical_header

LORA_FILE = "pytorch_lora_weights.safetensors"
"""What ``load_lora_weights`` looks for (diffusers' ``LORA_WEIGHT_NAME_SAFE``)."""


def save_lora(pipeline_name: str, folder: Path, name: str, module: Any) -> None:
    """Write the adapter of a module, with its settings as metadata.

    The scale, alpha / rank, is folded into the second matrix and alpha set to the rank: what reads the tensors alone
    gives the strength of training, as does what reads the metadata.

    Args:
        pipeline_name: the diffusers class that will read it.
        folder: where to; made when it is not there.
        name: what the pipeline's loader calls the module.
        module: with one PEFT adapter, ``default``.
    """
    from peft import get_peft_model_state_dict

    about = module.peft_config["default"].to_dict()
    scale = about["lora_alpha"] / about["r"]
    tensors = get_peft_model_state_dict(module)
    layers = {f"{name}_lora_layers": {k: v * scale if ".lora_B." in k else v for k, v in tensors.items()}}
    settings = {f"{name}_lora_adapter_metadata": sorted_sets({**about, "lora_alpha": about["r"]})}
    diffusers_class(pipeline_name).save_lora_weights(folder, weight_name=LORA_FILE, **layers, **settings)
    canonical_header(folder / LORA_FILE)


def sorted_sets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with every set as a sorted list; a set's order changes from process to process."""
    return {name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in settings.items()}
