"""Facts that, in addition to inputs, affect a model's exact results: device, driver, builds and precision."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

#: Written by NVIDIA's kernel module: its first line contains the version.
_DRIVER = Path("/proc/driver/nvidia/version")
_LIBRARIES = ("diffusers", "transformers", "peft")


def computing_facts(device: torch.device) -> dict[str, str]:
    """Return the facts of this process for commit records, by name, as readable text."""
    # User code may change these settings at any time.
    return {**_fixed(device), "float32_matmul": torch.get_float32_matmul_precision(), **_kernels(device)}


@cache
def _fixed(device: torch.device) -> dict[str, str]:
    """Return the facts that are constant while the process runs."""
    builds = {name: version(name) for name in _LIBRARIES}
    return {"device": _name(device), **_driver(device), "torch": torch.__version__, **_build(device), **builds}


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def _driver(device: torch.device) -> dict[str, str]:
    if device.type != "cuda" or not _DRIVER.is_file():
        return {}
    words = _DRIVER.read_text().splitlines()[0].split()
    return {"driver": next((word for word in words if word[0].isdigit() and "." in word), "unknown")}


def _build(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    return {name: str(value) for name, value in versions.items() if value is not None}


def _kernels(device: torch.device) -> dict[str, str]:
    """Return the settings that choose among kernels that round differently."""
    chosen = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        chosen |= {"cudnn_tf32": cudnn.allow_tf32, "cudnn_benchmark": cudnn.benchmark}
    return {name: str(value).lower() for name, value in chosen.items()}
