"""Opens a file of vectors of the algorithms of 2026."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.vectors import Vectors, load

DATA = Path(__file__).parent / "data"


@pytest.fixture
def vectors(request: pytest.FixtureRequest) -> Callable[[str], tuple[Vectors, dict[str, Any]]]:
    """Return what opens a file by name; one of ``--golden-dir`` if that has it."""
    chosen = request.config.getoption("--golden-dir")

    def opened(name: str) -> tuple[Vectors, dict[str, Any]]:
        if chosen and not (Path(chosen) / name).exists():
            pytest.skip(f"{chosen} has no {name}")
        return load(Path(chosen) if chosen else DATA, name)

    return opened
