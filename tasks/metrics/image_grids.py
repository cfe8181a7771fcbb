"""Image grids for human review: each image with its prompt, the reward's reading of it, and its score."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flowmill.configs.escaping import visible

#: Name of an evaluation's grid among the files of its scores.
GRID = "grid.png"
#: Folder of an evaluation with its clips as separate files.
CLIPS = "clips"
#: Width of a grid in pixels, roughly that of a screen.
_WIDTH = 1280
_FONT = 15
_LINE = _FONT + 4
_GAP = 8
#: Height of input images of texts in a grid.
_SOURCE_HEIGHT = 160
#: Limit on the characters of a caption line; longer lines never fit the width of a grid.
_CHARACTERS = 1_000
#: Target height / width of a grid, so that it is fully visible when it is as wide as the window.
_FLAT = 0.45


def write_grid(
    folder: Path,
    images: np.ndarray,
    prompts: Sequence[str],
    verdicts: Sequence[str],
    texts: Sequence[str] | None = None,
) -> None:
    """Write the first images, one per verdict, with prompt, rendered text if it differs, and verdict."""
    if verdicts:
        lines = (prompts, verdicts) if texts is None else (prompts, texts, verdicts)
        grid(list(images[: len(verdicts)]), list(zip(*lines, strict=False))).save(folder / GRID)


def grid(images: Sequence[np.ndarray], captions: Sequence[Sequence[str]], *, columns: int | None = None) -> Image.Image:
    """Return a grid of (H, W, 3) uint8 images, each scaled to fit and captioned with the same number of lines.

    A clip (F, H, W, 3) is shown as its first, middle and last frame side by side. Without ``columns`` the grid has the
    fewest columns that keep it flat.
    """
    images = [strip(image) if image.ndim == 4 else image for image in images]
    shape = images[0].shape[0] / images[0].shape[1]
    caption = _LINE * len(captions[0])
    columns = columns or _columns(len(images), shape, caption)
    width = (_WIDTH - _GAP) // columns - _GAP
    height, rows = max(1, round(width * shape)), -(-len(images) // columns)
    sheet = Image.new("RGB", (_WIDTH, rows * (height + caption + _GAP) + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=_FONT)
    for number, (image, lines) in enumerate(zip(images, captions, strict=True)):
        x = _GAP + number % columns * (width + _GAP)
        y = _GAP + number // columns * (height + caption + _GAP)
        enlarged = image.shape[1] < width
        resampling = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
        sheet.paste(Image.fromarray(image).resize((width, height), resampling), (x, y))
        for line, text in enumerate(lines):
            place = (x, y + height + 2 + (_FONT + 3) * line)
            draw.text(place, _fit(draw, font, visible(text[:_CHARACTERS]), width), fill="black", font=font)
    return sheet


def side_by_side(rows: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return an image for each row of (H, W, 3) uint8 images, all of one size: scaled to one height, put side by side,
    and padded with white on the right."""
    scaled = [[_scaled(image) for image in row] for row in rows]
    width = max(sum(image.width for image in row) for row in scaled)
    sheets = []
    for row in scaled:
        sheet, place = Image.new("RGB", (width, _SOURCE_HEIGHT), "white"), 0
        for image in row:
            sheet.paste(image, (place, 0))
            place += image.width
        sheets.append(np.asarray(sheet))
    return sheets


def _scaled(pixels: np.ndarray) -> Image.Image:
    height, width = pixels.shape[:2]
    return Image.fromarray(pixels).resize((max(1, round(width * _SOURCE_HEIGHT / height)), _SOURCE_HEIGHT))


def squared(image: Image.Image) -> Image.Image:
    """Return an image padded with white below to a square; a tall or square image is returned unchanged."""
    if image.height >= image.width:
        return image
    square = Image.new("RGB", (image.width, image.width), "white")
    square.paste(image, (0, 0))
    return square


def _columns(count: int, shape: float, caption: int) -> int:
    """Return the fewest columns that make a flat grid of ``count`` captioned images of height / width ``shape``."""
    for columns in range(2, count + 1):
        width = (_WIDTH - _GAP) // columns - _GAP
        rows = -(-count // columns)
        if rows * (width * shape + caption + _GAP) + _GAP <= _FLAT * _WIDTH:
            return columns
    return max(1, count)


def strip(clip: np.ndarray) -> np.ndarray:
    """Return the first, the middle and the last frame of an (F, H, W, 3) clip side by side."""
    return np.concatenate([clip[0], clip[len(clip) // 2], clip[-1]], axis=1)


def _fit(draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, text: str, width: int) -> str:
    if draw.textlength(text, font=font) <= width:
        return text
    fitting = bisect_left(range(1, len(text)), True, key=lambda n: draw.textlength(f"{text[:n]}…", font=font) > width)
    return f"{text[:fitting]}…"
