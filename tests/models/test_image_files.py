"""Images that people give are read as a person sees them, whatever their mode and depth."""

from __future__ import annotations

import ast
import contextlib
import io
import struct
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from flowmill.configs.errors import PromptError
from flowmill.models import image_files
from flowmill.models.films import film_size, is_film, open_sound
from flowmill.models.image_files import FORMATS, frames_in, is_plain, open_clip, open_picture, opened_picture, size_of
from flowmill.storage.trajectories.media import MediaFormat, Sound
from flowmill.tasks.inputs.prompt_rows import images_of
from flowmill.tasks.inputs.rows.row import RowLocation


def test_a_photo_taken_sideways_is_upright(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4] = (255, 0, 0)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "p.png", exif=exif)
    seen = open_picture(tmp_path / "p.png")
    assert seen.shape == (8, 4, 3)
    assert seen[0, 0].tolist() == [255, 0, 0]
    assert seen[-1, 0].tolist() == [0, 0, 0]
    with Image.open(tmp_path / "p.png") as opened:
        assert not is_plain(opened)


def tiff(values: np.ndarray, bits: int, photometric: int) -> io.BytesIO:
    """Return a TIFF file of one row of gray values; ``photometric`` is 0 where 0 is white."""
    data = values.astype("<u2").tobytes()
    if bits == 12:
        data = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in values.reshape(-1, 2).tolist())
    tags = {256: values.size, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1, 279: len(data)}
    table = b"".join(struct.pack("<HHII", name, 4, 1, value) for name, value in tags.items())
    end = struct.pack("<H", len(tags)) + table + bytes(4)
    return io.BytesIO(b"II*\0" + struct.pack("<I", 8 + len(data)) + data + end)


