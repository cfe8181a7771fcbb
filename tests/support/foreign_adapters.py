"""Adapters as other trainers write them, with weights that change what a model computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

RANK = 2
#: Layers of a block by the names that trainers have for them, and what their names begin with.
OF_OTHERS = {
    "flux1": ("double_blocks", ("img_attn.qkv", "img_attn.proj", "txt_attn.qkv", "txt_attn.proj")),
    "wan21": ("blocks", tuple(f"{attention}.{side}" for attention in ("self_attn", "cross_attn") for side in "qkvo")),
    "qwen_image": ("transformer_blocks", ("attn.to_q", "attn.to_k", "attn.add_q_proj", "img_mlp.net.0.proj")),
    "z_image": ("layers", ("attention.to_q", "attention.to_k", "attention.to_v", "feed_forward.w1")),
}


def plain_peft(module: nn.Module, folder: Path, targets: Sequence[str]) -> None:
    """Write an adapter as peft alone does: ``get_peft_model``, ``save_pretrained``."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(module, LoraConfig(r=RANK, lora_alpha=3, target_modules=list(targets)))
    for number, (name, parameter) in enumerate(wrapped.named_parameters()):
        if "lora_" in name:
            parameter.data = _drawn(parameter.shape, number)
    wrapped.save_pretrained(folder)


def kohya(module: nn.Module, prefix: str, targets: Sequence[str]) -> dict[str, Tensor]:
    """Return an adapter of a UNet as kohya's scripts write it: underscores for dots, an alpha for every layer."""
    found = {}
    for number, (name, layer) in enumerate(_layers(module, targets)):
        key = f"{prefix}{name.replace('.', '_')}"
        found |= dict(_matrices(key, layer.weight.shape, number, "lora_down", "lora_up"))
        found[f"{key}.alpha"] = torch.tensor(1.0)
    return found


def of_others(family: str, module: nn.Module, *, underscores: bool) -> dict[str, Tensor]:
    """Return an adapter by the names of the model's first publisher: ``diffusion_model.`` before, or kohya's form."""
    blocks, names = OF_OTHERS[family]
    width = next(layer for name, layer in module.named_modules() if name.endswith("to_q")).weight.shape
    found: dict[str, Tensor] = {}
    inner = [layer for name, layer in module.named_modules() if re.search(r"(net\.0\.proj|w1)$", name)]
    for block in range(_depth(module, family)):
        for place, name in enumerate(names):
            rows = inner[0].weight.shape[0] if name.endswith(("net.0.proj", "w1")) else width[0]
            shape = (rows * 3 if name.endswith("qkv") else rows, width[1])
            key, number = f"{blocks}.{block}.{name}", 10 * block + place
            if underscores:
                key = f"lora_unet_{key.replace('.', '_')}"
                found |= dict(_matrices(key, shape, number, "lora_down", "lora_up"))
                found[f"{key}.alpha"] = torch.tensor(1.0)
            else:
                found |= dict(_matrices(f"diffusion_model.{key}", shape, number, "lora_A", "lora_B"))
    return found


def written(tensors: Mapping[str, Tensor], path: Path, **metadata: str) -> Path:
    """Write a safetensors file; return its path."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata or None)
    return path


def _depth(module: Any, family: str) -> int:
    lists = {"flux1": "transformer_blocks", "qwen_image": "transformer_blocks", "z_image": "layers", "wan21": "blocks"}
    return len(getattr(module, lists[family]))


def _layers(module: nn.Module, targets: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(tuple(f".{target}" for target in targets)):
            yield name, layer


def _matrices(key: str, shape: Sequence[int], number: int, down: str, up: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{key}.{down}.weight", _drawn((RANK, shape[1]), 2 * number)
    yield f"{key}.{up}.weight", _drawn((shape[0], RANK), 2 * number + 1)


def _drawn(shape: Sequence[int], number: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(number)) * 0.1
