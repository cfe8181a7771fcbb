"""Weights that files hold in another form than a model of transformers, such as each expert of a layer alone."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowmill.configs.errors import CorruptError


@dataclass(frozen=True, slots=True)
class Conversion:
    """Stored tensors from which transformers makes weights of a model."""

    first: str
    """Name of the first of these weights."""
    converter: Any
    """transformers' ``WeightConverter``."""
    config: Any
    """The model's config."""
    sources: dict[str, str] = field(default_factory=dict)
    """Patterns of the converter by name in the files, in the order in which it takes tensors."""

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights by name, from the stored tensors by name; raise CorruptError if some are missing."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources.items():
            converter.add_tensor(self.first, name, pattern, tensors[name])
        try:
            weights = converter.convert(self.first, config=self.config)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CorruptError(
                f"'{self.first}' cannot be made of the {len(self.sources)} tensors from "
                f"'{next(iter(self.sources))}' on ({error}). Copy or download the model again."
            ) from None
        return {name: each[0] if isinstance(each, list) else each for name, each in weights.items()}


def stored_forms(
    module: Any, own: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, str], dict[str, Conversion]]:
    """Return the names in files of weights with another name there, and the conversions of weights with another form.

    Args:
        module: a model of transformers.
        own: its weights by name.
        shapes: shapes of the stored tensors by name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping, prefix = get_model_conversion_mapping(module), module.base_model_prefix
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    names, conversions = dict[str, str](), dict[str, Conversion]()
    # As transformers loads, which converts tensors in this order.
    for stored in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, own)
        if name not in own and stored in own:
            name, pattern = rename_source_key(stored, [], [], prefix, own)
        if pattern is None:
            names[name] = stored
        elif name in own:
            conversion = Conversion(name, by_pattern[pattern], module.config)
            conversions.setdefault(name, conversion).sources[stored] = pattern
    converted = dict[str, Conversion]()
    for each in conversions.values():
        empty = {name: torch.empty(shapes[name], device="meta") for name in each.sources}
        converted |= dict.fromkeys(each.of(empty), each)
    return names, converted


def fill(target: Tensor, value: Tensor, name: str) -> None:
    """Fill a weight, or this rank's part of it, with a whole tensor; raise CorruptError if its shape differs."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if target.shape != value.shape:
        raise CorruptError(
            f"the stored parts of '{name}' make up the shape {tuple(value.shape)}, not {tuple(target.shape)}. They "
            "belong to another model."
        )
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        part = distribute_tensor(value, mesh, placements, src_data_rank=None)
        target, value = target.to_local(), part.to_local()
    target.copy_(value)
