"""One row of a prompt source: its text, its other columns and its images, checked."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flowmill.configs.errors import CorruptError, DataError, PromptError
from flowmill.models.films import is_film, is_plain_film
from flowmill.models.image_files import is_plain, open_clip, open_picture, opened_picture, size_of
from flowmill.models.picture_colors import conversion_of
from flowmill.storage.backends.checksums import hash_data, hash_file
from flowmill.storage.names import inside
from flowmill.tasks.inputs.rows.read import folder_of, read_again
from flowmill.tasks.inputs.rows.remote import is_remote
from flowmill.tasks.inputs.rows.row import Media, RowLocation, decoded, placed

#: Limit on pixels, as a small file can claim to be an image of any size; models take a hundredth of this.
_MOST_PIXELS = 1 << 26
#: Suffixes of the keys of images and films that are displayed differently from their stored pixels (such as by EXIF
#: rotation), and of images whose colors are converted. Keys differ, as earlier conditions may hold encodings of the raw
#: pixels.
_AS_SEEN, _IN_SRGB = "-as-seen", "-in-srgb"


#: A file, or its content where the rows hold it.
ImageSource = Path | bytes


def text_of(value: Any, place: RowLocation, setting: str | None) -> str:
    """Return the text of a prompt.

    Args:
        value: the content of its column.
        place: location of the row.
        setting: the setting that names the column, if there is one.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        raise PromptError(f"{place}: the prompt is empty. Remove the line or write a prompt.")
    if not isinstance(value, str):
        other = "" if setting is None else f", or set {setting} to a column of texts"
        raise PromptError(
            f"{place}: the prompt is {kind_of(value)}, not a text: {str(value)[:60]}. Write one text per line or "
            f"row{other}."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{place}: the prompt has half a character at position {error.start + 1}, which is no Unicode text. "
            "Write the prompt again."
        ) from None
    return value


def as_read(text: str) -> str:
    """Return a prompt as it counts in comparisons of held-out with train prompts: without case and spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def kind_of(value: Any) -> str:
    """Return what a value that should be a text is, in words."""
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, bool):
        return "a truth value"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def metadata_of(row: Mapping[str, Any], used: Collection[str | None], place: RowLocation) -> dict[str, Any]:
    """Return the columns of a row that are not used otherwise; those with bytes are refused, as JSON lacks them: a
    reward would get a list of numbers instead."""
    # Other members of a tar, such as arrays, are no columns.
    members = {name for name, value in row.items() if isinstance(value, Media) and not value.column}
    metadata = {str(name): value for name, value in row.items() if name not in used and name not in members}
    for column, value in metadata.items():
        if _holds_bytes(value):
            raise PromptError(
                f"{place}: the column '{column}' holds bytes, which no reward could be given as they are. Remove the "
                "column; where a reward needs the files, write them next to the list and their paths into a column."
            )
    return metadata


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview | Media):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_bytes, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_bytes, value))


def images_of(
    row: Mapping[str, Any], column: str, place: RowLocation, setting: str
) -> tuple[tuple[ImageSource, ...], str]:
    """Return the files of a row's images, in order, and their joined content keys.

    Images are paths, files as datasets hold them (bytes, or a mapping with bytes), cells of tables or members of tars.
    ``setting`` is the setting that names the column.
    """
    named = row.get(column)
    listed = list(named) if isinstance(named, list | tuple) else [named]
    listed = [each.get("bytes") or each.get("path") if isinstance(each, Mapping) else each for each in listed]
    listed = [each if (data := decoded(each)) is None else data for each in listed]
    names = [name for name in listed if isinstance(name, str | bytes | Media) and name]
    if not names or len(names) < len(listed):
        raise PromptError(
            f"{place} has no '{column}', the path of an image or a list of such paths. Add it, set {setting} to "
            f"another column, or leave {setting} out."
        )
    sources = [_image(_file(name, place), place) for name in names]
    return tuple(source for source, _ in sources), ",".join(key for _, key in sources)


def split_keys(joined: str) -> list[str]:
    """Return the keys of the images of a joined key."""
    return joined.split(",")


def file_below(folder: Path, name: str) -> Path:
    """Return the file that a row names, below the folder of the rows.

    Raises:
        ValueError: it leads outside, or is no file.
    """
    try:
        path = placed(folder, name)
    except ValueError as error:
        raise ValueError(f"{error}. Files are below the folder of the rows; put it there") from None
    if not path.is_file():
        fault = "is no regular file" if path.exists() else "does not exist. Paths are relative to the file of the rows"
        raise ValueError(f"'{path}' {fault}")
    return path


def _file(named: str | bytes | Media, place: RowLocation) -> ImageSource:
    folder = folder_of(place)
    try:
        if isinstance(named, Media):
            return named.data or read_again(place.source, named.start, named.size, named.column)
        if isinstance(named, bytes) or not is_remote(folder):
            return named if isinstance(named, bytes) else file_below(Path(folder), named)
        return read_again(f"{folder}/{inside(named)}", 0, None, ())
    except (ValueError, OSError, DataError) as error:
        raise PromptError(f"{place}: {str(error).rstrip('.')}.") from None


def readable(source: ImageSource) -> Path | BinaryIO:
    """Return an object that libraries open an image from."""
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _name(source: ImageSource) -> str:
    return "an image of the rows" if isinstance(source, bytes) else f"'{source}'"


def _image(source: ImageSource, place: RowLocation) -> tuple[ImageSource, str]:
    name = _name(source)
    key = hash_data(source) if isinstance(source, bytes) else hash_file(source)
    try:
        if large := too_large(*size_of(readable(source))):
            raise PromptError(f"{place}: {name} {large}. Scale it down.")
        return source, key + _suffix(source)
    except (OSError, ValueError) as error:
        raise PromptError(f"{place}: {name} is not an image: {error}.") from None


def _suffix(source: ImageSource) -> str:
    if is_film(readable(source)):
        return "" if is_plain_film(readable(source)) else _AS_SEEN
    with opened_picture(readable(source)) as image:
        suffix = _IN_SRGB if conversion_of(image) else "" if is_plain(image) else _AS_SEEN
        image.verify()
    return suffix


def _hash_of(key: str) -> str:
    """Return the hash of a file with an image, by the key of the image."""
    return key.partition("-")[0]


def read_picture(source: ImageSource) -> np.ndarray:
    """Return the (H, W, 3) uint8 pixels of a prompt's image, as a person sees it."""
    try:
        return open_picture(readable(source))
    except (OSError, ValueError) as error:
        name = _name(source)
        raise PromptError(f"image {name} cannot be read: {error}. Save it again, or remove its prompts.") from None


