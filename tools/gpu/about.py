"""On what it was measured: builds, devices, drivers, flags."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from flowmill.models.devices import device_name

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")


def header(device: torch.device) -> list[str]:
    """Return lines of Markdown that say what this is measured on."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    flags = {
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32 of cuBLAS": torch.backends.cuda.matmul.allow_tf32,
        "TF32 of cuDNN": torch.backends.cudnn.allow_tf32,
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
    }
    return [
        f"- device: {device_name(device) or device.type}, {count} of them; CUDA {torch.version.cuda}, "
        f"ROCm {torch.version.hip}, driver {_driver(device)}",
        f"- builds: Python {platform.python_version()}, " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "- flags: " + ", ".join(f"{name} {value}" for name, value in flags.items() if value != ""),
        f"- machine: {os.cpu_count()} cores, {platform.machine()}",
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _driver(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.cuda is None:
        return "unknown"
    found = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return f"for CUDA {found // 1000}.{found % 1000 // 10}"
