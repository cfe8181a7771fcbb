"""Images that people give are read as a person sees them, whatever their mode and depth."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.image_files import film_size, is_film, is_plain, open_clip, open_picture
from storage.trajectories.media import MediaFormat


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


def test_what_only_begins_as_a_film_is_refused(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(bytes(4) + b"ftypisom" + bytes(100))
    for read in (lambda file: open_clip(file, 3), open_picture, film_size):
        with pytest.raises(ValueError, match="it holds no film"):
            read(tmp_path / "film.mp4")
