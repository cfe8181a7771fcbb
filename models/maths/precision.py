"""Float64 computation on devices that support it."""

from __future__ import annotations

import torch
from torch import Tensor

#: Devices with fast or at least correct float64; MPS has none, and NPUs emulate it.
_WIDE = ("cpu", "cuda", "xpu")


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without it."""
    return torch.float64 if device.type in _WIDE else torch.float32


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 on a device without it."""
    return tensor.to(wide_dtype(tensor.device))
