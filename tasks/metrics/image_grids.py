"""Image grids for people: each image with its prompt, what the reward read, and its score."""

from __future__ import annotations

import base64
import io
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from configs.escaping import visible

#: Name of an evaluation's grid among the files of its scores.
GRID = "grid.png"
#: Folder of an evaluation with clips as files of their own.
CLIPS = "clips"
#: Width of a grid: full size on the screens it is looked at.
_WIDTH = 1280
#: Longest side of one that is sent along.
_SHOWN = 900
_FONT = 15
_LINE = _FONT + 4
_GAP = 8
#: Of a text; more of them are never as narrow as a grid.
_CHARACTERS = 1_000
#: A grid should be this much lower than wide, so that it is seen whole where it is as wide as the window.
_FLAT = 0.45


def grid(images: Sequence[np.ndarray], captions: Sequence[Sequence[str]], *, columns: int | None = None) -> Image.Image:
    """Return a grid of (H, W, 3) uint8 images, each scaled to fit and captioned with as many lines as the others.

    Of a clip (F, H, W, 3) the first, the middle and the last frame stand side by side. Without ``columns`` the grid is
    as narrow as a flat one can be.
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


def data_url(path: Path) -> str:
    """Return a picture, small, as an address that holds all of it: pages show it without asking anybody."""
    picture, data = Image.open(path).convert("RGB"), io.BytesIO()
    picture.thumbnail((_SHOWN, _SHOWN))
    picture.save(data, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(data.getvalue()).decode()}"


def squared(image: Image.Image) -> Image.Image:
    """Return an image with white below it, as high as wide; one that is higher is returned as it is."""
    if image.height >= image.width:
        return image
    square = Image.new("RGB", (image.width, image.width), "white")
    square.paste(image, (0, 0))
    return square


def _columns(count: int, shape: float, caption: int) -> int:
    """Return the fewest columns with which ``count`` captioned images of height / width ``shape`` make a flat grid."""
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
