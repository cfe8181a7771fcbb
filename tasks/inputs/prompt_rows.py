"""One row of a prompt source: its text, its other columns and its images, checked."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from configs.errors import CorruptError, PromptError
from models.image_files import film_size, is_film, is_plain, open_clip, open_picture
from storage.backends.checksums import hash_data, hash_file
from storage.names import below
from tasks.inputs.given_file import MEDIA, GivenFile

#: Limit on pixels, as a small file can claim to be an image of any size; models take a hundredth of this.
_MOST_PIXELS = 1 << 26
#: File types whose rows are identified by line number.
_OF_LINES = (".txt", ".jsonl", ".csv", ".tsv")
#: Suffix of the key of an image that is displayed differently from its stored pixels (such as EXIF rotation).
AS_SEEN = "-as-seen"


#: Rows of a source, each with the number of its line or row.
Rows = Iterable[tuple[int, Mapping[str, Any]]]
#: A file, or its content where the rows hold it.
ImageSource = Path | bytes


class RowLocation(NamedTuple):
    """Location of a row, for errors: file and number, or the image that is the row."""

    where: str
    source: str
    number: int

    def __str__(self) -> str:
        if self.source.lower().endswith(MEDIA):
            return f"{self.where}: {self.source}"
        unit = "line" if self.source.lower().endswith(_OF_LINES) else "row"
        return f"{self.where}: {self.source}, {unit} {self.number}"


def text_of(value: Any, place: RowLocation, setting: str | None) -> str:
    """Return the text of a prompt.

    Args:
        value: the content of its column.
        place: location of the row.
        setting: the setting that names the column, if there is one.

    Raises:
        PromptError: the value is empty or not a text.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        raise PromptError(f"{place}: the prompt is empty. Remove the line or write a prompt.")
    if not isinstance(value, str):
        other = "" if setting is None else f", or set {setting} to a column of texts"
        raise PromptError(
            f"{place}: the prompt is {_kind_of(value)}, not a text: {str(value)[:60]}. Write one text per line or "
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


def _kind_of(value: Any) -> str:
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, bool):
        return "a truth value"
    return "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"


def check_metadata(metadata: Mapping[str, Any], place: RowLocation) -> None:
    """Refuse columns with bytes, which JSON lacks: a reward would get a list of numbers instead."""
    for column, value in metadata.items():
        if _holds_bytes(value):
            raise PromptError(
                f"{place}: the column '{column}' holds bytes, which no reward could be given as they are. Remove the "
                "column; where a reward needs the files, write them next to the list and their paths into a column."
            )


def _holds_bytes(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_bytes, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_bytes, value))


def images_of(
    row: Mapping[str, Any], column: str, place: RowLocation, folder: Path, setting: str
) -> tuple[tuple[ImageSource, ...], str]:
    """Return the files of a row's images, in order, and their joined content keys.

    Images are paths, files as datasets hold them (bytes, or a mapping with bytes), or members of tars. ``setting`` is
    the setting that names the column.

    Raises:
        PromptError: the row has no image, or one cannot be used.
    """
    named = row.get(column)
    listed = list(named) if isinstance(named, list | tuple) else [named]
    listed = [each.get("bytes") or each.get("path") if isinstance(each, Mapping) else each for each in listed]
    listed = [each.read() if isinstance(each, GivenFile) else each for each in listed]
    names = [name for name in listed if isinstance(name, str | bytes) and name]
    if not names or len(names) < len(listed):
        raise PromptError(
            f"{place} has no '{column}', the path of an image or a list of such paths. Add it, set {setting} to "
            f"another column, or leave {setting} out."
        )
    found = [_image(_file(name, place, folder), place) for name in names]
    return tuple(source for source, _ in found), join_keys(key for _, key in found)


def join_keys(keys: Iterable[str]) -> str:
    """Return one key for several images in order; for one image, its own key."""
    return ",".join(keys)


def split_keys(joined: str) -> list[str]:
    """Return the keys of the images of a joined key."""
    return joined.split(",")


def file_below(folder: Path, name: str) -> Path:
    """Return the file that a row names, below the folder of the rows.

    Raises:
        ValueError: it leads outside, or is no file.
    """
    try:
        path = below(folder, name)
    except ValueError as error:
        raise ValueError(f"{error}. Files are below the folder of the rows; put it there") from None
    if not path.is_file():
        found = "is no regular file" if path.exists() else "does not exist. Paths are relative to the file of the rows"
        raise ValueError(f"'{path}' {found}")
    return path


