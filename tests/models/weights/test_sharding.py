"""Weights spread over ranks: in groups that each hold them, gradients are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowmill.models.weights.sharding import Sharding, local, whole
from tests.support.ranks import RANKS

WORLD = 4


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.head = nn.Linear(6, 4)

    def forward(self, rows: Tensor) -> Tensor:
        """Return (B, 4)."""
        for block in self.blocks:
            rows = block(rows).tanh()
        made: Tensor = self.head(rows)
        return made


def rows_of(rank: int) -> Tensor:
    return torch.arange(12.0).reshape(2, 6).sin() * (rank + 1)


def _train(rank: int, size: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    net = Net()
    Sharding.over(torch.device("cpu"), world=WORLD, size=size, offload=False).shard([net], ["blocks"])
    for _ in range(2):
        net(rows_of(rank)).square().sum().backward()
    found = {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    held = [local(p).shape[0] for p in net.parameters()]
    torch.save({"gradients": found, "held": held}, folder / str(rank))
    dist.destroy_process_group()


@pytest.mark.campaign_cases("4")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_groups_of_ranks_add_up_the_gradients_of_all(tmp_path: Path, size: int) -> None:
    """Of two micro-batches on each rank."""
    ranks = [RANKS.Process(target=_train, args=(rank, size, tmp_path)) for rank in range(WORLD)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0] * WORLD
    alone = Net()
    for rank in range(WORLD):
        (2 * alone(rows_of(rank)).square().sum()).backward()
    for rank in range(WORLD):
        found = torch.load(tmp_path / str(rank))
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-5)
        # FSDP cuts 6 rows for 4 ranks into 2, 2, 2 and none.
        six = 3 if size == 2 else [2, 2, 2, 0][rank]
        assert found["held"] == [six, six, six, six, 4 // size, 4 // size]
