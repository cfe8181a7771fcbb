"""Encoding and decoding of generated images and clips: .png, .webp and .mp4, without loss unless asked for."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from configs.errors import ConfigError, CorruptError
from configs.extras import require_extra

FORMATS = ("png", "webp", "mp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFormat:
    """How media are stored. What is stored is what is scored."""

    name: str = "auto"
    """png, webp or mp4; auto: png for images, mp4 for clips."""
    lossless: bool = True
    """Keep every value; otherwise webp and mp4 are compressed visually lossless."""
    fps: int = 16
    """Frames per second of clips."""

    def choose(self, media: np.ndarray) -> str:
        """Return the format for an image (H, W, 3) or a clip (F, H, W, 3).

        Raises:
            ConfigError: the format cannot hold it.
        """
        clip = media.ndim == 4
        name = ("mp4" if clip else "png") if self.name == "auto" else self.name
        if clip != (name == "mp4"):
            kind = "a clip" if clip else "an image"
            raise ConfigError(f"rollout.media.format is '{name}', which cannot hold {kind}. Use auto.")
        return name

    def encode(self, media: np.ndarray) -> bytes:
        """Return the bytes of a file that holds an image (H, W, 3) or clip (F, H, W, 3), uint8."""
        name = self.choose(media)
        if name == "mp4":
            return _encode_clip(media, lossless=self.lossless, fps=self.fps)
        buffer = io.BytesIO()
        if name == "png":
            # Looking for runs alone is faster than for repeats, and of images leaves less.
            Image.fromarray(media).save(buffer, format="PNG", compress_level=1, compress_type=Image.RLE)
        else:
            Image.fromarray(media).save(buffer, format="WEBP", lossless=self.lossless, quality=90, method=2)
        return buffer.getvalue()


DEFAULT_MEDIA = MediaFormat()


def decode(data: bytes | memoryview, name: str, *, where: str) -> np.ndarray:
    """Return the image (H, W, 3) or clip (F, H, W, 3) a file holds, uint8.

    Raises:
        CorruptError: it cannot be decoded.
    """
    try:
        if name == "mp4":
            return _decode_clip(bytes(data))
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise CorruptError(f"{where} cannot be decoded as {name}: {error}") from None


#: Without these x264 looks ahead at frames of half the size, and one clip of a hundred comes out otherwise than before:
#: what it looks at there depends on what memory held.
_STEADY = {"bf": "0", "x264-params": "rc-lookahead=0:sync-lookahead=0:mbtree=0:weightp=0:scenecut=0"}


def _encode_clip(frames: np.ndarray, *, lossless: bool, fps: int) -> bytes:
    av = _av()
    buffer = io.BytesIO()
    # No creation time and one thread: equal clips give equal bytes.
    with av.open(buffer, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264rgb" if lossless else "libx264", rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        stream.thread_count = 1
        stream.options = {"crf": "0" if lossless else "17", "preset": "veryfast", "flags": "+bitexact", **_STEADY}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _decode_clip(data: bytes) -> np.ndarray:
    av = _av()
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _av():  # type: ignore[no-untyped-def]
    require_extra("video", "av", what="A clip")
    import av

    return av
