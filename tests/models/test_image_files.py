"""Images that people give are read as a person sees them, whatever their mode and depth."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from models.image_files import film_size, is_film, is_plain, open_clip, open_picture, open_sound
from storage.trajectories.media import MediaFormat, Sound


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
