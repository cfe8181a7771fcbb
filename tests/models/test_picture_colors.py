"""Colors of pictures are those that viewers display."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from flowmill.models.image_files import open_clip, open_picture
from flowmill.models.picture_colors import conversion_of
from flowmill.tasks.inputs.prompt_rows import images_of
from flowmill.tasks.inputs.rows.row import RowLocation

COLOR = (200, 100, 50)
SRGB = [0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06]
#: Light of Display P3 as light of sRGB (CSS Color 4).
FROM_P3 = np.array([[1.2249401, -0.2249404, 0], [-0.0420569, 1.0420571, 0], [-0.0196376, -0.0786361, 1.0982735]])


def light(values: np.ndarray) -> np.ndarray:
    """Return the light of values of sRGB, 0 to 255."""
    return np.where(values <= 10.31475, values / 3294.6, ((values / 255 + 0.055) / 1.055) ** 2.4)


def shown(values: np.ndarray) -> np.ndarray:
    """Return the values of sRGB, 0 to 255, of light."""
    kept = np.clip(values, 0, 1)
    return 255 * np.where(kept <= 0.0031308, 12.92 * kept, 1.055 * kept ** (1 / 2.4) - 0.055)


def profile(kind: str) -> bytes:
    """Return an ICC profile, written here: Display P3, or gray with light that is the square of values."""
    columns = [(0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407)]
    table = light(np.linspace(0, 255, 1024)) * 65535
    curve = b"curv" + bytes(4) + struct.pack(">I", 1024) + table.round().astype(">u2").tobytes()
    places = [struct.pack(">4s4x3i", b"XYZ ", *(round(each * 65536) for each in column)) for column in columns]
    tags = dict(zip((b"rXYZ", b"gXYZ", b"bXYZ"), places, strict=True)) | dict.fromkeys(
        (b"rTRC", b"gTRC", b"bTRC"), curve
    )
    white = (round(0.9642 * 65536), 65536, round(0.8249 * 65536))
    if kind == "gray":
        tags = {
            b"kTRC": b"curv" + bytes(4) + struct.pack(">IH2x", 1, 2 << 8),
            b"wtpt": struct.pack(">4s4x3i", b"XYZ ", *white),
        }
    return packed(tags, "mntr", "GRAY" if kind == "gray" else "RGB ", "XYZ ", white)


def inks(lightness: int) -> bytes:
    """Return the ICC profile of a press: paper is white, black is black, and every other corner is one gray."""
    line, level = bytes(range(256)), round(lightness * 2.55)
    grays = b"".join(bytes((0 if corner % 2 else level if corner else 255, 128, 128)) for corner in range(16))
    identity = struct.pack(">9i", *(65536 * (place % 4 == 0) for place in range(9)))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + identity + 4 * line + grays + 3 * line
    white = (round(0.9642 * 65536), 65536, round(0.8249 * 65536))
    tags = {b"A2B0": table, b"wtpt": struct.pack(">4s4x3i", b"XYZ ", *white)}
    return packed(tags, "prtr", "CMYK", "Lab ", white)


def packed(tags: Mapping[bytes, bytes], kind: str, space: str, connection: str, white: tuple[int, ...]) -> bytes:
    """Return an ICC profile of tags."""
    body, names, at = b"", b"", 132 + 12 * len(tags)
    for name, tag in tags.items():
        names += name + struct.pack(">II", at + len(body), len(tag))
        body += tag + bytes(-len(tag) % 4)
    words = [each.encode() for each in (kind, space, connection, "acsp")]
    head = struct.pack(">I4xI4s4s4s12x4s28x3i", at + len(body), 0x02400000, *words, *white).ljust(128, b"\0")
    return head + struct.pack(">I", len(tags)) + names + body


def png(pixels: np.ndarray, chunks: Mapping[bytes, bytes]) -> io.BytesIO:
    """Return a PNG file with chunks before its pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    added = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )
    return io.BytesIO(file.getvalue()[:33] + added + file.getvalue()[33:])


def gama(value: float, xy: list[float] | None = None) -> dict[bytes, bytes]:
    """Return the chunks that say gamma and chromaticities."""
    chunks = {b"gAMA": struct.pack(">I", round(1e5 * value))}
    return chunks if xy is None else chunks | {b"cHRM": struct.pack(">8I", *(round(1e5 * each) for each in xy))}


def square(mode: str = "RGB") -> Image.Image:
    """Return a square of one color."""
    return Image.new("RGB", (4, 4), COLOR).convert(mode)


