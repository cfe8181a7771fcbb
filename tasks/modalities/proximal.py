"""Data of replayed rows: log-probs and means under the policy the epoch starts from, and importance weights.

Legend: B rows of a micro-batch, D latent dims.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np

from flowmill.configs.advantages import ReplaySection

Key = tuple[int, int]


class RowFile:
    """One float32 array of equal shape per row, in a file, so memory does not grow with the number of rows."""

    def __init__(self, file: IO[bytes]) -> None:
        """Bind to an empty file, open for reading and writing; the caller closes it."""
        self._file = file
        self._places: dict[Key, int] = {}
        self._shape: tuple[int, ...] = ()

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def add(self, key: Key, array: np.ndarray) -> None:
        """Write the array of a row."""
        self._places[key], self._shape = len(self._places), array.shape
        self._file.write(np.ascontiguousarray(array, np.float32).tobytes())

    def __getitem__(self, key: Key) -> np.ndarray:
        self._file.flush()
        size = 4 * math.prod(self._shape)
        data = os.pread(self._file.fileno(), size, self._places[key] * size)
        return np.frombuffer(data, np.float32).reshape(self._shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proximal:
    """Replayed rows under the policy an epoch starts from."""

    log_probs: Mapping[Key, float]
    """Log-prob of each row, mean over latent dims."""
    means: RowFile | None
    """Mean of each row's step, if the algorithm compares means."""
    dims: int
    """D."""


def importance_weights(gaps: Mapping[Key, float], dims: int, section: ReplaySection) -> dict[Key, float]:
    """Return the truncated weight min(w, max_importance) of rows over the policy that drew them.

    g is log p_proximal - log p_behavior, averaged over D dims like all log-probs here.
    'density' is the ratio of densities: exp(D g) for a step, exp(D sum g) over a sample's steps.
    'tempered' is its D-th root, exp(g); for a sample, the geometric mean over its S steps, the root of order S D.

    Args:
        gaps: (sample, position) -> g.
        dims: D.
        section: weight, level and truncation.
    """
    if section.level == "sequence":
        by_sample: dict[int, list[float]] = {}
        for (sample, _), gap in gaps.items():
            by_sample.setdefault(sample, []).append(gap)
        joined = np.sum if section.weight == "density" else np.mean
        gaps = {key: float(joined(by_sample[key[0]])) for key in gaps}
    scale, most = (dims if section.weight == "density" else 1), math.log(section.max_importance)
    return {key: math.exp(min(scale * gap, most)) for key, gap in gaps.items()}
