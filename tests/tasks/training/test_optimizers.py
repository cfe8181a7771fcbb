"""Optimizers: what they keep is written, read and counted; in 8 bits too."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import resolve
from flowmill.configs.schema import OptimizeSection, RunConfig
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.training.adamw8bit import AdamW8bit, block_size
from flowmill.tasks.training.optimizers import OPTIMIZERS, MomentOptimizer, OptimizerClass, make_optimizer

SHAPES = ((64, 96), (16, 256), (32, 3, 9, 32), (7,))


def section(name: str) -> OptimizeSection:
    return OptimizeSection(optimizer=name, learning_rate=1e-2, weight_decay=0.0)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def take_steps(made: MomentOptimizer, trained: list[nn.Parameter], seeds: range) -> None:
    """Steps towards zero, with noise of their own."""
    for seed in seeds:
        torch.manual_seed(seed)
        for parameter in trained:
            parameter.grad = parameter.detach() + torch.randn(parameter.shape)
        made.set_learning_rate(1e-2 / (1 + seed))
        made.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_that_were_read_go_on_bit_for_bit(name: str) -> None:
    whole = parameters()
    made = make_optimizer(whole, section(name))
    take_steps(made, whole, range(3))
    again = copy.deepcopy(whole)
    resumed = make_optimizer(again, section(name))
    for before, after in zip(whole, again, strict=True):
        assert resumed.moments(after) == {}
        resumed.begin(after)
        for kind, held in resumed.moments(after).items():
            held.copy_(made.moments(before)[kind])
    take_steps(made, whole, range(3, 6))
    take_steps(resumed, again, range(3, 6))
    assert all(torch.equal(before, after) for before, after in zip(whole, again, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_kept_takes_as_many_bytes_as_are_counted(name: str) -> None:
    (parameter,) = trained = [nn.Parameter(torch.zeros(64, 1024))]
    made = make_optimizer(trained, section(name))
    made.begin(parameter)
    kept = sum(held.nbytes for kind, held in made.moments(parameter).items() if kind != "step")
    kind: type[OptimizerClass] = resolve(OPTIMIZERS, name, label="optimizer")
    assert kept == 2 * kind.moment_bytes * parameter.numel()


def test_eight_bits_go_where_float32_goes() -> None:
    exact, rounded = parameters(), parameters()
    take_steps(make_optimizer(exact, section("adamw")), exact, range(20))
    take_steps(make_optimizer(rounded, section("adamw8bit")), rounded, range(20))
    for start, one, other in zip(parameters(), exact, rounded, strict=True):
        way, apart = (one - start).norm(), (one - other).norm()
        assert apart < 0.05 * way
    assert not torch.equal(exact[0], rounded[0])
    assert torch.allclose(exact[3], rounded[3], atol=1e-6), "few numbers are not rounded"


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((64, 1024), 256), ((4096, 32), 32), ((64, 96), 32), ((320, 320, 3, 3), 64), ((4096,), None), ((64, 33), None)],
)
def test_numbers_that_share_a_scale_are_of_one_row(shape: tuple[int, ...], numbers: int | None) -> None:
    assert block_size(torch.Size(shape)) == numbers
    parameter = nn.Parameter(torch.zeros(shape))
    made = AdamW8bit([parameter], section("adamw8bit"))
    made.begin(parameter)
    kept: dict[str, Tensor] = made.moments(parameter)
    assert ("exp_avg.codes" in kept) == (numbers is not None)
    if numbers is not None:
        assert kept["exp_avg.scale"].shape == (shape[0], parameter[0].numel() // numbers)


def test_check_refuses_what_an_optimizer_does_not_heed(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"optimize.optimizer 'adam8' does not exist. Did you mean 'adamw' or 'adamw8bit'"
    ):
        check_config(make_config("optimize.optimizer=adam8"))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "flowmill.tasks.training.adamw8bit")
    with pytest.raises(ConfigError, match=r"pip install 'flowmill\[8bit\]'"):
        check_config(make_config("optimize.optimizer=adamw8bit"))


def test_policies_keep_their_names_where_nothing_was_chosen() -> None:
    assert "optimizer" not in section("adamw").fingerprinted()
    assert section("adamw8bit").fingerprinted()["optimizer"] == "adamw8bit"
