"""Opens image and video files of users as viewers display them, and the sound of videos.

As in diffusers' ``load_image`` images are rotated by their EXIF data and converted to RGB. In addition transparent
pixels are put on white, and 16-bit gray keeps its range, of which Pillow's conversion keeps only the darkest 256th.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

from configs.extras import require_extra

_ORIENTATION = 0x0112
#: Modes that Pillow converts to RGB without visible loss.
_DIRECT = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})
_ALPHA = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
#: Candidates for white in modes with one number per pixel: the first one not below the highest value counts.
_NUMBERS = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_WHITES = {"F": (1.0, 255.0, 65535.0), **dict.fromkeys(_NUMBERS[2:], (65535.0,)), "I": (65535.0,)}


def open_picture(file: Path | BinaryIO) -> np.ndarray:
    """Return the (H, W, 3) uint8 pixels of an image file of any mode and depth, upright; raise OSError if it cannot be
    read, ValueError if it has negative or infinite values."""
    if is_film(file):
        (first,) = open_clip(file, 1)
        return np.asarray(first)
    with Image.open(file) as image:
        return np.array(_rgb(ImageOps.exif_transpose(image)))


def open_clip(file: Path | BinaryIO, most: int, fps: int | None = None) -> np.ndarray:
    """Return the (F, H, W, 3) uint8 frames of a video or an animated image, at most ``most`` of them. With ``fps``
    frames of a video are repeated or left out to give that many per second. Raises ConfigError if it is a video, and
    the package that reads videos is not installed; OSError if it cannot be read; ValueError if it has no frames, or
    negative or infinite values."""
    if not is_film(file):
        with Image.open(file) as image:
            count = min(most, getattr(image, "n_frames", 1))
            return np.stack([np.array(_rgb(_frame(image, number))) for number in range(count)])
    require_extra("video", "av", label=f"the film '{getattr(file, 'name', file)}'")
    import av

    try:
        with av.open(str(file) if isinstance(file, Path) else file) as film:
            decoded = film.decode(video=0) if fps is None else _at_rate(film, fps)
            frames = [frame.to_ndarray(format="rgb24") for frame in islice(decoded, most)]
    except (av.FFmpegError, AttributeError, IndexError) as error:
        raise ValueError(f"it holds no film ({error})") from None
    if not frames:
        raise ValueError("it holds no frames")
    return np.stack(frames)


def _at_rate(film: Any, fps: int) -> Iterator[Any]:
    """Yield the frames of a video as FFmpeg's filter fps gives them: each until the next one begins."""
    import av

    graph, stream = av.filter.Graph(), film.streams.video[0]
    rated = graph.add("fps", f"{fps}:eof_action=pass")
    graph.link_nodes(graph.add_buffer(template=stream), rated, graph.add("buffersink")).configure()
    for frame in chain(film.decode(stream), [None]):
        graph.push(frame)
        try:
            while True:
                yield graph.pull()
        except (av.BlockingIOError, av.EOFError):
            continue


def open_sound(file: BinaryIO, *, rate: int, channels: int, length: int) -> np.ndarray:
    """Return the (N, C) int16 sound of a video from its first frame, at most ``length`` samples at ``rate`` per second,
    resampled by FFmpeg; mono is both channels of stereo. Raises ConfigError if the package that reads videos is not
    installed; ValueError if there is no sound, or it cannot be read."""
    require_extra("video", "av", label="the sound of clips")
    import av

    found = np.zeros((length, channels), np.int16)
    try:
        with av.open(file) as film:
            begin, source = film.streams.video[0], film.streams.audio[0]
            # FFmpeg would lower mono as both channels of stereo by 3 dB.
            heard = 1 if source.channels < 2 else channels
            resampler = av.AudioResampler("s16", {1: "mono", 2: "stereo"}[heard], rate)
            decoded = film.decode(source)
            first = next(decoded, None)
            start = float((begin.start_time or 0) * begin.time_base)
            at = 0 if first is None else round(((first.time or 0.0) - start) * rate)
            for frame in chain([first], decoded, [None]) if first else ():
                for part in resampler.resample(frame):
                    samples = part.to_ndarray().reshape(-1, heard)
                    rows = samples[max(0, -at) : max(0, length - at)]
                    found[max(0, at) : max(0, at) + len(rows)] = rows
                    at += len(samples)
                if at >= length:
                    break
    except IndexError:
        raise ValueError("it has no sound") from None
    except (av.FFmpegError, AttributeError, ValueError) as error:
        raise ValueError(f"its sound cannot be decoded ({error})") from None
    return found[: max(0, at)]


def is_film(file: Path | BinaryIO) -> bool:
    """Return whether a file is an MP4, QuickTime, Matroska or WebM video, by its first bytes."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            head = opened.read(12)
    else:
        file.seek(0)
        head = file.read(12)
        file.seek(0)
    return head[4:8] == b"ftyp" or head[:4] == b"\x1aE\xdf\xa3"


def film_size(file: Path | BinaryIO) -> tuple[int, int]:
    """Return width and height of a video, from its header; raise ConfigError if the package that reads videos is not
    installed, ValueError if it cannot be read."""
    require_extra("video", "av", label=f"the film '{getattr(file, 'name', file)}'")
    import av

    # A stream of an unknown codec lacks attributes.
    try:
        with av.open(str(file) if isinstance(file, Path) else file) as film:
            about = film.streams.video[0]
            return about.width, about.height
    except (av.FFmpegError, AttributeError, IndexError) as error:
        raise ValueError(f"it holds no film ({error})") from None


def within(image: Image.Image, area: int) -> Image.Image:
    """Return an image, scaled down to ``area`` pixels with its aspect ratio if it has more. As diffusers'
    ``Flux2ImageProcessor._resize_to_target_area`` does."""
    if image.width * image.height <= area:
        return image
    scale = math.sqrt(area / (image.width * image.height))
    return image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)


def is_plain(image: Image.Image) -> bool:
    """Return whether an opened image is displayed as stored: upright, opaque, with 8 bits per channel."""
    # Reading EXIF data that is not in the header would decode a whole PNG.
    noted = image.format != "PNG" or "exif" in image.info
    upright = not noted or image.getexif().get(_ORIENTATION, 1) in (0, 1)
    return upright and image.mode in _DIRECT and "transparency" not in image.info


def _frame(image: Image.Image, number: int) -> Image.Image:
    image.seek(number)
    return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in _NUMBERS:
        return _gray(image)
    if image.mode in _ALPHA or "transparency" in image.info:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")


def _gray(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all() or values.min(initial=0) < 0:
        raise ValueError("it holds values that are no brightness: negative or not finite. Save it with 8 or 16 bits")
    highest = float(values.max(initial=0))
    white = next((each for each in _WHITES[image.mode] if highest <= each), highest)
    return Image.fromarray((values / white * 255).round().astype(np.uint8)).convert("RGB")
