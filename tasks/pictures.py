"""Image grids for people: each image with its prompt, what the reward read, and its score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

#: Name of an evaluation's grid among the files of its scores.
GRID = "grid.png"
_CELL = 128
_CAPTION = 34
_GAP = 6


def grid(images: Sequence[np.ndarray], captions: Sequence[tuple[str, str]], *, columns: int = 8) -> Image.Image:
    """Return a grid of (H, W, 3) uint8 images, each scaled to fit and captioned with two lines.

    Of a clip (F, H, W, 3) the first, the middle and the last frame stand side by side.
    """
    images = [_strip(image) if image.ndim == 4 else image for image in images]
    columns = min(columns, max(1, len(images)))
    height = max(1, round(_CELL * images[0].shape[0] / images[0].shape[1]))
    rows = -(-len(images) // columns)
    cell = (_CELL + _GAP, height + _CAPTION + _GAP)
    sheet = Image.new("RGB", (columns * cell[0] + _GAP, rows * cell[1] + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for number, (image, lines) in enumerate(zip(images, captions, strict=True)):
        x, y = _GAP + number % columns * cell[0], _GAP + number // columns * cell[1]
        enlarged = image.shape[1] < _CELL
        resampling = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
        sheet.paste(Image.fromarray(image).resize((_CELL, height), resampling), (x, y))
        for line, text in enumerate(lines):
            draw.text((x, y + height + 2 + 15 * line), _fit(draw, font, text), fill="black", font=font)
    return sheet


def _strip(clip: np.ndarray) -> np.ndarray:
    return np.concatenate([clip[0], clip[len(clip) // 2], clip[-1]], axis=1)


def _fit(draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, text: str) -> str:
    if draw.textlength(text, font=font) <= _CELL:
        return text
    while text and draw.textlength(text + "…", font=font) > _CELL:
        text = text[:-1]
    return text + "…"
