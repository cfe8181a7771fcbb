"""Gradients of adapters through the sum with the weights they adapt."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.merging import Merged, adapter_gradients


@pytest.mark.parametrize("number", [1, 5, 400])
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_gradients_of_adapters_are_those_of_automatic_differentiation_whichever_way_is_shorter(
    number: int, rank: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs, gradient, down, up = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in [(number, 12), (number, 8), (rank, 12), (8, rank)]
    )
    down.requires_grad_(True)
    up.requires_grad_(True)
    expected = torch.autograd.grad(((inputs @ (up @ down).T) * gradient).sum(), (down, up))
    for found, wanted in zip(adapter_gradients(inputs, gradient, down.detach(), up.detach()), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_both_ways_are_taken() -> None:
    """Of many rows and a rank that is a large part of the width, the whole weight's gradient is the shorter way."""
    products: list[tuple[int, ...]] = []

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = super().__torch_function__(function, types, args, kwargs or {})
            if function in (torch.Tensor.matmul, torch.Tensor.__matmul__):
                products.append(tuple(found.shape))
            return found

    for number, rank in ((400, 4), (400, 1)):
        parts = [torch.ones(shape).as_subclass(Noted) for shape in [(number, 12), (number, 8), (rank, 12), (8, rank)]]
        adapter_gradients(*parts)
    assert products == [(8, 12), (4, 12), (8, 4), (400, 1), (1, 12), (400, 1), (8, 1)]


class _Layers(nn.Module):
    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.first, self.second = Conv1D(5, 6) if transposed else nn.Linear(6, 5), nn.Conv2d(1, 2, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(rows).flatten(), self.second(rows[None, None]).flatten()])


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
@pytest.mark.parametrize("transposed", [False, True])
def test_adapters_of_linear_layers_and_convolutions_learn_and_are_given_back(transposed: bool) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    spec = LoraSpec(rank=2, alpha=4, targets=("first", "second"))
    torch.manual_seed(0)
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets), init_lora_weights=False)
    module = inject_adapter_in_model(config, _Layers(transposed=transposed))
    rows = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    trained = [parameter for name, parameter in module.named_parameters() if "lora" in name]

    def look() -> list[torch.Tensor]:
        value = module(rows)
        with torch.no_grad():
            plain = module(rows)
        return [value.detach(), plain, *torch.autograd.grad(value.square().sum(), trained)]

    apart = look()
    merged = Merged([module])
    together = look()
    for found, wanted in zip(together, apart, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert any(not torch.equal(found, wanted) for found, wanted in zip(together, apart, strict=True))
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in trained:
            parameter.mul_(2)
    assert torch.equal(other(rows), together[0])
    assert not torch.allclose(module(rows), together[0], atol=1e-3)
    with torch.no_grad():
        for parameter in trained:
            parameter.div_(2)
    merged.remove()
    assert all(torch.equal(found, wanted) for found, wanted in zip(look(), apart, strict=True))
