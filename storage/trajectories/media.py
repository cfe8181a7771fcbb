"""Encoding and decoding of generated images and clips, with or without sound: .png, .webp and .mp4.

Encoding is lossless by default.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from flowmill.configs.errors import ConfigError, CorruptError, first_line
from flowmill.configs.extras import require_extra

FORMATS = ("png", "webp", "mp4")
#: The same by the names of Pillow and FFmpeg.
_PICTURES, _CLIPS = ("PNG", "WEBP"), "mp4"
_LAYOUTS = {1: "mono", 2: "stereo"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sound:
    """The sound of a clip."""

    samples: np.ndarray
    """(N, C) int16 with one or two channels."""
    rate: int
    """Samples per second."""

    def at(self, rate: int) -> Sound:
        """Return the sound at another rate, resampled by FFmpeg if the rate differs."""
        if rate == self.rate:
            return self
        av, layout = _av(), _LAYOUTS[self.samples.shape[1]]
        whole = av.AudioFrame.from_ndarray(np.ascontiguousarray(self.samples).reshape(1, -1), "s16", layout)
        whole.sample_rate = self.rate
        resampler = av.AudioResampler("s16", layout, rate)
        parts = [*resampler.resample(whole), *resampler.resample(None)]
        samples = np.concatenate([part.to_ndarray().reshape(-1, self.samples.shape[1]) for part in parts])
        return Sound(samples=samples, rate=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFormat:
    """Storage format of media. Rewards score the stored form."""

    name: str = "auto"
    """png, webp or mp4; auto: png for images, mp4 for clips."""
    lossless: bool = True
    """Keep every value; otherwise webp and mp4 are compressed visually lossless."""
    fps: int = 16
    """Frames per second of clips."""
    codec: Literal["flac", "aac"] = "flac"
    """Codec of sound: flac is lossless, aac is supported by every player."""

    def choose(self, media: np.ndarray) -> str:
        """Return the format for an image (H, W, 3) or a clip (F, H, W, 3)."""
        clip = media.ndim == 4
        name = ("mp4" if clip else "png") if self.name == "auto" else self.name
        if clip != (name == "mp4"):
            kind = "a clip" if clip else "an image"
            raise ConfigError(f"rollout.media.format is '{name}', which cannot hold {kind}. Use auto.")
        return name

    def encode(self, media: np.ndarray, sound: Sound | None = None) -> bytes:
        """Return the bytes of a file that holds an image (H, W, 3) or clip (F, H, W, 3), uint8, and its sound."""
        name = self.choose(media)
        if name == "mp4":
            return _encode_clip(media, sound, self)
        buffer = io.BytesIO()
        if name == "png":
            # For images, run-length encoding is faster than a search for repeats, and gives smaller files.
            Image.fromarray(media).save(buffer, format="PNG", compress_level=1, compress_type=Image.RLE)
        else:
            Image.fromarray(media).save(buffer, format="WEBP", lossless=self.lossless, quality=90, method=2)
        return buffer.getvalue()


DEFAULT_MEDIA = MediaFormat()


def decode(data: bytes | memoryview, name: str, *, where: str) -> np.ndarray:
    """Return the image (H, W, 3) or clip (F, H, W, 3) in a file, uint8."""
    try:
        if name == "mp4":
            return _decode_clip(bytes(data))
        with Image.open(io.BytesIO(data), formats=_PICTURES) as image:
            return np.asarray(image.convert("RGB"))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a decoder may raise anything
        raise CorruptError(f"{where} cannot be decoded as {name}: {first_line(error)}") from None


def decode_sound(data: bytes | memoryview, *, where: str) -> Sound | None:
    """Return the sound of an mp4, None for a clip without sound."""
    av = _av()
    try:
        with av.open(io.BytesIO(data), format=_CLIPS) as container:
            if not container.streams.audio:
                return None
            stream = container.streams.audio[0]
            parts = [frame.to_ndarray().reshape(-1, stream.channels) for frame in container.decode(stream)]
            return Sound(samples=np.concatenate(parts), rate=stream.rate)
    except Exception as error:  # noqa: BLE001 - as above
        raise CorruptError(f"The sound of {where} cannot be decoded: {first_line(error)}") from None


#: Options for deterministic bytes: otherwise x264's lookahead at half-size frames depends on the content of memory, and
#: one clip in a hundred or so differs.
_STEADY = {"bf": "0", "x264-params": "rc-lookahead=0:sync-lookahead=0:mbtree=0:weightp=0:scenecut=0"}


def _encode_clip(frames: np.ndarray, sound: Sound | None, form: MediaFormat) -> bytes:
    av, lossless = _av(), form.lossless
    buffer = io.BytesIO()
    # No creation time and a single thread, so that equal clips give equal bytes.
    with av.open(buffer, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264rgb" if lossless else "libx264", rate=form.fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb24" if lossless else "yuv420p"
        stream.thread_count = 1
        stream.options = {"crf": "0" if lossless else "17", "preset": "veryfast", "flags": "+bitexact", **_STEADY}
        heard = None if sound is None else _sound_stream(container, sound, form.codec)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
        if sound is not None and heard is not None:
            layout = _LAYOUTS[sound.samples.shape[1]]
            whole = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound.samples).reshape(1, -1), "s16", layout)
            whole.sample_rate, whole.pts = sound.rate, 0
            container.mux(heard.encode(whole))
            container.mux(heard.encode())
    return buffer.getvalue()


def _sound_stream(container: Any, sound: Sound, codec: str) -> Any:
    stream = container.add_stream(codec, rate=sound.rate, layout=_LAYOUTS[sound.samples.shape[1]])
    stream.thread_count, stream.options = 1, {"flags": "+bitexact"}
    if codec == "flac":
        stream.format = "s16"
    return stream


def _decode_clip(data: bytes) -> np.ndarray:
    av = _av()
    with av.open(io.BytesIO(data), format=_CLIPS) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _av():  # type: ignore[no-untyped-def]
    require_extra("video", "av", label="A clip")
    import av

    return av
