"""Reference images of prompts, as tokens appended to the generated ones: a bounded number of images of any size.
Legend: B rows, R references, N their tokens, D token width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.pipeline import Rows

if TYPE_CHECKING:
    from PIL import Image

#: Maximum ratio of an image's longer side to its shorter side.
MOST_RATIO = 8
#: A grid is stored as one number: rows times this, plus columns.
_ROW = 1 << 16


def padded(tokens: Sequence[Tensor], grids: Sequence[tuple[int, int]], *, most: int, room: int) -> dict[str, Tensor]:
    """Return one row of tokens of a prompt's images, with the same shape for any number and size of images.

    Args:
        tokens: (1, N, D) of each image.
        grids: rows and columns of the tokens of each image.
        most: R, the maximum number of images.
        room: maximum number of tokens per image.

    Returns:
        ``image_latents`` (1, R room, D), and ``image_grid_1`` to ``image_grid_R``, (1,) int64 each, 0 for no image.
    """
    joined = torch.cat(list(tokens), dim=1)
    numbers = [height * _ROW + width for height, width in grids] + [0] * (most - len(grids))
    return {
        "image_latents": F.pad(joined, (0, 0, 0, most * room - joined.shape[1])),
        **{f"image_grid_{n}": torch.tensor([number], device=joined.device) for n, number in enumerate(numbers, 1)},
    }


def grids_of(rows: Rows) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of each image of one row, in order."""
    numbers: list[int] = []
    while (grid := rows.get(f"image_grid_{len(numbers) + 1}")) is not None:
        numbers.append(int(grid))
    return [divmod(number, _ROW) for number in numbers if number]


def tokens_of(rows: Rows) -> Tensor:
    """Return the (1, N, D) tokens of the images of one row."""
    return rows["image_latents"][:, : sum(height * width for height, width in grids_of(rows))]


def check_references(images: int, most: int, prompt: str) -> None:
    """Check that a prompt has at least one image and not more than the model takes; raise ConfigError."""
    if not 1 <= images <= most:
        raise ConfigError(
            f"model.options.references is {most}, but prompt {prompt!r} comes with {images} images. Set it to the most "
            "that a prompt comes with; each prompt needs at least one."
        )


def check_shape(image: Image.Image, prompt: str, *, least: int) -> None:
    """Check that an image is not too small or too narrow for a model; raise ConfigError."""
    short, long = sorted(image.size)
    if short < least or long > MOST_RATIO * short:
        raise ConfigError(
            f"an image of prompt {prompt!r} is {image.width} x {image.height} pixels, but the model takes sides of "
            f"{least} pixels and more, the longer one {MOST_RATIO} times the shorter one at most. Give another image."
        )


def room_of(area: int, unit: int, *, round_up: int = 0) -> int:
    """Return the maximum number of tokens of an image scaled to an area, keeping its aspect ratio.

    Args:
        area: pixels.
        unit: width of a token in pixels.
        round_up: pixels by which rounding may enlarge each side.
    """
    long = math.sqrt(area * MOST_RATIO)
    return int((long + round_up) * (area / long + round_up)) // unit**2