def read_clip(source: ImageSource, most: int) -> np.ndarray:
    """Return the first (F, H, W, 3) uint8 frames of a prompt's clip, or an image (H, W, 3) as it is."""
    try:
        clip = open_clip(readable(source), most)
    except (OSError, ValueError) as error:
        name = _name(source)
        raise PromptError(f"clip {name} cannot be read: {error}. Save it again, or remove its prompts.") from None
    return read_picture(source) if len(clip) == 1 and not is_film(readable(source)) else clip


def image_data(source: ImageSource, key: str) -> bytes:
    """Return the file of a prompt's image."""
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise PromptError(f"image '{source!s}' cannot be read: {error}. Put it back.") from None
    if hash_data(data) != _hash_of(key):
        raise PromptError(
            f"image {_name(source)} was changed since the prompts were read. Give the same command again."
        )
    return data


def picture_of(data: bytes, key: str, where: str) -> np.ndarray:
    """Return the (H, W, 3) uint8 pixels of a stored prompt image, as a person sees it; the array is read-only.

    Args:
        data: content of the file.
        key: content key of the image.
        where: location, for errors.
    """
    return _opened(data, key, where, open_picture)


def frames_of(data: bytes, key: str, where: str, count: int) -> np.ndarray:
    """Return the first (F, H, W, 3) uint8 frames of a stored prompt clip; an image is repeated F times.

    Args:
        data: content of the file.
        key: content key of the clip.
        where: location, for errors.
        count: F.
    """
    film = _opened(data, key, where, lambda file: open_clip(file, count))
    return np.repeat(film, count, axis=0) if len(film) == 1 else film


def _opened(data: bytes, key: str, where: str, read: Callable[[BinaryIO], np.ndarray]) -> np.ndarray:
    if hash_data(data) != _hash_of(key):
        raise CorruptError(f"{where}: image {key} has other content than that. Say 'flowmill store verify --deep'.")
    try:
        if large := too_large(*size_of(io.BytesIO(data))):
            raise CorruptError(f"{where}: image {key} {large}.")
        seen = read(io.BytesIO(data))
    except (OSError, ValueError) as error:
        raise CorruptError(f"{where}: image {key} cannot be read: {error}.") from None
    seen.setflags(write=False)
    return seen


def too_large(width: int, height: int) -> str:
    """Return the complaint on an image that is too large; '' otherwise."""
    pixels = width * height
    return f"has {pixels:,} pixels, more than {_MOST_PIXELS:,}" if pixels > _MOST_PIXELS else ""
