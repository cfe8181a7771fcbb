"""Frozen weights in few bits: the libraries' own configs quantize linear layers when a model is loaded.

A quantized layer multiplies by its dequantized weight, in rollouts, training and evaluations alike, and dequantizes
again in the backward pass. The libraries' own products of few bits are not used: bitsandbytes rounds single rows
otherwise than batches, and torchao keeps a copy of every layer for the backward pass, or has none.

Legend: N rows and tokens, O I outputs and inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flowmill.configs.errors import ConfigError
from flowmill.configs.extras import require_extra
from flowmill.models.library_loading import read_json

#: Inputs that share a scale: of ``flowmill.models.weights.int4``, which needs torchao, and of bitsandbytes.
_GROUP, _BLOCK = 64, 64
#: Bytes of a (O, I) weight whose numbers have ``number`` bytes before, as do the scales of int4; others have four, and
#: int8 a zero point.
_BYTES: Mapping[str, Callable[[int, int, int], int]] = {
    "int8": lambda outputs, inputs, number: outputs * (inputs + 5),
    "float8": lambda outputs, inputs, number: outputs * (inputs + 4),
    "int4": lambda outputs, inputs, number: (
        outputs * inputs * number if inputs % _GROUP else outputs * (inputs // 2 + inputs // _GROUP * 2 * number)
    ),
    "nf4": lambda outputs, inputs, number: outputs * inputs // 2 + -(-outputs * inputs // _BLOCK) * 4,
}
#: Bytes of a number while it is dequantized, in addition to the result.
_FURTHER: Mapping[str, int] = {"int8": 4, "float8": 8, "int4": 5, "nf4": 0}

_UNTRAINABLE = (
    "The run trains all weights, and quantized ones cannot be trained. Set model.lora to train adapters, or take the "
    "model that is not quantized."
)
#: The configs of both libraries that round as training does, as code.
CODE: Mapping[str, str] = {
    "int8": "TorchAoConfig(torchao.quantization.Int8WeightOnlyConfig())",
    "float8": "TorchAoConfig(torchao.quantization.Float8WeightOnlyConfig())",
    "int4": f"TorchAoConfig(torchao.quantization.Int4WeightOnlyConfig(group_size={_GROUP}, "
    'int4_packing_format="tile_packed_to_4d"))',
    "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=...)',
}


def check_quantizer(name: str, library: str, device: str) -> None:
    """Check that a quantizer is installed and works on a kind of device, such as "cuda"; raise ConfigError.
    ``library``: the one that loads the model, "diffusers" or "transformers"."""
    require_extra("quantize", "bitsandbytes" if name == "nf4" else "torchao", label=f"model.quantize '{name}'")
    if name == "nf4" and library == "diffusers" and device not in ("cuda", "xpu"):
        raise ConfigError(
            f"model.quantize is 'nf4', which diffusers loads on CUDA and XPU only, but the device is '{device}'. Set "
            "it to 'int4', which also takes four bits, or to 'int8'."
        )
    if name == "float8" and device == "mps":
        raise ConfigError("model.quantize is 'float8', a type that 'mps' devices lack. Set it to 'int8'.")


def quantization_config(name: str, library: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the config of diffusers or transformers that quantizes a model while it is loaded; raise ConfigError, see
    ``check_quantizer``."""
    check_quantizer(name, library, device.type)
    package = import_module(library)
    if name == "nf4":
        return package.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    if name == "int4":
        from flowmill.models.weights.int4 import PackedInt4WeightConfig

        return package.TorchAoConfig(PackedInt4WeightConfig())
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return package.TorchAoConfig(Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig())


def weight_bytes(module: nn.Module, quantizer: str | None, number: int) -> int:
    """Return the bytes of a module's weights, quantized or not; ``number``: those of a number before."""
    total = sum(parameter.numel() for parameter in module.parameters()) * number
    for outputs, inputs in _shapes(module, quantizer):
        total += quantized_bytes(quantizer, outputs, inputs, number) - outputs * inputs * number
    return total


def quantized_bytes(quantizer: str | None, outputs: int, inputs: int, number: int) -> int:
    """Return the bytes of a (O, I) weight, quantized or not; ``number``: those of a number before."""
    return outputs * inputs * number if quantizer is None else _BYTES[quantizer](outputs, inputs, number)


def dequantizing_bytes(quantizer: str | None, numbers: int, number: int) -> int:
    """Return the bytes of dequantizing ``numbers`` to ``number`` bytes each, the result included."""
    return 0 if quantizer is None else numbers * (number + _FURTHER[quantizer])


def largest_layer(module: nn.Module, quantizer: str | None) -> int:
    """Return the number of weights of a module's largest quantized layer."""
    return max((outputs * inputs for outputs, inputs in _shapes(module, quantizer)), default=0)


def _shapes(module: Any, quantizer: str | None) -> list[tuple[int, int]]:
    """Return (O, I) of the layers that are quantized; transformers leaves out the head, which embeddings may share."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    layers = [each for each in module.modules() if isinstance(each, nn.Linear) and each is not head]
    return [] if quantizer is None else [(each.out_features, each.in_features) for each in layers]


def check_stored_whole(folder: Path, parts: Iterable[str], *, label: str) -> None:
    """Check that the models of a folder, to be trained with all weights, are not stored quantized; raise ConfigError.
    ``parts``: names of components; one without a folder of its own is the folder itself."""
    for part in parts:
        file = folder / part / "config.json"
        config = read_json(file if file.is_file() else folder / "config.json").get("quantization_config")
        if config:
            raise ConfigError(
                f"{label} '{folder}' is stored quantized (quantization_config {config.get('quant_method')!r} in its "
                f"config.json). {_UNTRAINABLE}"
            )


def check_trains(name: str, parameter: Tensor) -> None:
    """Check that a loaded weight can have a gradient; raise ConfigError."""
    if is_quantized(parameter) or not parameter.is_floating_point():
        raise ConfigError(f"The model is stored quantized ('{name}' is {parameter.dtype}). {_UNTRAINABLE}")


def is_quantized(weight: Any) -> bool:
    """Return whether a weight is one of torchao or bitsandbytes."""
    return hasattr(weight, "quant_state") or any(kind.__module__.startswith("torchao") for kind in type(weight).__mro__)


def dequantized(weight: Any, dtype: torch.dtype) -> Tensor:
    """Return the (O, I) numbers of a quantized weight in a dtype."""
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).to(dtype)
    return weight.dequantize(dtype)


def compute_dequantized(modules: Iterable[nn.Module], quantizer: str) -> None:
    """Let the quantized layers of loaded modules compute with their dequantized weights; raise ConfigError if there are
    none."""
    modules = list(modules)
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]
    quantized = [layer for layer in layers if is_quantized(layer.weight)]
    if modules and not quantized:
        why = f", of which 'int4' needs a multiple of {_GROUP}" if quantizer == "int4" else ""
        most = max((layer.in_features for layer in layers), default=0)
        raise ConfigError(
            f"model.quantize is '{quantizer}', but no layer of the {type(modules[0]).__name__} was quantized: its "
            f"linear layers have up to {most} inputs{why}, or its model.policy does not read the setting. Remove it."
        )
    for layer in quantized:
        vars(layer)["forward"] = partial(_forward, layer)


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return _Dequantized.apply(inputs.to(dtype), layer.weight, bias)


class _Dequantized(torch.autograd.Function):
    """A linear layer with a frozen weight; only the quantized weight is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(inputs, dequantized(weight, inputs.dtype), bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ dequantized(ctx.weight, gradient.dtype), None, None
