"""Adapters added into the weights they adapt, for forwards without gradient: one product per layer instead of three."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class Merged:
    """What adapted layers compute with while nobody asks for gradients: W + (alpha / rank) B A (arXiv 2106.09685, 4.1).

    The layers' own weights stay as they are; a copy of each is kept, and made anew after the adapters have changed. In
    half precision the sum would be rounded away from what is trained, so there is none.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Bind to denoisers that have adapters."""
        from peft.tuners.lora import LoraLayer

        self._modules = list(modules)
        self._layers: list[Any] = [
            part for module in self._modules for part in module.modules() if isinstance(part, LoraLayer)
        ]
        self._names = [layer.active_adapters for layer in self._layers]
        self._adapters = [part for layer in self._layers for part in _adapters(layer)]
        self._weights: list[Tensor] = []
        self._state: list[tuple[int, int]] = []

    def covers(self, modules: Mapping[str, nn.Module]) -> bool:
        """Return whether these are the denoisers, with their adapters switched on."""
        own = all(module is mine for module, mine in zip(modules.values(), self._modules, strict=False))
        return own and not self._layers[0].disable_adapters

    def forget(self) -> None:
        """Hear that the adapters' values were exchanged for others."""
        self._weights, self._state = [], []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers compute with the sum, inside; without gradient."""
        self._bring_up_to_date()
        own = [layer.base_layer.weight.data for layer in self._layers]
        try:
            for layer, names, weight in zip(self._layers, self._names, self._weights, strict=True):
                layer.base_layer.weight.data = weight
                layer.merged_adapters = names
            yield
        finally:
            for layer, weight in zip(self._layers, own, strict=True):
                layer.base_layer.weight.data = weight
                layer.merged_adapters = []

    def _bring_up_to_date(self) -> None:
        state = [(part.untyped_storage()._cdata, part._version) for part in self._adapters]
        if state == self._state:
            return
        made = self._weights or [torch.empty_like(layer.base_layer.weight.data) for layer in self._layers]
        for layer, names, weight in zip(self._layers, self._names, made, strict=True):
            torch.add(layer.base_layer.weight.data, layer.get_delta_weight(names[0]), out=weight)
        self._weights, self._state = made, state


def merged_where_possible(merged: Merged | None, modules: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
    """Let modules compute with merged weights inside, where no gradient is asked for and they have such weights."""
    if merged is None or torch.is_grad_enabled() or not merged.covers(modules):
        return nullcontext()
    return merged.used()


def _adapters(layer: Any) -> list[Tensor]:
    return [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
