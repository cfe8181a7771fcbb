"""Images and clips of data, checked, turned upright, and cropped to the size of the model.

Legend: H W pixels, F frames.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from PIL import Image, ImageOps

from flowmill.configs.errors import DataError
from flowmill.configs.model import ModelSection
from flowmill.models.films import is_film
from flowmill.models.image_files import frames_in, open_clip, open_picture, opened_picture, size_of
from flowmill.tasks.inputs.data_section import data_of
from flowmill.tasks.inputs.prompt_rows import too_large
from flowmill.tasks.modalities.data_sample import DataSample
from flowmill.tasks.modalities.samplers import SamplingContext

_RESAMPLING = Image.Resampling.LANCZOS


def read_media(making: SamplingContext, sample: DataSample, data: bytes, fps: int | None = None) -> np.ndarray:
    """Return an image (H, W, 3) or clip (F, H, W, 3) of the configured size, uint8, upright, cropped and mirrored as
    the sample says.

    With ``data.buckets`` the size is that of the nearest aspect ratio to the first sample of the row, so that samples
    of a pair have one size.

    Args:
        making: has the config.
        sample: names the file, for messages.
        data: the content of its file.
        fps: frames per second that a clip is brought to; its own when absent.
    """
    name, model = sample.file.name, making.config.model
    try:
        if large := too_large(*size_of(io.BytesIO(data))):
            raise DataError(f"{name} {large}. Scale it down.")
        frames = _frames(data, model, name, fps)
        buckets = data_of(making.config).buckets
        shaped = frames if sample.first is sample.file or not buckets else _frames(sample.first.read(), model, name)
    except (OSError, ValueError) as error:
        raise DataError(f"{name} cannot be read as an image or clip: {error}. Save it again, or remove it.") from None
    height, width = nearest(buckets, *shaped[0].shape[:2]) if buckets else (model.height, model.width)
    fit = partial(ImageOps.fit, size=(width, height), method=_RESAMPLING, centering=sample.window)
    pixels = np.stack([np.asarray(fit(Image.fromarray(each)), np.uint8) for each in frames])
    pixels = np.ascontiguousarray(pixels[:, :, ::-1]) if sample.mirrored else pixels
    return pixels if model.makes_clips else pixels[0]


def nearest(buckets: Sequence[tuple[int, int]], height: int, width: int) -> tuple[int, int]:
    """Return the size (height, width) with the nearest aspect ratio to that of an image, by its logarithm."""
    return min(buckets, key=lambda size: (abs(math.log(size[0] * width / (size[1] * height))), size))


def _frames(data: bytes, model: ModelSection, name: str, fps: int | None = None) -> Sequence[np.ndarray]:
    file = io.BytesIO(data)
    if model.makes_clips:
        frames = open_clip(file, model.frames, fps)
        if len(frames) < model.frames:
            raise DataError(
                f"{name} has {len(frames)} frames{f' at {fps} per second' if fps else ''}, but model.frames is "
                f"{model.frames}. Lower it, or give longer clips."
            )
        return list(frames)
    if is_film(file):
        raise DataError(f"{name} is a clip, but model.policy '{model.policy}' makes images. Give an image.")
    with opened_picture(file) as image:
        if (count := frames_in(image)) > 1:
            raise DataError(f"{name} is an animation of {count} frames. Save the frame that is meant.")
    return [open_picture(file)]
