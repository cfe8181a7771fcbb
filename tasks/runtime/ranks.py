"""The group of ranks: one process, or several processes started by torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from flowmill.models.devices import make_current
from flowmill.tasks.runtime.heartbeat import Heartbeat, HeartbeatSender
from flowmill.tasks.runtime.kv_store import KeyValueStore


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank in its group."""

    rank: int = 0
    """Number of this process."""
    world: int = 1
    """Number of processes."""
    pulse: HeartbeatSender = field(default_factory=HeartbeatSender, compare=False)
    """Reports the work of this process."""
    together: int = 1
    """Number of neighboring ranks that work on the same rows."""
    group: dist.ProcessGroup | None = field(default=None, compare=False)
    """Process group for communication; None: the default group."""

    @property
    def first(self) -> bool:
        """True on the rank that writes."""
        return self.rank == 0

    def sharing(self, together: int) -> Ranks:
        """Return the same ranks with ``together`` neighbors working on the same rows."""
        return replace(self, together=together)

    @property
    def share(self) -> int:
        """Index of the share of rows that this process works on."""
        return self.rank // self.together

    @property
    def shares(self) -> int:
        """Number of shares of the rows."""
        return self.world // self.together

    @property
    def counts(self) -> bool:
        """True on the process that reports the figures of its share."""
        return self.rank % self.together == 0

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over ranks, in place, as one flat buffer; a rank without rows counts as zero.

        Parameters without a gradient on any rank keep none, as in one process. Gradients of sharded parameters are
        already summed in the backward pass.
        """
        from torch.distributed.tensor import DTensor

        if self.world == 1 or any(isinstance(parameter, DTensor) for parameter in parameters):
            return
        has = self.largest(torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8))
        used = [parameter for parameter, some in zip(parameters, has.tolist(), strict=True) if some]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in used if parameter.grad is not None]
        if not gradients:
            return
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def sum(self, values: Tensor) -> Tensor:
        """Return values summed over ranks, in place."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of all ranks' values, in place."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world > 1:
            with self.pulse.waiting():
                dist.all_reduce(values, operation)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; a collective call."""
        gathered = [value] * self.world
        if self.world > 1:
            with self.pulse.waiting():
                dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def gather_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of all ranks, without duplicates, in the same order on all ranks."""
        return list(dict.fromkeys(name for each in self.gather(list(names)) for name in each))

    def second_group(self) -> Ranks:
        """Return the same ranks on another process group, for work during training; a collective call."""
        group = dist.new_group(backend="gloo") if self.world > 1 else None
        return Ranks(self.rank, self.world, group=group)


@contextmanager
def torchrun_ranks(
    device: torch.device, timeout_s: float, on_beats: Callable[[dict[int, Heartbeat]], None]
) -> Iterator[Ranks]:
    """Join the processes that torchrun started, with the backend of their device.

    Args:
        device: this process's device.
        timeout_s: timeout of collectives in seconds; the watcher of the ranks should notice a problem earlier.
        on_beats: called repeatedly on the first rank with the reports of all ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    ranks = Ranks(rank, world)
    # Before the ranks join, because joining hangs if one of them hangs.
    ranks.pulse.start(KeyValueStore(store, "flowmill/pulse").second_connection(), rank, world, on_beats)
    joined: dict[str, Any] = {"store": store, "rank": rank, "world_size": world, "timeout": timeout}
    if device.type == "cpu":
        dist.init_process_group("gloo", **joined)
    else:
        make_current(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        dist.init_process_group(backend, device_id=device, **joined)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