@pytest.mark.parametrize(("bits", "photometric"), [(16, 1), (16, 0), (12, 1)])
def test_tiff_says_what_is_white(bits: int, photometric: int) -> None:
    most = (1 << bits) - 1
    found = open_picture(tiff(np.array([0, most // 3, most // 2, most - most // 3]), bits, photometric))[0, :, 0]
    expected = np.array([0, 85, 127, 170]) if photometric else 255 - np.array([0, 85, 127, 170])
    assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("deep", [True, False])
def test_a_gray_that_is_transparent_lies_on_white(deep: bool) -> None:
    scale, file = 257 if deep else 1, io.BytesIO()
    Image.fromarray(np.array([[0, 100 * scale]], np.uint16 if deep else np.uint8)).save(
        file, "PNG", transparency=100 * scale
    )
    assert open_picture(file)[0, :, 0].tolist() == [0, 255]


def test_a_photo_with_a_preview_is_one_picture() -> None:
    """Phones write a map of lights after the photo, in one MPO file."""
    file = io.BytesIO()
    photo, other = Image.new("RGB", (32, 16), "red"), Image.new("RGB", (32, 16))
    photo.save(file, "MPO", save_all=True, append_images=[other])
    with opened_picture(file) as image:
        assert (image.format, image.n_frames, frames_in(image)) == ("MPO", 2, 1)
    assert open_clip(file, 9).shape == (1, 16, 32, 3)


def test_an_animated_image_is_upright_too(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 4), color) for color in ("red", "blue")]
    exif = Image.Exif()
    exif[0x0112] = 6
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True, exif=exif)
    assert open_clip(tmp_path / "a.webp", 9).shape == (2, 8, 4, 3)


def test_large_frames_of_images_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Image.new("RGB", (8, 4), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    monkeypatch.setattr(image_files, "MOST_BYTES", 100)
    assert len(open_clip(tmp_path / "a.gif", 1)) == 1
    with pytest.raises(ValueError, match="its frames have more than 100 bytes"):
        open_clip(tmp_path / "a.gif", 2)


def test_files_are_opened_as_pictures_and_films_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PostScript file would start Ghostscript, whatever its name; a HEIC photo is no film of tiles."""
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 16\n%%EndComments\nshowpage\n%%EOF\n"
    for name, content in (("7.png", script), ("8.png", bytes(4) + b"ftypheic" + bytes(99))):
        (tmp_path / name).write_bytes(content)
        for read in (open_picture, size_of, lambda file: open_clip(file, 1)):
            with pytest.raises(ValueError, match="it is no image of the formats PNG, JPEG, WEBP"):
                read(tmp_path / name)
        with pytest.raises(PromptError, match=r"line 1: .* is not an image: it is no image of the formats"):
            images_of({"i": name}, "i", RowLocation("prompts", f"{tmp_path}/rows.jsonl", 1), "prompts.image")


def _unnamed(path: Path) -> list[int]:
    """Return the lines of a file that open a picture, or a film for reading, without naming its formats."""
    wrong = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called, named = ast.unparse(node.func), {each.arg for each in node.keywords}
        reads_film = called == "av.open" and not any(ast.unparse(each) == "'w'" for each in node.args)
        if (called.endswith("Image.open") and "formats" not in named) or (reads_film and "format" not in named):
            wrong.append(node.lineno)
    return wrong


def test_every_opening_names_its_formats() -> None:
    root = Path(__file__).parents[2]
    files = [
        file
        for room in ("configs", "storage", "models", "tasks", "flows", "flowmill", "tools")
        for file in root.glob(f"{room}/**/*.py")
    ]
    assert len(files) > 500
    assert {str(file): lines for file in files if (lines := _unnamed(file))} == {}


@pytest.mark.parametrize("form", FORMATS)
def test_whatever_a_decoder_raises_is_one_message(form: str) -> None:
    """Each byte of the head and every tenth of the rest is changed; then the file is cut."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 32, 3), np.uint8)).save(file, form)
    data = file.getvalue()
    step = max(10, len(data) // 100)
    damaged = [bytearray(data) for _ in range(2 * len(range(0, len(data), step)) + 128)]
    places = [*range(64), *range(64), *range(0, len(data), step), *range(0, len(data), step)]
    for number, (place, each) in enumerate(zip(places, damaged, strict=True)):
        each[min(place, len(data) - 1)] ^= 255 if number % 2 else 1
    for each in [*map(bytes, damaged), *(data[:size] for size in range(0, len(data), step))]:
        with warnings.catch_warnings(), contextlib.suppress(ValueError):
            warnings.simplefilter("ignore")
            open_clip(io.BytesIO(each), 2)


def test_a_decoder_that_raises_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyError("x"), struct.error("y"), AssertionError(), MemoryError(), Image.DecompressionBombError("z")):
        file = io.BytesIO()
        Image.new("RGB", (4, 4)).save(file, "PNG")

        def fail(*arguments: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
        with pytest.raises(ValueError, match="it cannot be decoded"):
            open_picture(file)


def test_deep_gray_keeps_its_range(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 32896, 65535]], np.uint16)).save(tmp_path / "p.png")
    assert open_picture(tmp_path / "p.png")[0, :, 0].tolist() == [0, 128, 255]


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "p.png")
    assert (open_picture(tmp_path / "p.png") == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "LA", "RGBA"])
def test_white_is_white_in_every_mode(tmp_path: Path, mode: str) -> None:
    Image.new("RGB", (3, 2), "white").convert(mode).save(tmp_path / "p.tiff")
    assert open_picture(tmp_path / "p.tiff").tolist() == [[[255, 255, 255]] * 3] * 2


