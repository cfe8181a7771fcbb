"""Which device a process works on, through ``torch.accelerator``: CUDA, ROCm, XPU, NPU, MPS, or none of them."""

from __future__ import annotations

import os
import resource
import sys

import torch

from configs.errors import ConfigError


def local_rank() -> int:
    """Return this process's number among those of its machine; 0 outside torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def chosen_device(name: str, number: int = 0) -> torch.device:
    """Return the device ``execution.device`` stands for.

    Args:
        name: ``auto`` (the machine's accelerator, else the CPU), a kind such as ``cuda``, or one device, ``cuda:1``.
        number: which of the devices of its kind a process takes that is told the kind alone.

    Raises:
        ConfigError: the machine has no such device, or not as many.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and found is None):
        return torch.device("cpu")
    try:
        wanted = torch.device(found.type if name == "auto" and found is not None else name)
    except RuntimeError as error:
        raise ConfigError(f"execution.device '{name}' is no device of torch: {str(error).splitlines()[0]}") from None
    if found is None or wanted.type != found.type:
        has = "no accelerator" if found is None else f"'{found.type}'"
        raise ConfigError(f"execution.device is '{name}', but torch finds {has} on this machine. Set it to 'auto'.")
    count = torch.accelerator.device_count()
    if wanted.index is not None and (number > 0 or wanted.index >= count):
        why = f"there are {number + 1} processes or more" if number else f"this machine has {count}"
        raise ConfigError(f"execution.device '{name}' is one device, but {why}. Set it to '{wanted.type}'.")
    if number >= count:
        raise ConfigError(
            f"execution.device is '{name}' and process {number} of this machine needs device {number}, but it has "
            f"{count}. Set execution.processes to {count} or less."
        )
    return torch.device(wanted.type, number if wanted.index is None else wanted.index)


def free_cached_memory(device: torch.device) -> None:
    """Give memory that nothing uses any more back to the device."""
    if device.type != "cpu":
        torch.accelerator.memory.empty_cache()


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on a device; to an accelerator it is copied from pinned memory, and nothing waits for it."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def use_deterministic_kernels() -> None:
    """Choose kernels that give the same bits every time; an operation that has none is an error that names it."""
    # Read by cuBLAS when it first works; see torch.use_deterministic_algorithms.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors took on an accelerator since this was asked last; on the CPU, the process."""
    if device.type == "cpu":
        # In KiB on Linux, in bytes on macOS; the system keeps no peak that can be reset.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peak = torch.accelerator.max_memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    return int(peak)
