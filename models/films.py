"""Reads video files of users as players display them, and their sound.

A header may turn and mirror the frames, widen their pixels, and name their colors; transparent pixels are put on white.
The crop that a container may name is not applied, as browsers do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from flowmill.configs.errors import FlowmillError, first_line
from flowmill.configs.extras import require_extra
from flowmill.models.picture_colors import on_white

#: Most bytes of the frames of a clip: a small file may hold many large ones.
MOST_BYTES = 1 << 32
#: FFmpeg's numbers of matrices: that which no header names, that of BT.709.
_UNKNOWN, _OF_HD = 2, 1
#: Those of colors that sRGB lacks: transfers linear, PQ and HLG; primaries of BT.2020, DCI-P3 and Display P3.
_TRANSFERS, _PRIMARIES = (8, 16, 18), (9, 11, 12)
#: Brands of AVIF and HEIF, whose images lie in the container of films, in tiles.
_STILLS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
#: Decoders that see the transparency of WebM, by codec.
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}


def is_film(file: Path | BinaryIO) -> bool:
    """Return whether a file is an MP4, QuickTime, Matroska or WebM video, by its first bytes."""
    return bool(_container(file))


def film_size(file: Path | BinaryIO) -> tuple[int, int]:
    """Return width and height of a video in square pixels before it is turned, from its header; raise ConfigError if
    the package that reads videos is not installed, ValueError if it cannot be read."""
    with _opened(file) as (_, stream):
        return _squared(stream.width, stream.height, stream.sample_aspect_ratio)


def is_plain_film(file: Path | BinaryIO) -> bool:
    """Return whether a video is displayed as stored, by its first frame; raise as ``film_frames``."""
    with _opened(file) as (film, stream):
        return all(_Display.of(frame, stream).plain for frame in islice(_decoded(film, stream), 1))


def film_frames(file: Path | BinaryIO, most: int, fps: int | None = None) -> np.ndarray:
    """Return (F, H, W, 3) uint8 frames, see ``flowmill.models.image_files.open_clip``."""
    frames: list[np.ndarray] = []
    with _opened(file) as (film, stream):
        decoded, shown = _decoded(film, stream), None
        for frame in islice(decoded if fps is None else _at_rate(decoded, stream, fps), most):
            shown = shown or _Display.of(frame, stream)
            frames.append(shown.pixels(frame))
            if len(frames) * frames[0].nbytes > MOST_BYTES:
                raise ValueError(f"its frames have more than {MOST_BYTES:,} bytes. Scale it down")
    if not frames:
        raise ValueError("it holds no frames")
    return np.stack(frames)


def open_sound(file: BinaryIO, *, rate: int, channels: int, length: int) -> np.ndarray:
    """Return the (N, C) int16 sound of a video from its first frame, at most ``length`` samples at ``rate`` per second,
    resampled by FFmpeg; mono is both channels of stereo. Raises ConfigError if the package that reads videos is not
    installed; ValueError if there is no sound, or it cannot be read."""
    sound, at = np.zeros((length, channels), np.int16), 0
    with _opened(file, "its sound cannot be decoded") as (film, begin):
        if not film.streams.audio:
            raise ValueError("it has no sound")
        source = film.streams.audio[0]
        # FFmpeg would lower mono as both channels of stereo by 3 dB.
        heard = 1 if source.channels < 2 else channels
        start = float((begin.start_time or 0) * begin.time_base)
        for time, samples in _sounds(film.decode(source), heard, rate):
            if time is not None:
                at = round((time - start) * rate)
            rows = samples[max(0, -at) : max(0, length - at)]
            sound[max(0, at) : max(0, at) + len(rows)] = rows
            at += len(samples)
            if at >= length:
                break
    return sound[: max(0, at)]


def _sounds(decoded: Iterable[Any], heard: int, rate: int) -> Iterator[tuple[float | None, np.ndarray]]:
    """Yield resampled parts (N, C) of a sound, the first with its second."""
    import av

    resampler = av.AudioResampler("s16", {1: "mono", 2: "stereo"}[heard], rate)
    time: float | None = None
    for number, frame in enumerate(decoded):
        time = None if number else frame.time or 0.0
        for part in resampler.resample(frame):
            yield time, part.to_ndarray().reshape(-1, heard)
            time = None


def _container(file: Path | BinaryIO) -> str:
    """Return FFmpeg's name of the container; "" for other files."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return _container(opened)
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    if head[4:8] == b"ftyp":
        return "" if head[8:12] in _STILLS else "mov"
    return "matroska" if head[:4] == b"\x1aE\xdf\xa3" else ""


@contextlib.contextmanager
def _opened(file: Path | BinaryIO, problem: str = "it holds no film") -> Iterator[tuple[Any, Any]]:
    """Give a video and its stream of frames; raise any error of FFmpeg as ValueError."""
    require_extra("video", "av", label=f"the film '{getattr(file, 'name', file)}'")
    import av

    # FFmpeg would take a path for an address, and choose a format by content: some name other files.
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(file.open("rb")) if isinstance(file, Path) else file
        try:
            film = stack.enter_context(av.open(data, format=_container(data)))
            cover = av.stream.Disposition.attached_pic
            yield film, next(each for each in film.streams.video if not each.disposition & cover)
        except Exception as error:
            if isinstance(error, FlowmillError) or type(error) is ValueError:
                raise
            raise ValueError(f"{problem} ({first_line(error) or type(error).__name__})") from None


