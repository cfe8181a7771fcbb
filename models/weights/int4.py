"""Weights of four bits that can be dequantized on any device, as a config of torchao.

The numbers are those of torchao's ``Int4WeightOnlyConfig`` in its format 'tile_packed_to_4d' (tinygemm: per group of
inputs a scale and a zero point, both floating-point numbers). That format itself needs CUDA and bfloat16, and its
product has no backward pass.

Legend: O I outputs and inputs of a layer, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import MappingType
from torchao.quantization import quant_primitives as primitives
from torchao.quantization.transform_module import register_quantize_module_handler
from torchao.utils import TorchAOBaseTensor

#: Inputs that share a scale and a zero point.
GROUP = 64
_RANGE: dict[str, Any] = {"quant_min": 0, "quant_max": 15}


@dataclass
class PackedInt4WeightConfig(AOBaseConfig):
    """Quantizes linear layers whose number of inputs is a multiple of ``GROUP``; others stay as they are."""


class PackedInt4(TorchAOBaseTensor):
    """A (O, I) weight, two numbers per byte."""

    tensor_data_names: ClassVar = ["pairs", "scale", "zero"]
    tensor_attribute_names: ClassVar = ["dtype"]

    def __new__(cls, pairs: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> PackedInt4:
        """Return a tensor that computes in ``dtype``; of (O, I / 2) uint8 pairs, and (O, G) scales and zero points."""
        shape = (pairs.shape[0], 2 * pairs.shape[1])
        return torch.Tensor._make_wrapper_subclass(cls, shape, device=pairs.device, dtype=dtype)  # type: ignore[no-any-return]

    def __init__(self, pairs: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> None:
        self.pairs, self.scale, self.zero = pairs, scale, zero

    @classmethod
    def of(cls, weight: Tensor) -> PackedInt4:
        """Return the quantized numbers of a (O, I) floating-point weight."""
        block, kind = (1, GROUP), weight.dtype
        scale, zero = primitives._choose_qparams_affine_tinygemm(
            weight, MappingType.ASYMMETRIC, block, torch.int32, scale_dtype=kind, zero_point_dtype=kind, **_RANGE
        )
        scale, zero = (each.reshape(weight.shape[0], -1) for each in (scale, zero))
        numbers = primitives._quantize_affine_tinygemm(weight, block, scale, zero, torch.int32, **_RANGE)
        numbers = numbers.to(torch.uint8)
        return cls(numbers[:, ::2] << 4 | numbers[:, 1::2], scale, zero, kind)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Return the (O, I) numbers in a dtype, by default that of the weight."""
        numbers = torch.stack((self.pairs >> 4, self.pairs & 15), -1).flatten(1)
        weight: Tensor = primitives._dequantize_affine_tinygemm(
            numbers, (1, GROUP), self.scale, self.zero, torch.uint8, output_dtype=self.dtype, **_RANGE
        )
        return weight.to(output_dtype or self.dtype)


@register_quantize_module_handler(PackedInt4WeightConfig)  # type: ignore[untyped-decorator]
def _quantize(module: nn.Linear, config: PackedInt4WeightConfig) -> nn.Module:
    if module.in_features % GROUP == 0:
        module.weight = nn.Parameter(PackedInt4.of(module.weight.detach()), requires_grad=False)
    return module