@pytest.mark.parametrize(
    ("form", "mode"),
    [("PNG", "RGB"), ("PNG", "P"), ("JPEG", "RGB"), ("TIFF", "RGB"), ("WEBP", "RGB"), ("AVIF", "RGB"), ("PNG", "RGBA")],
)
def test_a_profile_is_converted_to_srgb(form: str, mode: str) -> None:
    file, image = io.BytesIO(), square(mode)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100}, "AVIF": {"quality": 100}}.get(form, {})
    image.save(file, form, icc_profile=profile("p3"), **options)
    raw = np.array(image.convert("RGB").getpixel((1, 1)))
    expected = shown(FROM_P3 @ light(raw))
    assert np.abs(expected - raw).max() > 10
    assert np.abs(open_picture(file)[1, 1] - expected).max() <= 2
    assert np.abs(open_clip(file, 1)[0, 1, 1] - expected).max() <= 2


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_inks_have_the_colors_of_their_profile(form: str) -> None:
    file, pixels = io.BytesIO(), np.zeros((8, 16, 4), np.uint8)
    pixels[:, 8:] = (255, 0, 0, 0)
    image = Image.fromarray(pixels, "CMYK")
    image.save(file, form, icc_profile=inks(50), **({"quality": 100} if form == "JPEG" else {}))
    paper, cyan = open_picture(file)[4, 3], open_picture(file)[4, 12]
    assert np.abs(paper - 255.0).max() <= 3
    assert np.abs(cyan - 119.0).max() <= 3, "L* 50 of the profile, and not the cyan of screens"


def test_gray_has_profiles_of_gray_and_of_color() -> None:
    for kind, expected in (("gray", shown(np.array((100 / 255) ** 2))), ("p3", 100)):
        for pixels in (np.full((4, 4), 100, np.uint8), np.full((4, 4), 100 * 257, np.uint16)):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG", icc_profile=profile(kind))
            assert np.abs(open_picture(file)[1, 1] - float(expected)).max() <= 1


def test_transparency_is_kept_while_colors_are_converted() -> None:
    file, image = io.BytesIO(), square("RGBA")
    image.putalpha(Image.fromarray(np.repeat(np.uint8([[255, 0]]), 4, axis=0)).resize((4, 4), 0))
    image.save(file, "PNG", icc_profile=profile("p3"))
    found = open_picture(file)
    assert np.abs(found[1, 0] - shown(FROM_P3 @ light(np.array(COLOR)))).max() <= 2
    assert found[1, 3].tolist() == [255, 255, 255]


def test_a_profile_of_srgb_changes_nothing() -> None:
    for made in (ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), b"junk", profile("gray")):
        file = io.BytesIO()
        square().save(file, "PNG", icc_profile=made)
        assert open_picture(file)[1, 1].tolist() == list(COLOR)
        with Image.open(file, formats=["PNG"]) as image:
            assert conversion_of(image) is None


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (gama(1), shown(np.array(COLOR) / 255)),
        (gama(1 / 1.8, SRGB), shown((np.array(COLOR) / 255) ** 1.8)),
        (gama(0.45455, SRGB), np.array(COLOR)),
        (gama(0.45455, [0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06]), shown(FROM_P3 @ light(np.array(COLOR)))),
        ({b"sRGB": b"\0"} | gama(1), np.array(COLOR)),
        ({b"cICP": bytes([12, 13, 0, 1])} | gama(1), shown(FROM_P3 @ light(np.array(COLOR)))),
        ({b"cICP": bytes([1, 13, 0, 1])} | gama(1), np.array(COLOR)),
        ({b"cICP": bytes([1, 8, 0, 1])}, shown(np.array(COLOR) / 255)),
        # These say nothing that can be: they are ignored.
        (gama(0), np.array(COLOR)),
        (gama(1, [0.0] * 8), np.array(COLOR)),
        ({b"cICP": b"\1"}, np.array(COLOR)),
    ],
)
def test_png_files_name_their_colors(chunks: Mapping[bytes, bytes], expected: np.ndarray) -> None:
    found = open_picture(png(np.asarray(square()), chunks))
    assert np.abs(found[1, 1] - expected).max() <= 1.5


@pytest.mark.parametrize("transfer", [16, 18])
def test_hdr_pictures_are_refused(transfer: int) -> None:
    with pytest.raises(ValueError, match="it is in HDR"):
        open_picture(png(np.asarray(square()), {b"cICP": bytes([9, transfer, 0, 1])}))


def test_the_key_of_a_start_image_says_that_its_colors_are_converted(tmp_path: Path) -> None:
    square().save(tmp_path / "plain.png")
    square().save(tmp_path / "wide.png", icc_profile=profile("p3"))
    place = RowLocation("prompts", f"{tmp_path}/rows.jsonl", 1)
    keys = [images_of({"image": f"{name}.png"}, "image", place, "x")[1] for name in ("plain", "wide")]
    assert [key[32:] for key in keys] == ["", "-in-srgb"]
