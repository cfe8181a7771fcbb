"""Parameters and moments in host memory: they lie where they are said to, and steps are what they were."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from flowmill.configs.registry import resolve
from flowmill.tasks.training import optimizer_placement
from flowmill.tasks.training.optimizer_placement import PlacedOptimizer
from flowmill.tasks.training.optimizers import OPTIMIZERS, MomentOptimizer, make_optimizer
from tests.conftest import ROOT
from tests.tasks.training.test_optimizers import parameters, section, take_steps
from tools.accelerator import missing

#: Whole parameters, and halves of ranks of two, on a device or in host memory.
ON_A_DEVICE = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowmill.configs.execution import ExecutionSection
from flowmill.models.weights.sharding import local, spread_like
from flowmill.tasks.training import optimizer_placement
from flowmill.tasks.training.optimizers import OPTIMIZERS, make_optimizer
from tools.accelerator import simulated
from tests.tasks.training.test_optimizers import SHAPES, section

simulated(Path(sys.argv[1]), doubles=True)
# Nothing can be compiled for it.
torch.compiler.set_stance("force_eager")
torch.accelerator.is_available = lambda: False
optimizer_placement.AT_A_TIME = 10_000
sim = torch.device("sim:0")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("sim", (2,))


def spread(value, like, where):
    return value.to(where) if like is None else spread_like(like, value.to(where), like.shape)


def plain_of(value):
    return [getattr(value, name) for name in value.tensor_attrs] if hasattr(value, "tensor_attrs") else [value]


def trained(name, offload, halves):
    where = "cpu" if offload == "parameters" else sim
    torch.manual_seed(0)
    made, patterns = [], []
    for shape in SHAPES:
        value = torch.randn(shape)
        own = value[: -(-len(value) // 2)] if halves else value
        about = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        pattern = DTensor.from_local(own.to(sim), mesh, [Shard(0)], **about) if halves else None
        patterns.append(pattern)
        made.append(nn.Parameter(spread(own, pattern, where)))
    optimizer = make_optimizer(made, section(name), ExecutionSection(offload=offload), device=sim)
    for seed in range(3):
        torch.manual_seed(seed)
        for parameter, pattern in zip(made, patterns):
            part = local(parameter.detach()).cpu()
            parameter.grad = spread(part + torch.randn(part.shape), pattern, where)
        optimizer.step()
        optimizer.zero_grad()
        moments = [kept for each in made for kind, kept in optimizer.moments(each).items() if kind != "step"]
        assert {local(kept).device.type for kept in moments} == {"cpu" if offload == "optimizer" else "sim"}
        assert {each.is_pinned() for kept in moments for each in plain_of(local(kept))} == {offload == "optimizer"}
        assert {local(each).device.type for each in made} == {torch.device(where).type}
    # What is read into moments is what steps use.
    first = next(kept for kind, kept in optimizer.moments(made[0]).items() if kind != "step")
    local(first).zero_()
    assert not local(next(k for kind, k in optimizer.moments(made[0]).items() if kind != "step")).any()
    return [local(each.detach()).cpu() for each in made]


for name in OPTIMIZERS:
    for halves in (False, True):
        plain = trained(name, False, halves)
        for offload in ("parameters", "optimizer"):
            found = trained(name, offload, halves)
            assert all(map(torch.equal, plain, found)), (name, halves, offload)
"""


@pytest.mark.campaign
@pytest.mark.skipif(missing() is not None, reason="there can be no simulated device")
def test_what_lies_in_host_memory_changes_nothing_on_a_device(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", ON_A_DEVICE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr[-2000:]


@pytest.mark.parametrize("numbers", [1, 10_000, optimizer_placement.AT_A_TIME])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_some_parameters_at_a_time_are_those_of_all(
    monkeypatch: pytest.MonkeyPatch, name: str, numbers: int
) -> None:
    monkeypatch.setattr(optimizer_placement, "AT_A_TIME", numbers)
    kind = resolve(OPTIMIZERS, name, label="optimizer")
    together, apart = parameters(), parameters()
    plain: MomentOptimizer = make_optimizer(together, section(name))
    placed = PlacedOptimizer(apart, partial(kind, section=section(name)), torch.device("cpu"), resting=True)
    for parameter in apart:
        placed.begin(parameter)
    for optimizer, trained in ((plain, together), (placed, apart)):
        take_steps(optimizer, trained, range(3))
        optimizer.zero_grad()
        assert {parameter.grad for parameter in trained} == {None}
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)
        assert plain.moments(one).keys() == placed.moments(other).keys()
        assert all(torch.equal(kept, placed.moments(other)[kind]) for kind, kept in plain.moments(one).items())
