"""Opens image and video files of users as viewers display them.

As in diffusers' ``load_image`` images are rotated by their EXIF data and converted to RGB. In addition colors are
converted to sRGB, transparent pixels are put on white, and 16-bit gray keeps its range, of which Pillow's conversion
keeps only the darkest 256th.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from flowmill.configs.errors import FlowmillError, first_line
from flowmill.models.films import MOST_BYTES, film_frames, film_size, is_film
from flowmill.models.picture_colors import Conversion, conversion_of, converted, on_white

#: Formats that are read, by Pillow's names. Opening others may start programs (EPS), or reads no pictures.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
#: Tags of EXIF data and of TIFF; of the last, 0 says that 0 is white.
_ORIENTATION, _BITS, _PHOTOMETRIC = 0x0112, 258, 262
#: Modes that Pillow converts to RGB without visible loss.
_DIRECT = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})
_ALPHA = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
#: Candidates for white in modes with one number per pixel: the first one not below the highest value counts.
_SHORT = ("I;16", "I;16B", "I;16L", "I;16N")
_NUMBERS = ("I", "F", *_SHORT)
_WHITES = {"F": (1.0, 255.0, 65535.0), **dict.fromkeys((*_SHORT, "I"), (65535.0,))}


@contextlib.contextmanager
def opened_picture(file: Path | BinaryIO) -> Iterator[Image.Image]:
    """Give an image file, opened by Pillow. Raises OSError if there is no such file; ValueError for any error of a
    decoder."""
    try:
        with Image.open(file, formats=_formats()) as image:
            yield image
    except UnidentifiedImageError:
        raise ValueError(f"it is no image of the formats {', '.join(_formats())}") from None
    except Exception as error:
        if isinstance(error, FlowmillError | FileNotFoundError | PermissionError) or type(error) is ValueError:
            raise
        raise ValueError(f"it cannot be decoded ({first_line(error) or type(error).__name__})") from None


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(each for each in FORMATS if each in Image.OPEN)


def open_picture(file: Path | BinaryIO) -> np.ndarray:
    """Return the (H, W, 3) uint8 pixels of an image file of any mode and depth, upright and in sRGB; of a clip those of
    the first frame. Raises as ``opened_picture``; ValueError also for negative or infinite values."""
    if is_film(file):
        return np.asarray(film_frames(file, 1)[0])
    with opened_picture(file) as image:
        return _pixels(image, conversion_of(image))


def open_clip(file: Path | BinaryIO, most: int, fps: int | None = None) -> np.ndarray:
    """Return the (F, H, W, 3) uint8 frames of a video or an animated image, at most ``most`` of them. With ``fps``
    frames of a video are repeated or left out to give that many per second. Raises as ``open_picture``; ConfigError if
    it is a video, and the package that reads videos is not installed; ValueError if it has no frames."""
    if is_film(file):
        return film_frames(file, most, fps)
    with opened_picture(file) as image:
        count = min(most, frames_in(image))
        if count * image.width * image.height * 3 > MOST_BYTES:
            raise ValueError(f"its frames have more than {MOST_BYTES:,} bytes. Scale it down")
        colors = conversion_of(image)
        return np.stack([_pixels(_frame(image, number), colors) for number in range(count)])


def frames_in(image: Image.Image) -> int:
    """Return the number of frames of an opened image: the other images in a photo are previews and maps."""
    return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)


def size_of(file: Path | BinaryIO) -> tuple[int, int]:
    """Return width and height of an image or clip, from its header; raise as ``open_clip``."""
    if is_film(file):
        return film_size(file)
    with opened_picture(file) as image:
        return image.size


def within(image: Image.Image, area: int) -> Image.Image:
    """Return an image, scaled down to ``area`` pixels with its aspect ratio if it has more. As diffusers'
    ``Flux2ImageProcessor._resize_to_target_area`` does."""
    if image.width * image.height <= area:
        return image
    scale = math.sqrt(area / (image.width * image.height))
    return image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)


def is_plain(image: Image.Image) -> bool:
    """Return whether an opened image is displayed as stored but for its colors: upright, opaque, with 8 bits per
    channel."""
    # Reading EXIF data that is not in the header would decode a whole PNG.
    noted = image.format != "PNG" or not image.info.keys().isdisjoint(("exif", "xmp"))
    upright = not noted or image.getexif().get(_ORIENTATION, 1) in (0, 1)
    return upright and image.mode in _DIRECT and "transparency" not in image.info


def _frame(image: Image.Image, number: int) -> Image.Image:
    image.seek(number)
    return image


def _pixels(image: Image.Image, colors: Conversion | None) -> np.ndarray:
    seen = ImageOps.exif_transpose(image)
    if seen.mode in _NUMBERS:
        tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
        return np.array(converted(_gray(seen, tags), colors))
    if seen.mode not in _ALPHA and "transparency" not in seen.info:
        return np.array(converted(seen, colors))
    opaque = converted(seen, colors)
    opaque.putalpha(seen.convert("RGBA").getchannel("A"))
    return np.array(on_white(opaque))


def _gray(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    """Return an image with 8 bits per channel. ``tags``: the tags of a TIFF file."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all() or values.min(initial=0) < 0:
        raise ValueError("it holds values that are no brightness: negative or not finite. Save it with 8 or 16 bits")
    highest = float(values.max(initial=0))
    whites = ((1 << tags[_BITS][0]) - 1,) if image.mode in _SHORT and _BITS in tags else _WHITES[image.mode]
    white = next((each for each in whites if highest <= each), highest)
    light = 1 - values / white if tags.get(_PHOTOMETRIC) == 0 else values / white
    light[values == image.info.get("transparency")] = 1
    return Image.fromarray((light * 255).round().astype(np.uint8))
