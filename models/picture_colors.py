"""The colors of pictures in sRGB, as viewers display them, by ICC profile or by the chunks of PNG.

A profile that cannot be read is ignored, as viewers do. Legend: H W pixels.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

#: Pillow's modes by color space of a profile, and levels by which colors of an sRGB profile differ from sRGB.
_MODES, _SAME = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK", "LAB": "LAB"}, 2
_GRAY = ("1", "L", "LA", "I;16", "I;16B", "I;16L", "I;16N", "I", "F")
#: x and y of white, red, green and blue: sRGB's; by the numbers of cICP those of BT.2020, DCI-P3 and Display P3.
_SRGB = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
_P3 = (0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
_PRIMARIES = {
    9: (0.3127, 0.329, 0.708, 0.292, 0.17, 0.797, 0.131, 0.046),
    11: (0.314, 0.351, *_P3),
    12: (0.3127, 0.329, *_P3),
}
#: Exponents of transfers of cICP, and those that sRGB cannot show.
_GAMMAS, _HDR = {4: 2.2, 5: 2.8, 8: 1.0}, (16, 18)
#: The gAMA of sRGB, to which programs round, and most exponents that are one.
_GAMMA, _MOST_GAMMA = 0.45455, 10
#: Bradford's matrix to cones, and the white of profiles.
_CONES = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
_D50 = np.array([0.9642, 1.0, 0.8249])
#: Entries of the curve of a profile.
_CURVE = 4096


def on_white(image: Image.Image) -> Image.Image:
    """Return an RGBA image without its transparency, in RGB."""
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


#: Mode of an image, and the transform of such images to sRGB.
Conversion = tuple[str, Any]


def conversion_of(image: Image.Image) -> Conversion | None:
    """Return the conversion to sRGB of an image that was opened and not yet read; None if its colors are sRGB's. Raises
    ValueError for HDR."""
    profile = _png_profile(image) if image.format == "PNG" else image.info.get("icc_profile")
    return _transform(profile, image.mode) if isinstance(profile, bytes) else None


def converted(image: Image.Image, conversion: Conversion | None) -> Image.Image:
    """Return the colors of an image in RGB, without transparency."""
    if conversion is None:
        return image.convert("RGB")
    mode, transform = conversion
    return ImageCms.applyTransform(image.convert(mode), transform) or image


@lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> Conversion | None:
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        of_profile = _MODES.get(opened.profile.xcolor_space.strip().upper(), "")
        if not of_profile or (mode == "CMYK") != (of_profile == "CMYK"):
            return None
        if (of_profile == "L" and mode not in _GRAY) or (of_profile == "LAB") != (mode == "LAB"):
            return None
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), of_profile, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    if of_profile in ("CMYK", "LAB"):
        return of_profile, transform
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    samples = Image.fromarray(np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3))
    if of_profile == "L":
        samples = samples.getchannel(0).convert("RGB")
    shown = ImageCms.applyTransform(samples.convert(of_profile), transform)
    differs = np.abs(np.asarray(samples, np.int16) - np.asarray(shown, np.int16)).max()
    return (of_profile, transform) if differs > _SAME else None


def _png_profile(image: Image.Image) -> bytes | None:
    """Return the profile that the chunks of a PNG file name, the strongest first."""
    info = image.info
    if coded := _chunk(image.fp, b"cICP"):  # type: ignore[attr-defined]
        primaries, transfer = coded[0], coded[1]
        if transfer in _HDR:
            raise ValueError("it is in HDR, which has colors that sRGB lacks. Save it in sRGB")
        plain = primaries not in _PRIMARIES and transfer not in _GAMMAS
        return None if plain else _profile(_PRIMARIES.get(primaries, _SRGB), _GAMMAS.get(transfer))
    if "icc_profile" in info or "srgb" in info or not 1 / _MOST_GAMMA < info.get("gamma", 0) < _MOST_GAMMA:
        return info.get("icc_profile")
    gamma = None if abs(info["gamma"] - _GAMMA) < 0.001 else 1 / info["gamma"]
    return _profile(tuple(info.get("chromaticity", _SRGB)), gamma)


def _chunk(file: Any, kind: bytes, least: int = 2) -> bytes:
    """Return a chunk of a PNG file before its pixels; b'' if it has none."""
    place, chunk = file.tell(), b""
    file.seek(8)
    while len(head := file.read(8)) == 8:
        size, name = struct.unpack(">I4s", head)
        if name in (kind, b"IDAT", b"IEND"):
            chunk = file.read(min(size, 64)) if name == kind else b""
            break
        file.seek(size + 4, io.SEEK_CUR)
    file.seek(place)
    return chunk if len(chunk) >= least else b""


@lru_cache(maxsize=32)
def _profile(xy: Sequence[float], gamma: float | None) -> bytes | None:
    """Return an ICC profile.

    Args:
        xy: x and y of white, red, green and blue.
        gamma: exponent that gives light; None for the curve of sRGB.
    """
    values = np.linspace(0, 1, _CURVE)
    light = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    light = light if gamma is None else values**gamma
    try:
        white, *colors = [np.array([x / y, 1, (1 - x - y) / y]) for x, y in zip(xy[::2], xy[1::2], strict=True)]
        basis = np.stack(colors, axis=1)
        basis = basis * np.linalg.solve(basis, white)
        adapted = np.linalg.solve(_CONES, np.diag(_CONES @ _D50 / (_CONES @ white)) @ _CONES @ basis)
        parts = [b"XYZ \0\0\0\0" + _fixed(column) for column in adapted.T]
    except (ZeroDivisionError, ValueError, np.linalg.LinAlgError, struct.error):
        return None
    parts.append(b"curv\0\0\0\0" + struct.pack(">I", _CURVE) + (light * 65535).round().astype(">u2").tobytes())
    names = [b"rXYZ", b"gXYZ", b"bXYZ", b"rTRC", b"gTRC", b"bTRC"]
    begin, table = 132 + 12 * len(names), b""
    for number, name in enumerate(names):
        part = min(number, 3)
        table += name + struct.pack(">II", begin + sum(map(len, parts[:part])), len(parts[part]))
    body = struct.pack(">I", len(names)) + table + b"".join(parts)
    header = struct.pack(">I4sI4s4s4s12x4s28x", 128 + len(body), b"", 0x02400000, b"mntr", b"RGB ", b"XYZ ", b"acsp")
    return (header + _fixed(_D50)).ljust(128, b"\0") + body


def _fixed(values: np.ndarray) -> bytes:
    return struct.pack(">3i", *(round(value * 65536) for value in values.tolist()))
