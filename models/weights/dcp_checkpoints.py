"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): folders that other tools write, or read with ``dcp.load``.

A folder has a ``.metadata``, a pickle that lists the tensors and the file of each of their parts. Parts are written
with ``torch.save``: an archive with a pickle and the bytes of the numbers. Both pickles are read as plain records
(``models.weights.plain_pickle``) and never become torch objects. Their content is checked: parts tile their tensor,
have its dtype, lie in files of the folder, and have as many bytes as their shape needs.
``torch.load(weights_only=True)`` is not enough: it accepts tensors that extend beyond the end of their storage.
"""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from configs.errors import ConfigError
from models.weights.coverage import MAX_DIMENSIONS, check_covered
from models.weights.plain_pickle import MAX_BYTES, PERSISTENT, Record, read_records

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

METADATA = ".metadata"
_ABOUT = "torch.distributed.checkpoint.metadata"
#: Dtypes of stored weights. Integers and 8-bit numbers would need scales that are stored elsewhere.
_DTYPES = {
    "torch.float64": ("torch.DoubleStorage", torch.float64),
    "torch.float32": ("torch.FloatStorage", torch.float32),
    "torch.float16": ("torch.HalfStorage", torch.float16),
    "torch.bfloat16": ("torch.BFloat16Storage", torch.bfloat16),
}
_ALL_DTYPES = {str(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
#: Names allowed in metadata, in addition to numbers, texts and their collections.
_IN_METADATA = (
    *(
        f"{_ABOUT}.{name}"
        for name in (
            "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
            "StorageMeta _MEM_FORMAT_ENCODING"
        ).split()
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    *_ALL_DTYPES,
)
_REBUILD = "torch._utils._rebuild_tensor_v2"
#: Names allowed in the pickle of a part, which is a tensor written by ``torch.save``.
_IN_PART = (_REBUILD, "collections.OrderedDict", *(storage for storage, _ in _DTYPES.values()))
#: Exceptions raised by malformed records or archives.
_MALFORMED = (
    ValueError,
    AttributeError,
    LookupError,
    TypeError,
    RuntimeError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
)
#: Prefixes of weights' names: of checkpoints written here, and of programs that save a bare model.
_PREFIXES = ("model.", "")


def write_checkpoint(state: Mapping[str, Any], folder: Path, read: Callable[[str], Tensor]) -> None:
    """Write a checkpoint from this process alone. ``state``: nested mappings; tensors on the meta device are
    placeholders for ``read``; ``read``: returns the tensor for a placeholder's keys, joined by dots; only one is in
    memory at a time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(dict(state), storage_writer=_Writer(folder), planner=_Reading(read), no_dist=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A part of a tensor: its place there, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor of a checkpoint."""

    dtype: str
    """Torch's name of its dtype."""
    size: torch.Size
    chunks: Sequence[_Chunk]
    """Parts that tile it."""


class DcpCheckpoint:
    """A checkpoint to read weights from."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata; raise ConfigError if it is missing, or is not in torch's format."""
        self._folder = folder
        try:
            self._stored = dict(_tensors(folder))
        except OSError as error:
            raise ConfigError(
                f"model.checkpoint: '{folder}' has no {METADATA} that can be read ({error.strerror}), as every folder "
                "has that torch.distributed.checkpoint wrote. Name one of those."
            ) from None
        except _MALFORMED as error:
            raise ConfigError(
                f"model.checkpoint: '{folder}/{METADATA}' is not as torch.distributed.checkpoint writes it "
                f"({str(error)[:300]}). It is a pickle, so anything else in it is refused. Save the checkpoint again "
                "with dcp.save()."
            ) from None

    def places(self, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
        """Return the checkpoint's names of some weights, by their own names; raise ConfigError if a weight is missing,
        or has another shape or an unsupported dtype. ``shapes``: shapes of the weights, by ``module.parameter``; for a
        single module, the checkpoint may also name them ``parameter``."""
        stored = self._stored
        places = next((each for each in _named(shapes) if set(each.values()) <= stored.keys()), None)
        if places is None:
            wanted = next(_named(shapes))
            lacking = next(place for place in wanted.values() if place not in stored)
            raise ConfigError(
                f"model.checkpoint: '{self._folder}' has no '{lacking}', which is trained; its first names are "
                f"{', '.join(repr(name[:100]) for name in sorted(stored)[:3])}. Save the weights under the names they "
                "have here, below 'model'; with model.lora those of the adapters."
            )
        for name, place in places.items():
            entry = stored[place]
            if entry.size != shapes[name]:
                raise ConfigError(
                    f"model.checkpoint: '{place}' of '{self._folder}' has shape {tuple(entry.size)}, the model "
                    f"{tuple(shapes[name])}. It is a checkpoint of another model, or of adapters of another rank."
                )
            if entry.dtype not in _DTYPES:
                raise ConfigError(
                    f"model.checkpoint: '{place}' of '{self._folder}' is of {entry.dtype}, and weights are read from "
                    f"{', '.join(_DTYPES)} only: others need scales or tables, which are not read. Save the checkpoint "
                    "with plain weights."
                )
        return places

    @torch.no_grad()
    def read(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return weights by name, float32 on the CPU; raise ConfigError if a weight is missing, or a file does not
        match the metadata."""
        return {name: self._read(place) for name, place in self.places(shapes).items()}

    def _read(self, place: str) -> Tensor:
        stored = self._stored[place]
        # Its chunks tile it, so each number is written once.
        whole = torch.empty(stored.size, dtype=torch.float32)
        for chunk in stored.chunks:
            try:
                found = _part(chunk, stored.dtype)
            except (OSError, *_MALFORMED) as error:
                raise ConfigError(
                    f"model.checkpoint: the files of '{self._folder}' do not match its {METADATA} ('{place}' in "
                    f"'{chunk.file.name}': {str(error)[:300]}). Copy the checkpoint again."
                ) from None
            if not found.isfinite().all():
                raise ConfigError(
                    f"model.checkpoint: '{place}' of '{self._folder}' holds numbers that are not finite, so nothing "
                    "can be trained or drawn with them. Take an earlier checkpoint."
                )
            ends = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(offset, offset + extent) for offset, extent in ends)].copy_(found)
        return whole


def _named(shapes: Mapping[str, torch.Size]) -> Iterator[dict[str, str]]:
    """Yield the possible names of weights in a checkpoint."""
    for prefix in _PREFIXES:
        yield {name: prefix + name for name in shapes}
    if len({name.partition(".")[0] for name in shapes}) == 1:
        for prefix in _PREFIXES:
            yield {name: prefix + name.partition(".")[2] for name in shapes}


def _tensors(folder: Path) -> Iterator[tuple[str, _Stored]]:
    """Yield the tensors in a folder's metadata, after checking that their parts tile them."""
    with (folder / METADATA).open("rb") as file:
        state = read_records(file.read(MAX_BYTES + 1), _IN_METADATA).state
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, part in state["storage_data"].items():
        key = (index.state["fqn"], _sizes(index.state.get("offset") or ()))
        if key in places:
            raise ValueError(f"it has two parts of {key[0][:100]!r} at {key[1]}")
        places[key] = part.state
    left = len(places)
    for name, entry in state["state_dict_metadata"].items():
        if entry.name != f"{_ABOUT}.TensorStorageMetadata":
            continue
        chunks = entry.state["chunks"]
        # Each chunk has its own part: a chunk list shared by many tensors could take unbounded time.
        left -= len(chunks)
        if left < 0:
            raise ValueError("it has more chunks than parts in files")
        yield name, _stored(folder, name, entry.state, [_chunk(folder, name, chunk.state, places) for chunk in chunks])


def _stored(folder: Path, name: str, state: Mapping[str, Any], chunks: Sequence[_Chunk]) -> _Stored:
    size, dtype = _sizes(state["size"]), state["properties"].state[0].name
    if dtype not in _ALL_DTYPES:
        raise ValueError(f"{name[:100]!r} is of {dtype[:100]!r}")
    try:
        check_covered(size, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    except ValueError as error:
        raise ValueError(f"{name[:100]!r}: {error}") from None
    return _Stored(dtype=dtype, size=torch.Size(size), chunks=chunks)


def _chunk(folder: Path, name: str, state: Mapping[str, Any], places: Mapping[Any, Any]) -> _Chunk:
    """Return a part, after checking that it is in a file directly in the folder."""
    offsets, sizes = _sizes(state["offsets"]), _sizes(state["sizes"])
    if (name, offsets) not in places:
        raise ValueError(f"no file has the part of {name[:100]!r} at {offsets}")
    place = places[name, offsets]
    file, start, length = place["relative_path"], place["offset"], place["length"]
    if Path(file).name != file or not (folder / file).is_file() or (folder / file).is_symlink():
        raise ValueError(f"'{file[:100]}' is no file in the folder")
    if place.get("transform_descriptors"):
        raise ValueError("its files are compressed")
    _sizes((start, length))
    return _Chunk(offsets=offsets, sizes=sizes, file=folder / file, start=start, length=length)


def _sizes(found: Any) -> tuple[int, ...]:
    """Return checked sizes from a ``torch.Size`` or a plain collection."""
    if isinstance(found, Record) and found.name == "torch.Size":
        (found,) = found.arguments
    if not isinstance(found, tuple | list) or len(found) > MAX_DIMENSIONS:
        raise ValueError("a size is no tuple or list, or too long")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in found):
        raise ValueError("a size is no number, or negative")
    return tuple(found)


def _part(chunk: _Chunk, dtype: str) -> Tensor:
    """Return the numbers of a part, in its dtype; raise ValueError if the file does not match."""
    with chunk.file.open("rb") as file:
        file.seek(chunk.start)
        data = file.read(min(chunk.length, chunk.file.stat().st_size))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in entries and _entry(archive, entries["byteorder"]) != b"little":
            raise ValueError("it has the byte order of another machine")
        made = read_records(_entry(archive, entries["data.pkl"]), _IN_PART)
        if made.name != _REBUILD or made.arguments[0].name != PERSISTENT or any(made.arguments[6:]):
            raise ValueError("it holds no plain tensor")
        _, storage, key, _, count = made.arguments[0].arguments
        numbers = bytearray(_entry(archive, entries[f"data/{key}"]))
    first, *_ = _sizes((made.arguments[1], count))
    sizes, strides = (_sizes(each) for each in made.arguments[2:4])
    if (storage.name, sizes) != (_DTYPES[dtype][0], chunk.sizes):
        raise ValueError(f"a part of {dtype} and shape {chunk.sizes} is of {storage.name} and {sizes}")
    kind = _DTYPES[dtype][1]
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if len(numbers) != count * kind.itemsize or (0 not in sizes and last >= count):
        raise ValueError(f"it has {len(numbers)} bytes, which are not those of shape {chunk.sizes}")
    if 0 in sizes:
        return torch.zeros(sizes, dtype=kind)
    return torch.frombuffer(numbers, dtype=kind).as_strided(sizes, strides, first)


def _entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the bytes of an uncompressed entry: torch writes no others, which may expand to any size."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"{info.filename[:100]!r} is compressed")
    return archive.read(info)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """Return None: torch would store the folder's path, which changes when the folder moves."""


class _Reading(DefaultSavePlanner):
    """Reads a tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return self._read(index.fqn) if isinstance(found, torch.Tensor) and found.is_meta else found
