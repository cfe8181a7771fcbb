"""Choice of a process's device through ``torch.accelerator``: CUDA, ROCm, XPU, NPU, MPS, or the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from flowmill.configs.errors import ConfigError


def local_rank() -> int:
    """Return this process's local rank on its machine; 0 outside torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def chosen_device(name: str, number: int = 0, *, label: str = "execution.device") -> torch.device:
    """Return the device for a setting; raise ConfigError if the machine has no such device, or not as many. ``name``:
    ``auto`` (the machine's accelerator, else the CPU), a kind such as ``cuda``, or one device, ``cuda:1``; ``number``:
    index of the device a process takes if the name has no index."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    try:
        device = torch.device(accelerator.type if name == "auto" and accelerator is not None else name)
    except RuntimeError as error:
        raise ConfigError(
            f"{label} '{name}' is no device of torch: {str(error).splitlines()[0]}. Set it to 'auto', or install the "
            "torch build that knows it."
        ) from None
    if accelerator is None or device.type != accelerator.type:
        has = "no accelerator" if accelerator is None else f"'{accelerator.type}'"
        raise ConfigError(f"{label} is '{name}', but torch finds {has} on this machine. Set it to 'auto'.")
    count = torch.accelerator.device_count()
    if device.index is not None and (number > 0 or device.index >= count):
        why = f"there are {number + 1} processes or more" if number else f"this machine has {count}"
        raise ConfigError(f"{label} '{name}' is one device, but {why}. Set it to '{device.type}'.")
    if number >= count:
        raise ConfigError(
            f"{label} is '{name}' and process {number} of this machine needs device {number}, but it has "
            f"{count}. Set execution.processes to {count} or less."
        )
    return torch.device(device.type, number if device.index is None else device.index)


def device_name(device: torch.device) -> str | None:
    """Return the manufacturer's name of a device, or None if torch does not know it."""
    ask = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return None if ask is None else str(ask(device))


def make_current(device: torch.device) -> None:
    """Make a device the current one of the calling thread: each thread starts with the machine's first device."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def as_here() -> Callable[[], None]:
    """Return a context in which another thread uses the calling one's device and number of CPU threads."""
    threads = torch.get_num_threads()
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0

    def begin() -> None:
        torch.set_num_threads(threads)
        # Threads start with device 0; selecting it would create a context on it even if only the CPU is used.
        if index != 0:
            torch.accelerator.set_device_index(index)

    return begin


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on a device; copies to an accelerator are asynchronous, from pinned memory."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without it: MPS has none, and NPUs emulate it."""
    return torch.float64 if device.type in ("cpu", "cuda", "xpu") else torch.float32


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or in float32 on a device without it."""
    return tensor.to(wide_dtype(tensor.device))