def _decoded(film: Any, stream: Any) -> Iterator[Any]:
    import av

    name = _WITH_ALPHA.get(stream.codec_context.name)
    if name is None or stream.metadata.get("alpha_mode") != "1":
        yield from film.decode(stream)
        return
    decoder = av.CodecContext.create(name, "r")
    for packet in film.demux(stream):
        yield from decoder.decode(packet)


def _at_rate(decoded: Iterable[Any], stream: Any, fps: int) -> Iterator[Any]:
    """Yield the frames of a video as FFmpeg's filter fps gives them: each until the next one begins."""
    import av

    graph = av.filter.Graph()
    rated = graph.add("fps", f"{fps}:eof_action=pass")
    graph.link_nodes(graph.add_buffer(template=stream), rated, graph.add("buffersink")).configure()
    for frame in chain(decoded, [None]):
        graph.push(frame)
        try:
            while True:
                yield graph.pull()
        except (av.BlockingIOError, av.EOFError):
            continue


@dataclass(frozen=True, slots=True)
class _Display:
    """How the frames of a film are displayed."""

    aspect: Fraction | None
    """Width of a pixel over its height."""
    turn: tuple[bool, bool, bool]
    """Whether frames are transposed, and then mirrored from left to right and from top to bottom."""
    unnamed: bool
    """Whether no header names the matrix of a film of high definition: players take that of BT.709."""
    clear: bool
    """Whether pixels may be transparent."""
    colors: Any
    """Filters that convert colors which sRGB lacks; None for others."""

    @staticmethod
    def of(frame: Any, stream: Any) -> _Display:
        """Return the display of a film's first frame."""
        unnamed = frame.colorspace == _UNKNOWN and not frame.format.is_rgb
        return _Display(
            aspect=stream.sample_aspect_ratio,
            turn=_turn(frame),
            unnamed=unnamed and (frame.width >= 1280 or frame.height > 576),
            clear=any(each.is_alpha for each in frame.format.components),
            colors=_conversion(frame),
        )

    @property
    def plain(self) -> bool:
        return self.aspect in (None, 1) and not (any(self.turn) or self.unnamed or self.clear or self.colors)

    def pixels(self, frame: Any) -> np.ndarray:
        """Return the (H, W, 3) uint8 pixels of a frame."""
        if self.colors:
            self.colors.push(frame)
            frame = self.colors.pull()
        matrix = _OF_HD if self.unnamed else None
        image = frame.to_ndarray(format="rgba" if self.clear else "rgb24", src_colorspace=matrix)
        if self.clear:
            image = np.asarray(on_white(Image.fromarray(image)))
        size = _squared(frame.width, frame.height, self.aspect)
        if size != (frame.width, frame.height):
            image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
        transposed, left, down = self.turn
        image = image.swapaxes(0, 1) if transposed else image
        return np.ascontiguousarray(image[:: -1 if down else 1, :: -1 if left else 1])


def _squared(width: int, height: int, aspect: Fraction | None) -> tuple[int, int]:
    """Return the size in square pixels, of which none is less than before."""
    if not aspect or aspect <= 0:
        return width, height
    return (round(width * aspect), height) if aspect >= 1 else (width, round(height / aspect))


def _turn(frame: Any) -> tuple[bool, bool, bool]:
    """Return how a frame is turned by its header; raise ValueError unless it is by quarters."""
    data = next((bytes(each) for each in frame.side_data if each.type.name == "DISPLAYMATRIX"), b"")
    if not data:
        return False, False, False
    # x' = ax + cy and y' = bx + dy, of points that lie at (x, y).
    a, b, _, c, d = np.frombuffer(data, np.int32)[:5].tolist()
    least = max(map(abs, (a, b, c, d))) // 64
    if max(abs(b), abs(c)) <= least:
        return False, a < 0, d < 0
    if max(abs(a), abs(d)) <= least:
        return True, c < 0, b < 0
    raise ValueError("its header turns it by no quarter. Save it upright")


def _conversion(frame: Any) -> Any:
    if frame.color_trc not in _TRANSFERS and frame.color_primaries not in _PRIMARIES:
        return None
    import av

    graph, alpha = av.filter.Graph(), any(each.is_alpha for each in frame.format.components)
    size = f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
    transfer = ":out_transfer=iec61966-2-1" if frame.color_trc in _TRANSFERS else ""
    graph.link_nodes(
        graph.add("buffer", f"{size}:colorspace={int(frame.colorspace)}:range={int(frame.color_range)}"),
        # FFmpeg's conversion of colors takes the matrix of BT.601 unless it gets RGB.
        graph.add("scale"),
        graph.add("format", "gbrap16le" if alpha else "gbrp16le"),
        # White of HDR is that of BT.2408, 203 cd/m2; lighter colors are white too.
        graph.add("scale", f"intent=relative_colorimetric:out_primaries=bt709{transfer}"),
        graph.add("format", "rgba" if alpha else "rgb24"),
        graph.add("buffersink"),
    ).configure()
    return graph
