"""Masked selections on fake tensors, and token layouts that keep their content."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class WholeMasks(TorchFunctionMode):
    """A mode in which fake masks are full, their inverses empty, and fake tensors true as conditions. Models that put
    padding last select the rows of a mask and then the others: their total does not depend on the mask."""

    def __init__(self) -> None:
        super().__init__()
        # By identity, as == of tensors is elementwise.
        self._empty = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, or return its result, where it has one."""
        if func is torch.Tensor.__bool__ and _is_empty(args[0]):
            return True
        if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
            return (args[0][:0] if args[1] in self._empty else args[0]).clone()
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__invert__ and _is_mask(result):
            self._empty[result] = True
        return result


class KnownLayouts(TorchFunctionMode):
    """A mode in which integers and masks that depend on sizes alone keep their content; other tensors have none. Models
    that put text and images into one sequence read its length and positions from such integers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, with content if all its inputs have content."""
        options = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if func in (torch.arange, torch.tensor) or (tensors and all(map(_has_content, tensors))):
            with _disable_current_modes():
                result = func(*args, **options)
            if func is not torch.tensor or not result.is_floating_point():
                return result
        if func in (torch.Tensor.repeat_interleave, torch.repeat_interleave) and _has_content(args[1]):
            with _disable_current_modes():
                places = torch.arange(len(args[1])).repeat_interleave(args[1])
            return args[0].index_select(options["dim"], places)
        if func is torch.Tensor.__setitem__:
            args = (args[0], _as_places(args[1]), args[2])
        return func(*args, **options)


def with_content() -> AbstractContextManager[Any]:
    """Return a context with real tensors inside a trace, for code that reads their values."""
    return _disable_current_modes()


def _as_places(index: Any) -> Any:
    """Return an index whose masks with content are replaced by the selected positions."""
    with _disable_current_modes():
        if isinstance(index, tuple):
            return tuple(_as_places(part) for part in index)
        picks = isinstance(index, torch.Tensor) and index.dtype == torch.bool and _has_content(index)
        return index.nonzero()[:, 0] if picks else index


def _has_content(value: Any) -> bool:
    """Return whether a tensor has content and is not floating point."""
    return isinstance(value, torch.Tensor) and not _is_empty(value) and not value.is_floating_point()


def _is_empty(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def _is_mask(value: Any) -> bool:
    return _is_empty(value) and value.dtype == torch.bool
