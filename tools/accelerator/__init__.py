"""A simulated accelerator: a device of torch that is none, strict about what a GPU is strict about.

Without a compiler there is none; see ``missing``.
"""

from __future__ import annotations

import os
import shutil
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

#: What torch calls the device.
NAME = "sim"
_SOURCE = Path(__file__).parent / "device.cpp"


def missing() -> str | None:
    """Return why there can be no simulated accelerator here, None where there can be."""
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator() != torch.device(NAME):
        return "this machine has an accelerator of its own"
    tools = [tool for tool in ("c++", "ninja") if _tool(tool) is None]
    return f"no {' and no '.join(tools)} to build it with" if tools else None


@cache
def simulated(folder: Path, devices: int = 2, *, doubles: bool = False) -> Any:
    """Let torch have the simulated accelerator from now on, and return what counts: ``waits()`` and ``forget()``.

    Args:
        folder: where it is built; a build that is there is used.
        devices: how many there are.
        doubles: they have float64.
    """
    from torch.utils.cpp_extension import load

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    folder.mkdir(parents=True, exist_ok=True)
    built = load("flowmill_sim", [str(_SOURCE)], build_directory=str(folder), extra_cflags=["-O0", "-w"])
    built.have(devices, doubles)
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(built))
    generate_methods_for_privateuse1_backend(unsupported_dtype=None)
    return built


def _module(built: Any) -> types.ModuleType:
    """Return what ``torch.sim`` is."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count, module.current_device = built.count, built.current
    module.set_device = lambda device: built.choose(device if isinstance(device, int) else torch.device(device).index)
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    module.get_rng_state = lambda device=None: torch.random.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    return module  # type: ignore[no-any-return]


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
