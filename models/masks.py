"""What models pick by masks, on tensors without content: all rows are picked, and none of those that are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary


class WholeMasks(TorchFunctionMode):
    """Inside, masks without content are full, their inverses empty, and what is asked of such a tensor is true.

    Models that put padding last take the rows a mask picks and then the others: together as many, whatever it says.
    """

    def __init__(self) -> None:
        """Know no inverses."""
        super().__init__()
        # By identity: tensors that are compared are compared number by number.
        self._empty = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out a function, or answer it."""
        if func is torch.Tensor.__bool__ and _is_empty(args[0]):
            return True
        if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
            return (args[0][:0] if args[1] in self._empty else args[0]).clone()
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__invert__ and _is_mask(result):
            self._empty[result] = True
        return result


def _is_empty(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def _is_mask(value: Any) -> bool:
    return _is_empty(value) and value.dtype == torch.bool
