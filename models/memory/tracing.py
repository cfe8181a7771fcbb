"""Memory of work with models, measured without allocating it: the real layers run on tensors without data.

Every operation runs on fake tensors (``torch._subclasses.FakeTensorMode``), while allocated and released storages are
counted. Models are built with two blocks of a kind, and then with three: each further block of a kind keeps the same
memory, so that of the whole model is extrapolated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowmill.models.memory.autocast_rules import CudaCasts
from flowmill.models.policies.attention_masks import KnownLayouts, WholeMasks
from flowmill.models.policies.trainable import Trainable

#: Blocks of a kind in the first measurement; one more gives the memory each keeps.
_FEW = 2
_CPU = torch.device("cpu")

#: Blocks by the name of their list and their place in it.
Blocks = frozenset[tuple[str, int]]
#: The name of a list of blocks, and the places of equal blocks in it.
Group = tuple[str, Sequence[int]]


class NotMeasuredError(Exception):
    """A model's memory is unknown without its weights; the message is a note."""


class Traced(NamedTuple):
    """Bytes of some work, without weights and their gradients."""

    peak: int
    """The maximum."""
    retained: int
    """In use at a point that the work chooses."""


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages from their allocation until their release.

    ``torch.distributed._tools.mem_tracker.MemTracker`` does too, but does not support frozen weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: int = 0
        """Bytes in use."""
        self.peak: int = 0
        """Peak bytes in use."""
        self.retained: int = 0
        """Bytes in use at a point that the work chooses."""
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, inputs)
        return result

    def _note(self, tensor: Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        # Storages of inputs are not new, such as that of a view of a weight.
        if id(storage) in inputs or storage in self._counted:
            return
        self._counted.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


@contextmanager
def traced(fakes: FakeTensorMode, *, layouts: bool = False) -> Iterator[PeakMemory]:
    """Count allocations inside the context, on fake tensors, with CUDA's autocast rules.

    Args:
        layouts: tensors that depend on sizes alone keep their content.
    """
    with fakes, CudaCasts(), WholeMasks(), KnownLayouts() if layouts else nullcontext(), PeakMemory() as memory:
        yield memory


#: Results of all tracers: batch sizes and strategies change few of them.
_RESULTS: dict[tuple[Any, ...], Traced] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracer:
    """Measures work with a model."""

    label: str
    """Class of the model."""
    key: str
    """Everything that results depend on, apart from the work and its sizes; equal measures are traced once."""
    build: Callable[[Blocks, FakeTensorMode], Any]
    """Returns the model with some of its blocks on fake tensors."""
    groups: Sequence[Group] = ()
    """Its blocks."""
    layouts: bool = False
    """See ``traced``."""

    def __call__(self, work: Callable[..., None], *sizes: int, gradient: bool = False) -> Traced:
        """Return the memory of some work with the whole model.

        Args:
            work: takes the model, the ``PeakMemory`` that counts, and the sizes.
            sizes: the number of rows, and further sizes.
            gradient: the work includes a backward pass.

        Raises:
            NotMeasuredError: the class needs the values of tensors, for example to choose experts.
        """
        name = (self.label, self.key, work.__qualname__, sizes)
        if name not in _RESULTS:
            _RESULTS[name] = self._whole(work, *sizes, gradient=gradient)
        return _RESULTS[name]

    def _whole(self, work: Callable[..., None], rows: int, *sizes: int, gradient: bool) -> Traced:
        try:
            return extrapolated(lambda some: self.of(some, work, rows, *sizes, gradient=gradient), self.groups)
        except Exception as error:  # layers of any class, on fake tensors
            if isinstance(error, DataDependentOutputException) and rows > 1:
                # Models that choose a denoiser by each row's noise level are traced with one row.
                peak, retained = self(work, 1, *sizes, gradient=gradient)
                return Traced(rows * peak, rows * retained)
            raise NotMeasuredError(
                f"memory: not estimated, as layers of a '{self.label}' cannot be carried out without numbers."
            ) from error

    def of(self, blocks: Blocks, work: Callable[..., None], *sizes: int, gradient: bool = False) -> Traced:
        """Return the memory of some work with the model of some blocks."""
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        model = self.build(blocks, fakes)
        with traced(fakes, layouts=self.layouts) as memory, torch.set_grad_enabled(gradient):
            work(model, memory, *sizes)
        return Traced(memory.peak, memory.retained)


def kinds(module: nn.Module, blocks: Sequence[str]) -> list[Group]:
    """Return the indices of equal blocks (same class and shapes of parameters), with the name of their list."""
    groups: dict[tuple[str, Any], list[int]] = {}
    for name in blocks:
        modules = getattr(module, name, None)
        if isinstance(modules, nn.ModuleList):
            for place, block in enumerate(modules):
                shapes = tuple((key, tuple(p.shape)) for key, p in block.named_parameters())
                groups.setdefault((name, (type(block), shapes)), []).append(place)
    return [(name, places) for (name, _), places in groups.items()]


def extrapolated(measure: Callable[[Blocks], Traced], groups: Sequence[Group]) -> Traced:
    """Return a measure of a whole model, from those of two and of three of its blocks of each kind.

    The peak is in the last block of some kind: its own memory, and that retained by all blocks before it.
    """
    if all(len(places) <= _FEW for _, places in groups):
        return measure(frozenset((name, place) for name, places in groups for place in places))
    largest = before = np.zeros(2, np.int64)
    for name, places in groups:
        few = more = np.array(measure(frozenset((name, place) for place in places[:_FEW])))
        if len(places) > _FEW:
            more = np.array(measure(frozenset((name, place) for place in places[: _FEW + 1])))
        largest = np.maximum(largest, before + few + (more - few) * max(0, len(places) - _FEW))
        before = before + (more - few) * len(places)
    return Traced(*largest.tolist())


def make_fake(trainable: Trainable, fakes: FakeTensorMode) -> None:
    """Make the tensors of a trained model without weights fake, and drop gradients as soon as they are complete:
    training counts them separately."""
    for module in trainable.policy.trained.values():
        fake_module(module, fakes)
    if trainable.merged is not None:
        with fakes:
            # Sums of weights and adapters are weights.
            trainable.merged.refresh()
    for parameter in trainable.parameters():
        parameter.register_post_accumulate_grad_hook(forget_gradient)


def fake_module(module: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """Replace the parameters and buffers of a meta module by fake CPU tensors, in place; tied ones stay tied."""
    copies: dict[int, Any] = {}
    originals = []
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) not in copies:
                    fake: Any = FakeTensor(fakes, tensor.detach().to("meta"), _CPU)
                    copies[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if slots is part._parameters else fake
                    # While it lives no other tensor has its id.
                    originals.append(tensor)
                if tensor is not None:
                    slots[name] = copies[id(tensor)]
    return module


def forget_gradient(parameter: Tensor) -> None:
    """Drop a gradient as soon as it is complete."""
    parameter.grad = None
