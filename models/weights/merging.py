"""Adapters merged into the weights they adapt: one product per layer instead of three, with or without gradient.
Legend: N rows and tokens, I O inputs and outputs of a layer, R rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flowmill.models.weights.lora import is_transposed
from flowmill.models.weights.quantized import is_quantized

#: Default adapter name of diffusers.
_NAME = "default"


class Merged:
    """The merged weights of adapted layers: W + (alpha / rank) B A (arXiv 2106.09685, 4.1).

    The layers' own weights stay unchanged; merged copies are retained and updated before the next forward after the
    adapters change. Gradients of the adapters are the same as without merging, see ``adapter_gradients``; convolutions
    compute weight and adapter separately if gradients are needed. Weights in half precision are not merged: rounding
    the sum would lose updates of the adapters. Nor are quantized weights.
    """

    def __init__(self, modules: Iterable[nn.Module], entered: Iterable[nn.Module] = ()) -> None:
        """Replace the forwards of the adapted layers in denoisers. ``entered``: parts that are also called alone."""
        from peft.tuners.lora import LoraLayer

        modules = list(modules)
        parts = [part for module in modules for part in module.modules()]
        adapted = [part for part in parts if isinstance(part, LoraLayer)]
        self._layers = [_Layer(part) for part in adapted if not is_quantized(part.base_layer.weight)]
        self._state: list[tuple[int, int]] = []
        self._hooks = [module.register_forward_pre_hook(self._before) for module in (*modules, *entered)]

    def forget(self) -> None:
        """Merge again before the next forward; needed for changes that do not bump the adapters' versions."""
        self._state = []

    def remove(self) -> None:
        """Restore the layers' own forwards."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.remove()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the merged weights, as before every forward."""
        adapters = [adapter for layer in self._layers for adapter in (layer.down, layer.up)]
        state = [(part.untyped_storage()._cdata, part._version) for part in adapters]
        if state != self._state:
            for layer in self._layers:
                layer.merge()
            self._state = state

    def _before(self, *_: Any) -> None:
        self.refresh()


class _Layer:
    """One adapted layer, whose forward it replaces."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._base = layer, layer.base_layer
        self._scale = layer.scaling[_NAME]
        self._transposed = is_transposed(self._base)
        self._linear = self._transposed or isinstance(self._base, torch.nn.Linear)
        self._weight = self._base.weight.detach()
        layer.forward = self.forward

    @property
    def down(self) -> Tensor:
        """A, (R, I) of a linear layer."""
        return self._layer.lora_A[_NAME].weight

    @property
    def up(self) -> Tensor:
        """B, (O, R) of a linear layer."""
        return self._layer.lora_B[_NAME].weight

    def merge(self) -> None:
        self._weight = self._base.weight.detach() + self._layer.get_delta_weight(_NAME)

    @property
    def _matrix(self) -> Tensor:
        """The merged weight of a linear layer, (O, I)."""
        weight: Tensor = self._weight
        return weight.T if self._transposed else weight

    def remove(self) -> None:
        del self._layer.forward

    def forward(self, inputs: Tensor) -> Tensor:
        base = self._base
        if self._layer.disable_adapters:
            return base(inputs)
        if not torch.is_grad_enabled():
            if self._linear:
                return torch.nn.functional.linear(inputs, self._matrix, base.bias)
            return base._conv_forward(inputs, self._weight, base.bias)
        if not self._linear:
            return type(self._layer).forward(self._layer, inputs)
        return _Adapted.apply(inputs, self._matrix, base.bias, self.down, self.up, self._scale)


class _Adapted(torch.autograd.Function):
    """A linear layer with the merged weight, whose gradient goes to the adapters."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, down, up)
        ctx.scale = scale
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, down, up = ctx.saved_tensors
        to_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        to_down, to_up = adapter_gradients(inputs.flatten(0, -2), gradient.flatten(0, -2), down, up)
        return to_inputs, None, None, to_down.mul_(ctx.scale), to_up.mul_(ctx.scale), None


def adapter_gradients(inputs: Tensor, gradient: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B for the outputs inputs (W + B A)^T, in the order with fewer operations.

    With inputs X and output gradient G, the gradient of the sum is G^T X, so that of A is B^T (G^T X) = (G B)^T X, and
    that of B is (G^T X) A^T = G^T (X A^T).

    Args:
        inputs: (N, I).
        gradient: (N, O).
        down: A, (R, I).
        up: B, (O, R).
    """
    (number, width), (outputs, rank) = inputs.shape, up.shape
    if width * outputs * (number + 2 * rank) < 2 * number * rank * (width + outputs):
        whole = gradient.T @ inputs
        return up.T @ whole, whole @ down.T
    return (gradient @ up).T @ inputs, gradient.T @ (inputs @ down.T)


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a module by the names they have without adapters, which are merged into them."""
    from peft.tuners.lora import LoraLayer

    weights = {name.replace(".base_layer.", "."): value for name, value in module.state_dict().items()}
    weights = {name: value for name, value in weights.items() if ".lora_" not in name}
    for name, part in module.named_modules():
        if isinstance(part, LoraLayer):
            weights[f"{name}.weight"] = part.base_layer.weight.detach() + part.get_delta_weight(_NAME)
    return weights
