"""Images of earlier turns that the texts of a conversation see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flowmill.configs.schema import RunConfig
from flowmill.models.policies.sized_cache import SizedCache
from flowmill.storage.backends.checksums import hash_data
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.base import TrajectoryShard
from flowmill.tasks.inputs.renderer import SEEN_KEY, image_name, render_of, sees_images
from flowmill.tasks.metrics.samples import places_of

if TYPE_CHECKING:
    from flowmill.models.policies.pictures import Pictures
    from flowmill.tasks.runs.context import RunContext

#: Artifacts that stay open.
_CACHED_ARTIFACTS = 8


class SeenImages:
    """Images of earlier turns, as numbers of a model's ``Pictures``; they are read from where they were stored."""

    def __init__(self, context: RunContext, pictures: Pictures) -> None:
        self._store, self._pictures = context.store, pictures
        self._count = render_of(context.config).images
        self._numbers: dict[tuple[str, str], int] = {}
        self._places = SizedCache(_CACHED_ARTIFACTS)

    def of(self, sample: str, metadata: Mapping[str, Any]) -> list[int]:
        """Return the numbers of the images that the texts of a sample saw, in order."""
        names = [image_name(sample, number, of=self._count) for number in range(self._count)]
        return [self._number(ref, name) for ref in metadata.get(SEEN_KEY, ()) for name in names]

    def _number(self, ref: str, name: str) -> int:
        def pixels() -> np.ndarray:
            shard, row = self._place(ref, name)
            return shard.media(row)

        if (ref, name) not in self._numbers:
            shard, row = self._place(ref, name)
            # Equal images have one number.
            key = f"{shard.media_format(row)} {hash_data(bytes(shard.media_file(row)))}"
            self._numbers[ref, name] = self._pictures.number(key, pixels)
        return self._numbers[ref, name]

    def _place(self, ref: str, name: str) -> tuple[TrajectoryShard, int]:
        places: Mapping[str, tuple[TrajectoryShard, int]] = self._places.of(
            ref, lambda: places_of(self._store, ArtifactRef.parse(ref), None)
        )
        return places[name]


def drawn_images(pictures: Pictures | None, config: RunConfig) -> list[int]:
    """Return numbers of blank images, as many and of the size as a text has that are seen."""
    if pictures is None or not sees_images(config):
        return []
    section = render_of(config)
    height, width = section.model.height, section.model.width
    blank = pictures.number(f"blank {height} x {width}", lambda: np.full((height, width, 3), 255, np.uint8))
    return [blank] * section.images
