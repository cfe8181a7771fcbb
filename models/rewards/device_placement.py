"""Placement of idle reward models: an accelerator's memory is for models in use."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_HOST = "cpu"


def settled(module: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a loaded model of a reward, frozen, on its device. ``dtype``: dtype of its weights; None: unchanged."""
    return module.to(dtype=dtype).eval().requires_grad_(False).to(device)


class Placed:
    """The modules of one reward, on its device while it scores and until ``rest`` offloads them."""

    def __init__(self, reward: object) -> None:
        """Record the devices of the modules of a new reward; those in host memory stay there."""
        placed = ((module, device_of(module)) for module in modules_of(reward))
        self._homes = [(module, device) for module, device in placed if device is not None and device.type != _HOST]
        self._resting = False
        self._users = 0
        self._lock = threading.Lock()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep the modules on their device inside the context; several threads may score at a time."""
        with self._lock:
            self._users += 1
            if self._resting:
                for module, device in self._homes:
                    module.to(device)
                self._resting = False
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1

    def rest(self) -> bool:
        """Move the modules to host memory unless in use; return whether any moved."""
        with self._lock:
            if self._users or self._resting or not self._homes:
                return False
            for module, _ in self._homes:
                module.to(_HOST)
            self._resting = True
            return True


def modules_of(reward: object) -> list[nn.Module]:
    """Return the modules among a reward's attributes, and those of pipelines and rewards it uses, each once."""
    # A reward that did not import torch has none, and scoring with it need not import torch.
    if "torch" not in sys.modules:
        return []
    from torch import nn

    from flowmill.models.policies.base import Policy

    modules: dict[int, nn.Module] = {}
    # Functions and objects with slots hold no modules.
    for value in getattr(reward, "__dict__", {}).values():
        if isinstance(value, nn.Module):
            inner = [value]
        elif isinstance(value, Policy):
            inner = list(value.modules().values())
        else:
            inner = modules_of(value) if hasattr(value, "score") else []
        modules |= {id(module): module for module in inner}
    return list(modules.values())


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module's first tensor, or None if it has no tensors."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return None