def _file(named: str | bytes, place: RowLocation, folder: Path) -> ImageSource:
    try:
        return named if isinstance(named, bytes) else file_below(folder, named)
    except ValueError as error:
        raise PromptError(f"{place}: {error}.") from None


def readable(source: ImageSource) -> Path | BinaryIO:
    """Return an object that libraries open an image from."""
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _name(source: ImageSource) -> str:
    return "an image of the rows" if isinstance(source, bytes) else f"'{source}'"


def _image(source: ImageSource, place: RowLocation) -> tuple[ImageSource, str]:
    name = _name(source)
    key = hash_data(source) if isinstance(source, bytes) else hash_file(source)
    try:
        if is_film(readable(source)):
            if large := too_large(*film_size(readable(source))):
                raise PromptError(f"{place}: {name} {large}. Scale it down.")
            return source, key
        with Image.open(readable(source)) as image:
            if large := too_large(image.width, image.height):
                raise PromptError(f"{place}: {name} {large}. Scale it down.")
            plain = is_plain(image)
            image.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PromptError(f"{place}: {name} is not an image: {error}.") from None
    # The key differs for these images, as earlier conditions may hold encodings of the raw pixels.
    return source, key + ("" if plain else AS_SEEN)


def read_picture(source: ImageSource) -> np.ndarray:
    """Return the (H, W, 3) uint8 pixels of a prompt's image, as a person sees it.

    Raises:
        PromptError: it cannot be read.
    """
    try:
        return open_picture(readable(source))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        name = _name(source)
        raise PromptError(f"image {name} cannot be read: {error}. Save it again, or remove its prompts.") from None


def read_clip(source: ImageSource, most: int) -> np.ndarray:
    """Return the first (F, H, W, 3) uint8 frames of a prompt's clip, or an image (H, W, 3) as it is.

    Raises:
        PromptError: it cannot be read.
    """
    try:
        clip = open_clip(readable(source), most)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        name = _name(source)
        raise PromptError(f"clip {name} cannot be read: {error}. Save it again, or remove its prompts.") from None
    return read_picture(source) if len(clip) == 1 and not is_film(readable(source)) else clip


def image_data(source: ImageSource, key: str) -> bytes:
    """Return the file of a prompt's image.

    Raises:
        PromptError: the file changed since the prompts were read, or cannot be read.
    """
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise PromptError(f"image '{source!s}' cannot be read: {error}. Put it back.") from None
    if hash_data(data) != key.removesuffix(AS_SEEN):
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

    Raises:
        CorruptError: the data do not match the key, or are no image.
    """
    return _opened(data, key, where, open_picture)


def frames_of(data: bytes, key: str, where: str, count: int) -> np.ndarray:
    """Return the first (F, H, W, 3) uint8 frames of a stored prompt clip; an image is repeated F times.

    Args:
        data: content of the file.
        key: content key of the clip.
        where: location, for errors.
        count: F.

    Raises:
        CorruptError: the data do not match the key, or are no clip.
    """
    film = _opened(data, key, where, lambda file: open_clip(file, count))
    return np.repeat(film, count, axis=0) if len(film) == 1 else film


def _opened(data: bytes, key: str, where: str, read: Callable[[BinaryIO], np.ndarray]) -> np.ndarray:
    if hash_data(data) != key.removesuffix(AS_SEEN):
        raise CorruptError(f"{where}: image {key} has other content than that. Say 'flowmill store verify --deep'.")
    try:
        if large := too_large(*size_of(data)):
            raise CorruptError(f"{where}: image {key} {large}.")
        seen = read(io.BytesIO(data))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorruptError(f"{where}: image {key} cannot be read: {error}.") from None
    seen.setflags(write=False)
    return seen


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height of an image or clip, from its header."""
    if is_film(io.BytesIO(data)):
        return film_size(io.BytesIO(data))
    with Image.open(io.BytesIO(data)) as image:
        return image.size


def too_large(width: int, height: int) -> str:
    """Return the complaint about an image that is too large; '' otherwise."""
    pixels = width * height
    return f"has {pixels:,} pixels, more than {_MOST_PIXELS:,}" if pixels > _MOST_PIXELS else ""
