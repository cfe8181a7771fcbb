"""Films that people give are read as players display them."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from flowmill.models import films
from flowmill.models.films import film_frames, film_size, is_plain_film
from flowmill.tasks.inputs.prompt_rows import images_of
from flowmill.tasks.inputs.rows.row import RowLocation

#: Corners in red, green, blue and black.
CORNERS = np.zeros((32, 64, 3), np.uint8)
CORNERS[:16, :32, 0] = CORNERS[:16, 32:, 1] = CORNERS[16:, :32, 2] = 255
TURNS = {
    (1, 0, 0, 1): "RGBK",
    (0, 1, -1, 0): "BRKG",
    (-1, 0, 0, -1): "KBGR",
    (0, -1, 1, 0): "GKRB",
    (-1, 0, 0, 1): "GRKB",
    (1, 0, 0, -1): "BKRG",
    (0, 1, 1, 0): "RBGK",
    (0, -1, -1, 0): "KGBR",
}
#: Settings of x264 for the headers of a film.
HEADERS = {
    "hlg": "colormatrix=bt2020nc:transfer=arib-std-b67:colorprim=bt2020",
    "pq": "colormatrix=bt2020nc:transfer=smpte2084:colorprim=bt2020",
    "p3": "colormatrix=bt709:transfer=bt709:colorprim=smpte432",
    "601": "colormatrix=smpte170m",
}


def film(path: Path, pixels: np.ndarray, form: str = "yuv444p", **headers: object) -> Path:
    """Write a film of two equal frames. ``headers``: x264 settings, and ``aspect`` of its pixels."""
    with av.open(path, "w") as out:
        stream = out.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], form
        stream.options = {"crf": "0", "x264-params": str(headers.get("x264", ""))}
        if "aspect" in headers:
            stream.codec_context.sample_aspect_ratio = headers["aspect"]
        for _ in range(2):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            out.mux(stream.encode(frame.reformat(format=form, dst_colorspace=headers.get("matrix"))))
        out.mux(stream.encode())
    return path


def turned(path: Path, matrix: tuple[int, ...]) -> Path:
    """Write another matrix into the header of a film."""
    data, (a, b, c, d) = bytearray(path.read_bytes()), (each << 16 for each in matrix)
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def corners(frame: np.ndarray) -> str:
    """Return the colors of a frame's corners, as a person reads them."""
    height, width = frame.shape[:2]
    places = ((4, 4), (4, width - 5), (height - 5, 4), (height - 5, width - 5))
    return "".join("RGBK"[int(np.argmax([*frame[place], 120]))] for place in places)


@pytest.mark.parametrize("matrix", TURNS)
def test_a_film_is_turned_and_mirrored_by_its_header(tmp_path: Path, matrix: tuple[int, ...]) -> None:
    path = turned(film(tmp_path / "film.mp4", CORNERS), matrix)
    for file in (path, io.BytesIO(path.read_bytes())):
        frames = film_frames(file, 2)
        assert frames.shape == ((2, 64, 32, 3) if matrix[0] == 0 else (2, 32, 64, 3))
        assert [corners(frame) for frame in frames] == [TURNS[matrix]] * 2
        assert is_plain_film(file) == (matrix == (1, 0, 0, 1))


def test_a_film_that_is_turned_by_no_quarter_is_refused(tmp_path: Path) -> None:
    path = turned(film(tmp_path / "film.mp4", CORNERS), (1, 1, -1, 1))
    with pytest.raises(ValueError, match="turns it by no quarter"):
        film_frames(path, 1)


@pytest.mark.parametrize(
    ("aspect", "size"), [(Fraction(2), (128, 32)), (Fraction(1, 2), (64, 64)), (Fraction(16, 15), (68, 32))]
)
def test_wide_pixels_become_square(tmp_path: Path, aspect: Fraction, size: tuple[int, int]) -> None:
    path = film(tmp_path / "film.mp4", CORNERS, aspect=aspect)
    assert film_size(path) == size
    (frame,) = film_frames(path, 1)
    assert (frame.shape, corners(frame)) == ((size[1], size[0], 3), "RGBK")
    assert not is_plain_film(path)


