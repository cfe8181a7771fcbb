"""Weights sharded over ranks (FSDP2, ``torch.distributed.fsdp.fully_shard``): each rank holds a part of every tensor.

All ranks together hold the weights once, or each of several groups does (HSDP): then a tensor has two placements, and
the second gives this rank's part.

A block is whole only while it computes. The functions here also accept plain tensors, so callers need not distinguish.
Functions import torch.distributed, as that takes a second and a check of a config shards nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flowmill.models.weights.lora import within

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The ranks that hold the weights, and the memory of idle parts."""

    mesh: DeviceMesh
    """One dimension: all ranks; two: groups with equal contents, and the ranks of each group."""
    offload: bool = False
    """Parameters, gradients and optimizer state stay in host memory."""

    @classmethod
    def over(cls, device: torch.device, *, world: int, size: int, offload: bool) -> Sharding:
        """Return a sharding over ranks; all ranks must call this together. ``size``: number of consecutive ranks per
        group; each group holds all weights."""
        from torch.distributed.device_mesh import init_device_mesh

        shape, names = ((world,), ("parts",)) if size == world else ((world // size, size), ("copies", "parts"))
        return cls(mesh=init_device_mesh(device.type, shape, mesh_dim_names=names), offload=offload)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def shard(self, modules: Iterable[nn.Module], blocks: Sequence[str], untrained: Sequence[str] = ()) -> None:
        """Shard modules over the ranks in place; each block in the lists of these names is a separate unit.
        ``untrained``: names of parts that stay whole on every rank, so that it can call them by themselves."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        policy = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu") if self.offload else OffloadPolicy()
        for module in modules:
            for block in units(module, blocks):
                fully_shard(block, mesh=self.mesh, offload_policy=policy, reshard_after_forward=True)
            apart = {parameter for name, parameter in module.named_parameters() if within(name, untrained)}
            # The root is also resharded after its forward: its weights may be exchanged between two forwards.
            fully_shard(
                module,
                mesh=self.mesh,
                offload_policy=policy,
                reshard_after_forward=True,
                ignored_params=apart or None,
            )
            for part in sharded_parts(module):
                # Losses are already divided by the rows of all ranks, so gradients are summed.
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)


def units(module: nn.Module, blocks: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the blocks of a denoiser by attribute names: the members of lists, and other modules themselves."""
    for name in blocks:
        part = dict(module.named_modules()).get(name)
        yield from part if isinstance(part, nn.ModuleList) else () if part is None else (part,)


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that are sharded as separate units."""
    from torch.distributed.fsdp import FSDPModule

    yield from (part for part in module.modules() if isinstance(part, FSDPModule))


def gather(module: nn.Module) -> None:
    """Make a module's weights whole on every rank and keep them whole: it then computes without the other ranks."""
    for part in sharded_parts(module):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def scatter(module: nn.Module) -> None:
    """Shard a gathered module's weights again; changes to the whole weights are lost."""
    for part in sharded_parts(module):
        part.reshard()
        part.set_reshard_after_forward(True, recurse=False)


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor; if it is sharded, all ranks must call this together."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares memory with the tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(pattern: Tensor, part: Tensor, shape: torch.Size) -> Tensor:
    """Return this rank's part as a tensor of ``shape`` sharded like ``pattern``, sharing the part's memory.
    ``DTensor.from_local`` would copy a part in host memory to the devices of the mesh."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if not isinstance(pattern, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(
        pattern.device_mesh, pattern.placements, tensor_meta=TensorMeta(shape=shape, stride=stride, dtype=part.dtype)
    )
    return DTensor(part, spec, requires_grad=False)


@torch.no_grad()
def between(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Return start + weight * (end - start) of equally sharded tensors, sharded like them."""
    result = torch.empty_like(start)
    torch.lerp(local(start), local(end), weight, out=local(result))
    return result


@torch.no_grad()
def exchange(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Exchange the contents of equally sharded tensors."""
    for one, other in zip(left, right, strict=True):
        original = local(one).clone()
        local(one).copy_(local(other))
        local(other).copy_(original)


def number(tensor: Tensor) -> float:
    """Return the value of a scalar tensor, sharded or not."""
    return float(whole(tensor))
