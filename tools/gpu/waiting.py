"""How often a line of code makes the host wait for the device."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_INSTALLED = re.compile(r"\S*site-packages/")
_ROOT = Path(__file__).parents[2]


class Waiting:
    """Counts by line: what the simulated device says, or what CUDA warns of."""

    def __init__(self, simulated: Any = None) -> None:
        """Bind to what counts; None: the device itself, where it can."""
        self._simulated = simulated

    @contextmanager
    def counted(self) -> Iterator[dict[str, int]]:
        """Give a mapping that holds the lines and how often each waited, once the work inside is done."""
        found: dict[str, int] = {}
        if self._simulated is not None:
            self._simulated.forget()
            yield found
            found |= _short(self._simulated.waits())
        elif torch.cuda.is_available():
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
            waits = (each for each in said if "synchronizing" in str(each.message))
            found |= _short(Counter(f"{each.filename}:{each.lineno}" for each in waits))
        else:
            yield found


def _short(lines: Mapping[str, int]) -> dict[str, int]:
    """Return lines without the folders before a package or this project."""
    return {_INSTALLED.sub("", line).replace(f"{_ROOT}/", ""): count for line, count in lines.items()}
