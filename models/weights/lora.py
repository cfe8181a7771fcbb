"""Low-rank adapters: selecting their layers, counting their parameters, and adding them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from flowmill.configs.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters on a policy's denoisers."""

    rank: int
    alpha: int
    """Scale is alpha / rank."""
    targets: tuple[str, ...]
    """Module name suffixes."""
    untrained: tuple[str, ...] = ()
    """Names of parts whose layers get none; see ``flowmill.models.policies.base:Policy``."""


def within(name: str, parts: Sequence[str]) -> bool:
    """Return whether a layer or parameter is in one of some parts, wherever these are in the model."""
    return bool(parts) and not set(parts).isdisjoint(name.split("."))


def targeted(name: str, targets: Sequence[str]) -> bool:
    """Return whether a target matches a layer's name, as in peft's lists of targets."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _takes_adapters(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d | nn.Conv3d]:
    return isinstance(layer, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d) or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is linear with a weight of shape (inputs, outputs): transformers' ``Conv1D`` of GPT-2."""
    # Compares names to avoid importing transformers.
    return any(
        kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D" for kind in type(layer).__mro__
    )


def check_lora_targets(name: str, module: nn.Module, targets: Sequence[str], untrained: Sequence[str] = ()) -> None:
    """Check that every LoRA target names at least one linear or convolution layer; raise ConfigError if a target
    matches no layer, so part of the model would silently stay untrained."""
    layers = [key for key, layer in module.named_modules() if _takes_adapters(layer) and not within(key, untrained)]
    for target in targets:
        if not any(targeted(key, [target]) for key in layers):
            examples = sorted({key.split(".", 2)[-1] for key in layers})[:12]
            raise ConfigError(
                f"model.lora: '{target}', of targets or of the adapter of start, matches no layer of '{name}', so it "
                f"would silently stay untrained. Layers end in, for example: {', '.join(examples)}."
            )


def lora_parameters(module: nn.Module, lora: LoraSpec) -> int:
    """Return the number of adapter parameters; each layer gets (rank, inputs) and (outputs, rank)."""
    sizes = [layer.weight.shape for _, layer in _adapted(module, lora)]
    return sum(lora.rank * (size[0] + size[1:].numel()) for size in sizes)


def adapted_parameters(module: nn.Module, lora: LoraSpec) -> int:
    """Return the number of parameters of the adapted weights."""
    return sum(layer.weight.numel() for _, layer in _adapted(module, lora))


def _adapted(module: nn.Module, lora: LoraSpec) -> Iterator[tuple[str, nn.Linear | nn.Conv2d | nn.Conv3d]]:
    for name, layer in module.named_modules():
        if _takes_adapters(layer) and targeted(name, lora.targets) and not within(name, lora.untrained):
            yield name, layer


def stack_note(module: nn.Module) -> str | None:
    """Return a note on weights of an adapted model that can have no adapters, None if there are none: stacks of
    matrices, as routed experts are, which are in no layer."""
    layers = [name for name, layer in module.named_modules() if isinstance(layer, _ConvNd)]
    parts = {
        name: parameter.numel()
        for name, parameter in module.named_parameters()
        if parameter.ndim == 3 and min(parameter.shape) > 1 and name.rpartition(".")[0] not in layers
    }
    if not parts:
        return None
    own = sum(parameter.numel() for name, parameter in module.named_parameters() if ".lora_" not in name)
    share = sum(parts.values()) / own
    return (
        f"model.lora: {share:.0%} of the model, its routed experts ('{next(iter(parts))}' and {len(parts) - 1} more), "
        "get no adapters, which only layers have, and stay untrained. To train them too, train all weights "
        "(model.lora: null)."
    )


def block_layers(module: nn.Module) -> tuple[str, ...]:
    """Return targets that match the linear layers in the numbered blocks of a model: their names within a block."""
    layers = (name for name, part in module.named_modules() if _takes_adapters(part))
    matches = (re.fullmatch(r"(?:.*\.)?\d+\.(.+)", name) for name in layers)
    return tuple(sorted({each[1] for each in matches if each}))


def add_lora(name: str, module: Any, lora: LoraSpec, *, seed: int, autocast: bool = True) -> None:
    """Add adapters to a model in place and freeze all other weights; adapters have memory even if the model is on meta.
    Raises ConfigError if a target matches no layer. ``autocast``: whether the model is called under autocast."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    check_lora_targets(name, module, lora.targets, lora.untrained)
    layers = dict(_adapted(module, lora))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        init_lora_weights="gaussian",
        target_modules=list(layers if lora.untrained else lora.targets),
        fan_in_fan_out=all(map(is_transposed, layers.values())),
    )
    # peft draws initial weights from the global generator; the surrounding program's draws must not change.
    with _as_if_in_memory(module), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns of a model with layers of both kinds, but handles each correctly.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        # It only cannot merge adapters into a quantized layer.
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated")
        torch.manual_seed(seed)
        module.insert_adapters(config) if hasattr(module, "insert_adapters") else insert_adapters(module, config)
    for layer in module.modules():
        if autocast and isinstance(layer, LoraLayer):
            # peft casts inputs to the adapters' float32, and autocast casts them back: the same numbers, two copies.
            layer.cast_input_dtype_enabled = False


def insert_adapters(module: Any, config: Any) -> None:
    """Insert adapters by peft itself: ``add_adapter`` of transformers refuses releases of peft that work."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, module)
    module._hf_peft_config_loaded = True


def use_adapters(module: nn.Module, used: bool) -> None:
    """Compute with a module's adapters, or without them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.enable_adapters(used)


@contextmanager
def _as_if_in_memory(module: nn.Module) -> Iterator[None]:
    """Replace meta parameters with host tensors that expand one number: peft creates adapters on the layer's device."""
    empty = [
        (part, name, p) for part in module.modules() for name, p in part.named_parameters(recurse=False) if p.is_meta
    ]
    for part, name, parameter in empty:
        stand_in = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
        setattr(part, name, torch.nn.Parameter(stand_in, requires_grad=False))
    yield
    for part, name, parameter in empty:
        # peft freezes parameters in memory the same way.
        setattr(part, name, parameter.requires_grad_(False))
