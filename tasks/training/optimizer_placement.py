"""An optimizer for parameters and moments on different devices: it brings them together for a step, in chunks.

Moments stay in host memory while models compute on a device (``offload: optimizer``), or parameters and gradients
are there while moments stay on the device (``offload: parameters``). A step is elementwise, so results are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flowmill.models.weights.sharding import local, spread_like
from flowmill.tasks.modalities.memory import AT_A_TIME


class PlacedOptimizer:
    """Moves parameters and moments to a device for a step, if they are not there."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        make: Callable[[Sequence[nn.Parameter]], Any],
        device: torch.device,
        *,
        resting: bool,
    ) -> None:
        """Bind to parameters.

        Args:
            parameters: float32, on the device or in host memory.
            make: makes the optimizer of some parameters.
            device: the device of the steps.
            resting: keep moments in host memory between steps.
        """
        self._device, self._resting = device, resting
        self._parts: list[tuple[list[tuple[nn.Parameter, nn.Parameter]], Any]] = []
        self._of: dict[nn.Parameter, tuple[nn.Parameter, Any]] = {}
        for some in _some(parameters, AT_A_TIME):
            pairs = [(own, _twin(own, device)) for own in some]
            optimizer = make([twin for _, twin in pairs])
            self._parts.append((pairs, optimizer))
            self._of |= {own: (twin, optimizer) for own, twin in pairs}

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters."""
        for pairs, optimizer in self._parts:
            with _together(pairs, self._device):
                if self._resting:
                    _move(optimizer, [twin for _, twin in pairs], self._device)
                optimizer.step()
            self._rest(optimizer, [twin for _, twin in pairs])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for own in self._of:
            own.grad = None

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for _, optimizer in self._parts:
            optimizer.set_learning_rate(rate)

    def begin(self, parameter: nn.Parameter) -> None:
        """Create the initial moments of a parameter."""
        twin, optimizer = self._of[parameter]
        optimizer.begin(twin)
        self._rest(optimizer, [twin])

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a parameter, by kind, as stored; empty before its first step."""
        twin, optimizer = self._of[parameter]
        moments: dict[str, Tensor] = optimizer.moments(twin)
        return moments

    def _rest(self, optimizer: Any, twins: Sequence[nn.Parameter]) -> None:
        if self._resting:
            _move(optimizer, twins, torch.device("cpu"))


def _some(parameters: Sequence[nn.Parameter], numbers: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, in groups of at most ``numbers`` local values and at least one parameter."""
    some: list[nn.Parameter] = []
    count = 0
    for parameter in parameters:
        size = local(parameter).numel()
        if some and count + size > numbers:
            yield some
            some, count = [], 0
        some.append(parameter)
        count += size
    if some:
        yield some


def _twin(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a device parameter with the same sharding and no storage yet; the parameter itself if it is there."""
    own = local(parameter.detach())
    if own.device.type == device.type:
        return parameter
    there = torch.empty_like(own, device=device)
    there.untyped_storage().resize_(0)
    return nn.Parameter(spread_like(parameter, there, parameter.shape))


@contextmanager
def _together(pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], device: torch.device) -> Iterator[None]:
    """Inside, hold parameters and gradients on the device; afterwards write the new parameters back."""
    apart = [(own, twin) for own, twin in pairs if own is not twin]
    for own, twin in apart:
        part = local(own.detach())
        local(twin.detach()).untyped_storage().resize_(part.numel() * part.element_size())
        local(twin.detach()).copy_(part)
        twin.grad = None if own.grad is None else spread_like(own, local(own.grad).to(device), own.shape)
    yield
    for own, twin in apart:
        local(own.detach()).copy_(local(twin.detach()))
        twin.grad = None
        local(twin.detach()).untyped_storage().resize_(0)


def _move(optimizer: Any, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    for parameter in parameters:
        moments = optimizer.state.get(parameter, {})
        for kind, value in moments.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                moments[kind] = _moved(value, device)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; a copy in host memory is pinned, for faster transfers."""
    part = local(value)
    if device.type != "cpu" or part.device.type == "cpu":
        return value.to(device)
    return spread_like(value, _pinned(part), value.shape)


def _pinned(value: Tensor) -> Tensor:
    """Return a copy in pinned host memory, including the inner tensors of 8-bit moments."""
    if not is_traceable_wrapper_subclass(value):
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)
    names, context = value.__tensor_flatten__()
    inner = {name: _pinned(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
