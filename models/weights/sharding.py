"""Weights spread over ranks (FSDP2, ``torch.distributed.fsdp.fully_shard``): each rank holds a part of every tensor.

All ranks hold the weights together, or each of several groups of them does (HSDP): then a tensor has two placements, of
which the second says which part of it is here.

A block is whole only while it computes. Functions here work on plain tensors too, so that nothing else
needs to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Over which ranks, and where parts lie while nothing computes."""

    mesh: DeviceMesh
    """One dimension: all ranks; two: groups that hold the same, and the ranks of each."""
    offload: bool = False
    """Parameters, gradients and optimizer state stay in host memory."""

    @classmethod
    def over(cls, device: torch.device, *, world: int, size: int, offload: bool) -> Sharding:
        """Return a spread over ranks; all ask together.

        Args:
            device: this rank's.
            world: ranks.
            size: ranks next to each other that hold all weights together; every group of so many does.
            offload: parts stay in host memory.
        """
        shape, names = ((world,), ("parts",)) if size == world else ((world // size, size), ("copies", "parts"))
        return cls(mesh=init_device_mesh(device.type, shape, mesh_dim_names=names), offload=offload)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def shard(self, modules: Iterable[nn.Module], blocks: Sequence[str]) -> None:
        """Spread modules over the ranks, in place: the blocks in lists of these names each on its own."""
        policy = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu") if self.offload else OffloadPolicy()
        for module in modules:
            for block in units(module, blocks):
                fully_shard(block, mesh=self.mesh, offload_policy=policy, reshard_after_forward=True)
            # The root too is taken apart after its forward: its weights may be exchanged between two of them.
            fully_shard(module, mesh=self.mesh, offload_policy=policy, reshard_after_forward=True)
            for part in sharded_parts(module):
                # Losses are divided by the rows of all ranks already, so gradients are added up.
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def shard_layers(self, module: nn.Module) -> None:
        """Spread a frozen module over the ranks, in place: each of its layers on its own, which is whole on the device
        only while it computes. Weights outside of layers stay whole on every rank, and on its device, so that
        functions of the module other than its forward work as before.
        """
        for layer in layers(module):
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=True)


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists of several modules, those without parameters aside."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from layers(child)


def units(module: nn.Module, blocks: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the blocks of a denoiser: those in lists of these names, and modules that are no list themselves."""
    for name in blocks:
        held = dict(module.named_modules()).get(name)
        yield from held if isinstance(held, nn.ModuleList) else () if held is None else (held,)


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that are spread on their own."""
    yield from (part for part in module.modules() if isinstance(part, FSDPModule))


def gather(module: nn.Module) -> None:
    """Make a module's weights whole on every rank and keep them so: it then computes without the other ranks."""
    for part in sharded_parts(module):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def scatter(module: nn.Module) -> None:
    """Take a gathered module's weights apart again; changes to the whole are lost."""
    for part in sharded_parts(module):
        part.reshard()
        part.set_reshard_after_forward(True, recurse=False)


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor; of one that is spread all ranks must ask for it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(pattern: Tensor, part: Tensor, shape: torch.Size) -> Tensor:
    """Return this rank's part as one of a tensor of ``shape`` that is spread as the pattern is, in the part's memory.

    ``DTensor.from_local`` copies a part in host memory to the devices of the mesh.
    """
    if not isinstance(pattern, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(
        pattern.device_mesh, pattern.placements, tensor_meta=TensorMeta(shape=shape, stride=stride, dtype=part.dtype)
    )
    made: Tensor = DTensor(part, spec, requires_grad=False)
    return made


@torch.no_grad()
def between(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Return start + weight * (end - start) of tensors that are spread alike, spread as they are."""
    made = torch.empty_like(start)
    torch.lerp(local(start), local(end), weight, out=local(made))
    return made


@torch.no_grad()
def exchange(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Exchange the contents of tensors that are spread alike."""
    for one, other in zip(left, right, strict=True):
        kept = local(one).clone()
        local(one).copy_(local(other))
        local(other).copy_(kept)


def number(tensor: Tensor) -> float:
    """Return a scalar, spread or not."""
    return float(whole(tensor))
