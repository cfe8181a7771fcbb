"""Adapters added into the weights they adapt, for forwards without gradient: one product per layer instead of three."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

#: What diffusers calls adapters that nobody names.
_NAME = "default"


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
        self._adapters = [part[_NAME].weight for layer in self._layers for part in (layer.lora_A, layer.lora_B)]
        self._weights: list[Tensor] = []
        self._state: list[tuple[int, int]] = []

    def covers(self, modules: Mapping[str, nn.Module]) -> bool:
        """Return whether these are the denoisers, with their adapters switched on."""
        own = all(module is mine for module, mine in zip(modules.values(), self._modules, strict=False))
        return own and not self._layers[0].disable_adapters

    def forget(self) -> None:
        """Hear that the adapters' values were exchanged for others."""
        self._state = []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers compute with the sum, inside; without gradient."""
        self._bring_up_to_date()
        own = [layer.base_layer.weight.data for layer in self._layers]
        try:
            for layer, weight in zip(self._layers, self._weights, strict=True):
                layer.base_layer.weight.data = weight
                layer.merged_adapters = [_NAME]
            yield
        finally:
            for layer, weight in zip(self._layers, own, strict=True):
                layer.base_layer.weight.data = weight
                layer.merged_adapters = []

    def _bring_up_to_date(self) -> None:
        state = [(part.untyped_storage()._cdata, part._version) for part in self._adapters]
        if state == self._state:
            return
        if not self._weights:
            self._weights = [torch.empty_like(layer.base_layer.weight.data) for layer in self._layers]
        for layer, weight in zip(self._layers, self._weights, strict=True):
            torch.add(layer.base_layer.weight.data, layer.get_delta_weight(_NAME), out=weight)
        self._state = state


def merged_where_possible(merged: Merged | None, modules: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
    """Let modules compute with merged weights inside, where no gradient is asked for and they have such weights."""
    if merged is None or torch.is_grad_enabled() or not merged.covers(modules):
        return nullcontext()
    return merged.used()
