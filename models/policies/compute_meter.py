"""Measures the computation and time of denoisers with hooks that do not change results."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from flowmill.models.devices import device_name
from flowmill.models.policies.attention_masks import WholeMasks
from flowmill.models.weights.stored_weights import on_meta

#: Dense peak of matrix products in half precision by words of a device's name, FLOP/s, as the manufacturers state it.
#: The first entry whose words are all in the name counts.
_PEAKS: Mapping[str, float] = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
}
_CPU = torch.device("cpu")
#: A module by identity, and the shapes of its inputs, without the number of rows.
_Call = tuple[int, Any, Any]
#: FLOPs by class, config and shapes, shared by runs of this process.
_COUNTED: dict[tuple[Any, str, str], float | None] = {}


@dataclass(frozen=True, slots=True)
class Computed:
    """Computation of denoisers in a period."""

    seconds: float
    """Seconds of their forwards and backwards in one process."""
    flops: float | None
    """FLOPs of the denoisers: a backward counts twice its forward, once where only adapters are trained; recomputed
    activations and adapters do not count (PaLM, arXiv 2204.02311, appendix B). None: they cannot be counted."""


class Meter:
    """Counts the computation of modules from now on."""

    def __init__(self, *, adapters: bool, device: torch.device = _CPU, share: float = 1.0) -> None:
        """Start at zero. ``adapters``: denoisers are frozen except for adapters; ``share``: this process's share of a
        forward, if several processes share its tokens."""
        self._backward, self._share = 1 if adapters else 2, share
        self._seconds = 0.0
        self._rows: Counter[_Call] = Counter()
        self._with_gradient: Counter[_Call] = Counter()
        self._seen: dict[_Call, tuple[int, nn.Module, Any, Any]] = {}
        self._flops: dict[_Call, float | None] = {}
        """FLOPs of a row."""
        self._started: list[Any] = []
        self._events: list[tuple[Any, Any]] = []
        self._device = device

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Hook into denoisers."""
        for module in modules.values():
            module.register_forward_pre_hook(self._begin, with_kwargs=True)
            module.register_forward_hook(self._end)

    def take(self) -> Computed:
        """Return the computation since the last call; FLOPs of shapes are computed here, not during forwards."""
        if self._events:
            torch.accelerator.synchronize(self._device)
            self._seconds += sum(first.elapsed_time(last) for first, last in self._events) / 1000
            self._events.clear()
        for call, (rows, *seen) in self._seen.items():
            flops = forward_flops(*seen)
            self._flops[call] = None if flops is None else flops / rows
        self._seen.clear()
        counts = [(rows, self._flops[call]) for call, rows in self._rows.items()]
        counted = [rows * flops for rows, flops in counts if flops is not None]
        computed = Computed(self._seconds, sum(counted) * self._share if len(counted) == len(counts) else None)
        self._seconds = 0.0
        self._rows.clear()
        return computed

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time inside the context as that of the models."""
        self._started.append(self._now())
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count a backward pass through the forwards with gradient since the last one."""
        with self.timed():
            yield
        for call, rows in self._with_gradient.items():
            self._rows[call] += self._backward * rows
        self._with_gradient.clear()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        rows = _rows((args, kwargs)) or 1
        call = (id(module), _shapes(args, rows), _shapes(kwargs, rows))
        self._rows[call] += rows
        if torch.is_grad_enabled():
            self._with_gradient[call] += rows
        if call not in self._flops and call not in self._seen:
            self._seen[call] = (rows, module, *_shapes_only((args, kwargs)))
        self._started.append(self._now())

    def _end(self, *_: Any) -> None:
        start, end = self._started.pop(), self._now()
        if self._device.type == "cpu":
            self._seconds += end - start
        else:
            self._events.append((start, end))

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def timed(meter: Meter | None) -> AbstractContextManager[None]:
    """Count the time inside the context as that of the models, if there is a meter."""
    return nullcontext() if meter is None else meter.timed()


def backward(meter: Meter | None) -> AbstractContextManager[None]:
    """Count a backward pass, if there is a meter."""
    return nullcontext() if meter is None else meter.backward()


def forward_flops(module: nn.Module, args: Any, kwargs: Any) -> float | None:
    """Return the FLOPs of a denoiser's forward, counted with a copy on the meta device. None if that is impossible: it
    is not a model of diffusers, or its control flow depends on values."""
    # A sharded model has a class derived from the model's.
    kind: Any = next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))
    if not hasattr(kind, "from_config"):
        return None
    config: Any = module.config
    shapes = tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
    key = (kind, repr(sorted(dict(config).items())), repr(shapes))
    if key not in _COUNTED:
        _COUNTED[key] = _counted(kind, config, *_shapes_only((args, kwargs)))
    return _COUNTED[key]


def _counted(kind: Any, config: Any, args: Any, kwargs: Any) -> float | None:
    from torch.utils.flop_counter import FlopCounterMode

    twin = on_meta(lambda: kind.from_config(config)).float()
    with FlopCounterMode(display=False) as counter, WholeMasks(), torch.no_grad():
        try:
            twin(*args, **kwargs)
        except RuntimeError:
            return None
    return float(counter.get_total_flops())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a device, FLOP/s of dense matrix products; None if it is not in the table. For float32 it is
    None too, as that depends on settings of torch."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name(device) or ""))
    peaks = (peak for name, peak in _PEAKS.items() if words.issuperset(name.split()))
    return None if dtype == torch.float32 else next(peaks, None)


def _shapes_only(values: Any) -> Any:
    def shape_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # One dtype for all: the copy runs without autocast, which would unify the dtypes of weights and inputs.
        return torch.empty(leaf.shape, dtype=torch.float32 if leaf.is_floating_point() else leaf.dtype, device="meta")

    return tree_map(shape_of, values)


def _rows(values: Any) -> int | None:
    """Return the number of rows of a call: the length of the first tensor's first dim."""
    if isinstance(values, torch.Tensor):
        return len(values) if values.ndim else None
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else ()
    return next(filter(None, map(_rows, parts)), None)


def _shapes(values: Any, rows: int) -> Any:
    """Return the shapes of nested tensors without their rows, as a hashable key; called before every forward."""
    if isinstance(values, torch.Tensor):
        return (None, *values.shape[1:]) if values.ndim and len(values) == rows else tuple(values.shape)
    if isinstance(values, Mapping):
        return tuple((name, _shapes(value, rows)) for name, value in values.items())
    return tuple(_shapes(value, rows) for value in values) if isinstance(values, list | tuple) else None