@pytest.mark.parametrize(("white", "value"), [(1.0, 0.5), (255.0, 128.0), (65535.0, 32768.0)])
def test_floats_are_gray_by_the_range_they_have(tmp_path: Path, white: float, value: float) -> None:
    Image.fromarray(np.array([[0, value, white]], np.float32)).save(tmp_path / "p.tiff")
    assert open_picture(tmp_path / "p.tiff")[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_numbers_that_are_no_brightness_are_refused(tmp_path: Path, value: float) -> None:
    Image.fromarray(np.array([[0, value]], np.float32)).save(tmp_path / "p.tiff")
    with pytest.raises(ValueError, match="no brightness"):
        open_picture(tmp_path / "p.tiff")


@pytest.mark.parametrize("suffix", ["webp", "gif", "mp4"])
def test_clips_are_read_frame_by_frame_and_seen_by_their_first(tmp_path: Path, suffix: str) -> None:
    path, film = tmp_path / f"film.{suffix}", np.repeat(np.uint8([10, 120, 240])[:, None, None, None], 3, axis=3)
    film = np.broadcast_to(film, (3, 32, 48, 3)).copy()
    if suffix == "mp4":
        path.write_bytes(MediaFormat(lossless=True).encode(film))
    else:
        first, *rest = [Image.fromarray(frame) for frame in film]
        first.save(path, save_all=True, append_images=rest, lossless=True)
    for file in (path, io.BytesIO(path.read_bytes())):
        assert is_film(file) == (suffix == "mp4")
        assert np.abs(open_clip(file, 3).astype(int) - film).max() <= 2
        assert len(open_clip(file, 2)) == 2
        np.testing.assert_array_equal(open_picture(file), open_clip(file, 1)[0])


@pytest.mark.parametrize("kind", ["begins as one", "unknown codec"])
def test_what_is_not_a_film_is_refused(tmp_path: Path, kind: str) -> None:
    data, sound = bytes(4) + b"ftypisom" + bytes(100), Sound(samples=np.zeros((99, 2), np.int16), rate=16000)
    if kind == "unknown codec":
        data = MediaFormat().encode(np.zeros((3, 32, 48, 3), np.uint8), sound).replace(b"avc1", b"zzzz")
        with pytest.raises(ValueError, match="its sound cannot be decoded"):
            open_sound(io.BytesIO(data.replace(b"fLaC", b"zzzz")), rate=16000, channels=2, length=99)
    (tmp_path / "film.mp4").write_bytes(data)
    for read in (lambda file: open_clip(file, 3), lambda file: open_clip(file, 3, 24), open_picture, film_size):
        with pytest.raises(ValueError, match="it holds no film"):
            read(tmp_path / "film.mp4")


def film(path: Path, frames: Sequence[float], sounds: Mapping[float, np.ndarray]) -> Path:
    """Write a film with a gray frame, each lighter than the one before, and 16 kHz stereo at the given seconds."""
    with av.open(path, "w") as container:
        video, audio = (
            container.add_stream("ffv1", rate=1000),
            container.add_stream("pcm_s16le", 16000, layout="stereo"),
        )
        video.width = video.height = 16
        video.pix_fmt = "gray"
        for number, second in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16), 20 * number, np.uint8), format="gray")
            frame.pts, frame.time_base = round(1000 * second), Fraction(1, 1000)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        for second, samples in sounds.items():
            part = av.AudioFrame.from_ndarray(samples.reshape(1, -1), "s16", "stereo")
            part.sample_rate, part.pts, part.time_base = 16000, round(16000 * second), Fraction(1, 16000)
            container.mux(audio.encode(part))
        container.mux(audio.encode())
    return path


def test_frames_at_another_rate_last_until_the_next_one(tmp_path: Path) -> None:
    sound = np.full((16, 2), 5, np.int16)
    path = film(tmp_path / "film.mkv", [0.0, 0.1, 0.4, 0.5], {0.0: sound})
    found = open_clip(path, 99, fps=10)
    assert (found[:, 0, 0, 0] // 20).tolist() == [0, 1, 1, 1, 2, 3]
    assert len(open_clip(path, 2, fps=10)) == 2
    assert (open_clip(path, 99, fps=20)[:, 0, 0, 0] // 20).tolist() == [0, 0, *[1] * 6, 2, 2, 3]


@pytest.mark.parametrize("late", [0.25, -0.25])
def test_a_sound_is_cut_to_the_frames_it_belongs_to(tmp_path: Path, late: float) -> None:
    sound = np.random.default_rng(0).integers(-9999, 9999, (16000, 2), np.int16)
    first, begins = max(0, -late), max(0, late)
    path = film(tmp_path / "film.mkv", [first + n / 10 for n in range(8)], {begins: sound})
    with path.open("rb") as file:
        found = open_sound(file, rate=16000, channels=2, length=9000)
    expected = np.concatenate([np.zeros((4000, 2), np.int16), sound[:5000]]) if late > 0 else sound[4000:13000]
    np.testing.assert_array_equal(found, expected)
    with path.open("rb") as file:
        assert len(open_sound(file, rate=16000, channels=2, length=99_999)) == 16000 + 16000 * late
    with path.open("rb") as file:
        assert open_sound(file, rate=8000, channels=1, length=4000).shape == (4000, 1)
