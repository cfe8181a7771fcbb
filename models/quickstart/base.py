"""The interface of builders of small base models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

#: Called with the activity, steps done and steps in all.
Report = Callable[[str, int, int], None]


class Builder(Protocol):
    """Builds and pre-trains a pipeline; its fields are the options of ``model.build``."""

    latents: ClassVar[tuple[int, int] | None]
    """Channels of its latents, and pixels per side of a latent."""

    def build(self, folder: Path, report: Report) -> None:
        """Write a diffusers folder; ``report`` is called after each step."""
