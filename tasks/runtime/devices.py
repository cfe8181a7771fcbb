"""Memory and kernels of a process's device, see ``flowmill.models.devices``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flowmill.models.weights.sharding import local
from flowmill.tasks.runtime.process_memory import process_peak


def free_cached_memory(device: torch.device) -> None:
    """Return unused cached memory to the device."""
    if device.type != "cpu":
        torch.accelerator.memory.empty_cache()


def use_deterministic_kernels() -> None:
    """Choose kernels with bitwise reproducible results; an operation without one raises an error that names it."""
    # cuBLAS reads this on first use; see torch.use_deterministic_algorithms.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak bytes of tensors on an accelerator since the last call, as 'peak'.

    'reserved' is the peak memory of its allocator; a much higher value means that memory is fragmented. On the CPU the
    peak is that of the process, and 'reserved' is missing.
    """
    if device.type == "cpu":
        return {"peak": process_peak()}
    peak, reserved = torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return {"peak": int(peak), "reserved": int(reserved)}


def allocator_advice(device: torch.device) -> str:
    """Return a remedy as a sentence if a tenth of an accelerator's reserved memory is fragmented; else ''.

    Expandable segments make most of it usable (torch's notes on CUDA, "Optimizing memory usage with
    PYTORCH_ALLOC_CONF").
    """
    if device.type != "cuda" or "expandable_segments" in os.environ.get("PYTORCH_ALLOC_CONF", ""):
        return ""
    reserved, allocated = torch.accelerator.memory_reserved(device), torch.accelerator.memory_allocated(device)
    if reserved - allocated < reserved / 10:
        return ""
    return (
        f"{(reserved - allocated) / 1e9:.1f} GB are reserved in pieces that nothing fits into: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment."
    )


def module_bytes(module: Any) -> int:
    """Return the bytes of a module's parameters and buffers on this rank."""
    return sum(_bytes(local(tensor)) for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; a quantized one consists of several."""
    if is_traceable_wrapper_subclass(tensor):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)
    return tensor.numel() * tensor.element_size() + (0 if scales is None else _bytes(scales))
