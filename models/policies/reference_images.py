"""Reference images of prompts, as tokens appended to the generated ones: a bounded number, each of its own size.

Legend: B rows, R references, N their tokens, D token width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from configs.errors import ConfigError
from models.policies.pipeline import Rows

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

#: Of its two sides the one of an image may be so many times the other.
MOST_RATIO = 8
#: A grid is one number: rows times this, and columns.
_ROW = 1 << 16


def padded(tokens: Sequence[Tensor], grids: Sequence[tuple[int, int]], *, most: int, room: int) -> dict[str, Tensor]:
    """Return one row of tokens of a prompt's images, of one shape for any number and size of images.

    Args:
        tokens: (1, N, D) of each image.
        grids: rows and columns of the tokens of each.
        most: R, the most images there may be.
        room: tokens that one image may have.

    Returns:
        ``image_latents`` (1, R room, D), and ``image_grid_1`` to ``image_grid_R``, (1,) int64 each, 0 where none is.
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


def row_by_row(call: Callable[[Tensor, Tensor, Rows], Tensor], latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
    """Return a model's predictions, computed row by row.

    Rows with other images have other numbers of tokens. Joining rows of equal number would make a row's result
    depend on its neighbors, and ranks that wait for each other must call equally often.
    """
    found = []
    for row in range(len(latents)):
        part = {name: tensor[row : row + 1] for name, tensor in rows.items()}
        found.append(call(latents[row : row + 1], sigma[row : row + 1], part))
    return torch.cat(found)


def check_references(images: int, most: int, prompt: str) -> None:
    """Check that a prompt has an image and not more than the model takes.

    Raises:
        ConfigError: it has none, or more.
    """
    if not 1 <= images <= most:
        raise ConfigError(
            f"model.options.references is {most}, but prompt {prompt!r} comes with {images} images. Set it to the most "
            "that a prompt comes with; each comes with one at least."
        )


def check_shape(image: Image.Image, prompt: str, *, least: int) -> None:
    """Check that an image is not too small or too narrow for a model.

    Raises:
        ConfigError: it is.
    """
    short, long = sorted(image.size)
    if short < least or long > MOST_RATIO * short:
        raise ConfigError(
            f"an image of prompt {prompt!r} is {image.width} x {image.height} pixels, but the model takes sides of "
            f"{least} pixels and more, the longer one {MOST_RATIO} times the shorter one at most. Give another image."
        )


def room_of(area: int, unit: int, *, round_up: int = 0) -> int:
    """Return the most tokens of images scaled to an area in their own shape.

    Args:
        area: pixels.
        unit: pixels a token is wide.
        round_up: pixels by which rounding may enlarge each side.
    """
    long = math.sqrt(area * MOST_RATIO)
    return int((long + round_up) * (area / long + round_up)) // unit**2