@pytest.mark.parametrize(("size", "matrix"), [((720, 1280), "ITU709"), ((576, 720), "ITU601")])
def test_a_matrix_that_no_header_names_is_that_of_the_size(tmp_path: Path, size: tuple[int, int], matrix: str) -> None:
    color = (200, 30, 90)
    path = film(tmp_path / "film.mp4", np.full((*size, 3), color, np.uint8), matrix=matrix)
    assert np.abs(film_frames(path, 1)[0, 5, 5].astype(int) - color).max() <= 2
    assert is_plain_film(path) == (matrix == "ITU601")
    named = film(tmp_path / "named.mp4", np.full((*size, 3), color, np.uint8), matrix="ITU601", x264=HEADERS["601"])
    assert np.abs(film_frames(named, 1)[0, 5, 5].astype(int) - color).max() <= 2
    assert is_plain_film(named)


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        # Half of the signal of HLG is 1/12 of the scene, (1/12) ** 1.2 of 1,000 cd/m2; three quarters are 203 cd/m2.
        ("hlg", (127.5, 137), (191.25, 255)),
        # 0.58 of the signal of PQ are 203 cd/m2.
        ("pq", (148, 255), (0, 0)),
    ],
)
def test_hdr_is_mapped_to_srgb_by_its_white(
    tmp_path: Path, name: str, left: tuple[float, int], right: tuple[float, int]
) -> None:
    grays = np.repeat(np.array([[round(left[0]), round(right[0])]], np.uint8), 32, 1).repeat(32, 0)[..., None]
    path = film(tmp_path / "film.mp4", grays.repeat(3, 2), "yuv420p10le", x264=HEADERS[name])
    frame = film_frames(path, 1)[0].astype(int)
    for column, (_, expected) in ((5, left), (58, right)):
        assert np.abs(frame[5, column] - expected).max() <= 3
    assert not is_plain_film(path)


def test_wide_colors_are_those_of_srgb(tmp_path: Path) -> None:
    path = film(
        tmp_path / "film.mp4", np.full((32, 32, 3), (200, 100, 50), np.uint8), matrix="ITU709", x264=HEADERS["p3"]
    )
    # By the matrix of Display P3, with the curve of BT.1886: 214, 92, 20.
    assert np.abs(film_frames(path, 1)[0, 5, 5].astype(int) - (214, 92, 20)).max() <= 3


@pytest.mark.parametrize("codec", ["libvpx-vp9", "qtrle"])
@pytest.mark.parametrize("fps", [None, 16])
def test_what_is_transparent_lies_on_white(tmp_path: Path, codec: str, fps: int | None) -> None:
    path = tmp_path / ("film.webm" if codec == "libvpx-vp9" else "film.mov")
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[..., 0], pixels[:32, :, 3] = 255, 255
    with av.open(path, "w") as out:
        stream = out.add_stream(codec, rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuva420p" if codec == "libvpx-vp9" else "argb"
        stream.options = {"auto-alt-ref": "0"} if codec == "libvpx-vp9" else {}
        for _ in range(2):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=stream.pix_fmt)))
        out.mux(stream.encode())
    for frame in film_frames(path, 2, fps):
        assert np.abs(frame[[5, 50], 5].astype(int) - [[255, 0, 0], [255, 255, 255]]).max() <= 3
    assert not is_plain_film(path)


def test_large_frames_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(films, "MOST_BYTES", CORNERS.nbytes)
    path = film(tmp_path / "film.mp4", CORNERS)
    assert len(film_frames(path, 1)) == 1
    with pytest.raises(ValueError, match="its frames have more than 6,144 bytes"):
        film_frames(path, 2)


@pytest.mark.parametrize("change", [{}, {"aspect": Fraction(2)}])
def test_the_key_of_a_start_film_says_that_it_is_displayed_otherwise(
    tmp_path: Path, change: Mapping[str, object]
) -> None:
    film(tmp_path / "film.mp4", CORNERS, **change)
    _, key = images_of(
        {"image": "film.mp4"}, "image", RowLocation("prompts", f"{tmp_path}/rows.jsonl", 1), "prompts.image"
    )
    assert key.endswith("-as-seen") == bool(change)
