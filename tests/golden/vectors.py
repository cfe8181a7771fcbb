"""Loads golden vectors and remembers which of them were read, so that a test can tell when one is not compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: (file, key) of every vector a test has read.
READ: set[tuple[str, str]] = set()


class Vectors(Mapping[str, Any]):
    """The content of a file; looking a key up counts as reading it."""

    def __init__(self, file: str, content: Mapping[str, Any], prefix: str = "") -> None:
        self._file, self._content, self._prefix = file, content, prefix

    def __getitem__(self, key: str) -> Any:
        found, path = self._content[key], f"{self._prefix}{key}"
        if isinstance(found, dict):
            return Vectors(self._file, found, f"{path}/")
        if _is_table(found):
            return [Vectors(self._file, row, f"{path}[]/") for row in found]
        READ.add((self._file, path))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def tensor(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return an array as a tensor, floating point ones in ``dtype`` if given."""
        found = torch.from_numpy(np.asarray(self[key]))
        return found.to(dtype) if dtype is not None and found.is_floating_point() else found

    def keys_of_leaves(self) -> set[str]:
        """Return the path of every vector, those of rows of a table once."""
        return set(_leaves(self._content, self._prefix))


def load(folder: Path, name: str) -> tuple[Vectors, dict[str, Any]]:
    """Return the vectors of a file and what is said about them."""
    if name.endswith(".json"):
        content = json.loads((folder / name).read_text())
        return Vectors(name, content), content.pop("meta")
    with np.load(folder / name) as file:
        arrays = {key: file[key] for key in file.files}
    meta = json.loads(bytes(arrays.pop("__meta__")))
    return Vectors(name, arrays), meta


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/")
        elif _is_table(value):
            for row in value:
                yield from _leaves(row, f"{prefix}{key}[]/")
        else:
            yield f"{prefix}{key}"
