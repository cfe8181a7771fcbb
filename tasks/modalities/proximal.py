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


def importance_weights(gaps: Mapping[Key, float], section: ReplaySection) -> dict[Key, float]:
    """Return the weight min(exp(g), max_importance) of each row over the policy that drew it.

    g is log p_proximal - log p_behavior, averaged over D dims like all log-probs here, so a weight is the D-th root of
    the ratio of densities: all rows stay effective, and old ones are damped rather than made unbiased.

    Args:
        gaps: (sample, position) -> g.
        section: the truncation.
    """
    return {key: math.exp(min(gap, math.log(section.max_importance))) for key, gap in gaps.items()}
