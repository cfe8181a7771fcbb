"""LoRA files as a pipeline's ``load_lora_weights`` reads them, whose bytes depend on their content alone."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import CorruptError
from models.libraries import diffusers_class

LORA_FILE = "pytorch_lora_weights.safetensors"
"""What ``load_lora_weights`` looks for (diffusers' ``LORA_WEIGHT_NAME_SAFE``)."""
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8


def save_lora(pipeline_name: str, folder: Path, name: str, module: Any) -> None:
    """Write the adapter of a module, with its settings as metadata.

    Args:
        pipeline_name: the diffusers class that will read it.
        folder: where to; made when it is not there.
        name: what the pipeline's loader calls the module.
        module: with one PEFT adapter, ``default``.
    """
    from peft import get_peft_model_state_dict

    layers = {f"{name}_lora_layers": get_peft_model_state_dict(module)}
    settings = {f"{name}_lora_adapter_metadata": sorted_sets(module.peft_config["default"].to_dict())}
    diffusers_class(pipeline_name).save_lora_weights(folder, weight_name=LORA_FILE, **layers, **settings)
    canonical_header(folder / LORA_FILE)


def sorted_sets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with every set as a sorted list; a set's order changes from process to process."""
    return {name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in settings.items()}


def canonical_header(path: Path) -> None:
    """Rewrite a safetensors file with its header's keys sorted.

    The header is JSON (https://huggingface.co/docs/safetensors: 8 bytes of length, JSON, tensors at offsets counted
    from its end), whose metadata safetensors writes in an order that changes from call to call.

    Raises:
        CorruptError: the file is no safetensors file.
    """
    rewritten = path.with_suffix(".rewritten")
    with path.open("rb") as source, rewritten.open("wb") as target:
        header = _canonical(source.read(_read_length(source.read(_LENGTH.size), path)))
        target.write(_LENGTH.pack(len(header)) + header)
        shutil.copyfileobj(source, target, 1 << 20)
    os.replace(rewritten, path)


def _read_length(data: bytes, path: Path) -> int:
    if len(data) != _LENGTH.size or _LENGTH.unpack(data)[0] > path.stat().st_size:
        raise CorruptError(f"'{path.name}' is no safetensors file: its header is cut off. Export the policy again.")
    return int(_LENGTH.unpack(data)[0])


def _canonical(header: bytes) -> bytes:
    text = json.dumps(json.loads(header), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    # Tensors stay aligned: readers map them.
    return text + b" " * (-len(text) % _ALIGNMENT)
