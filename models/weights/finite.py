"""Checks that loaded weights are finite: one NaN makes every output NaN, without a hint at its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.models.weights.quantized import dequantized, is_quantized
from flowmill.models.weights.sharding import local


def check_finite(loaded: Any, label: str) -> None:
    """Check that the parameters of a loaded object are finite; raise ConfigError. ``loaded``: a module, a diffusers
    pipeline (all its components), or an object without parameters, such as a tokenizer."""
    for module in _modules(loaded):
        check_tensors(dict(module.named_parameters()), label)


def check_tensors(tensors: Mapping[str, Tensor], label: str) -> None:
    """Check that tensors are finite: this rank's part of sharded ones, none on the meta device; raise ConfigError."""
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise ConfigError(
                f"{label} holds weights that are no finite numbers ('{name}'), so that everything computed with them "
                "is not finite. Copy or download it again, or take the last model before its training diverged."
            )


def _modules(loaded: Any) -> Iterator[nn.Module]:
    if isinstance(loaded, nn.Module):
        yield loaded
    else:
        parts = getattr(loaded, "components", None)
        yield from (part for part in (parts or {}).values() if isinstance(part, nn.Module))


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    values = local(tensor)
    if is_quantized(values):
        values = dequantized(values, torch.float32)
    if values.is_meta or not values.is_floating_point() or not values.numel():
        return True
    # Minimum and maximum propagate NaN and need no memory; they do not exist for 8-bit numbers.
    low, high = torch.aminmax(values.float() if values.element_size() == 1 else values)
    return bool(torch.isfinite(low) and torch.isfinite(high))
