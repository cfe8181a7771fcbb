"""The one place where a person's images are opened: upright and with their full range, whatever their mode.

``Image.convert("RGB")`` alone leaves photos of phones on their side, cuts 16-bit values off at 255, and shows the
colors that lie below what is transparent.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

#: Brightest value of modes whose values have more than eight bits.
_DEEP = {"I;16": 65535, "I;16B": 65535, "I;16L": 65535, "I;16N": 65535}


def read_image(path: Path) -> np.ndarray:
    """Return (H, W, 3) uint8 of an image file: upright as its EXIF says, what is transparent on white.

    Raises:
        OSError: it is missing, or no image.
    """
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened)
        return np.array(_rgb(image))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F", *_DEEP):
        return _scaled(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        shown = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
    return image.convert("RGB")


def _scaled(image: Image.Image) -> Image.Image:
    """Return gray of deep values: 16-bit ones by their range, others by that of 8 or 16 bits, or of 0 to 1."""
    values = np.asarray(image).astype(np.float64)
    highest = float(values.max(initial=0))
    whole = 1.0 if image.mode == "F" and highest <= 1 else 255.0 if highest <= 255 and image.mode == "F" else 65535.0
    most = float(_DEEP.get(image.mode, max(whole, highest)))
    return Image.fromarray((values.clip(0) / most * 255).round().astype(np.uint8)).convert("RGB")
