"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): folders that other tools write, or read with ``dcp.load``.

A folder has a ``.metadata``, a pickle that says which tensors there are, and in which file each part of one lies. Here
nothing of it becomes an object but records of texts and numbers: names of anything else are refused before they are
looked up, and what the records say is checked. Of the other files only tensors are read, by torch, ``weights_only``.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from configs.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
_ABOUT = "torch.distributed.checkpoint.metadata"
#: What metadata consists of, beside numbers, texts and their collections.
_RECORDS = (
    *(
        (_ABOUT, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)
#: What it calls to make some values that are of no use here.
_DROPPED = (
    (_ABOUT, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
)
#: Where checkpoints have weights: as they are written here, and as programs with a model of their own write them.
_PREFIXES = ("model.", "")


def write_checkpoint(state: Mapping[str, Any], folder: Path, read: Callable[[str], Tensor]) -> None:
    """Write a checkpoint, by this process alone.

    Args:
        state: nested mappings; what ``read`` gives are tensors on the meta device.
        folder: where it goes.
        read: place of such a tensor, names joined by dots, -> the tensor; one is in memory at a time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(dict(state), storage_writer=_Writer(folder), planner=_Reading(read), no_dist=True)


class SharedCheckpoint:
    """A checkpoint to read weights from."""

    def __init__(self, folder: Path) -> None:
        """Read what is in it.

        Raises:
            ConfigError: it is none, or its metadata holds what it need not.
        """
        self._folder = folder
        try:
            self._metadata = _checked(_unpickled(folder), folder)
        except OSError as error:
            raise ConfigError(
                f"model.checkpoint: '{folder}' has no {METADATA} that can be read ({error.strerror}), as every folder "
                "has that torch.distributed.checkpoint wrote. Name one of those."
            ) from None
        except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model.checkpoint: '{folder}/{METADATA}' is not as torch.distributed.checkpoint writes it ({error}). "
                "It is a pickle, so anything else in it is refused. Save the checkpoint again with dcp.save()."
            ) from None

    def places(self, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
        """Return where the checkpoint has each of some weights, by name.

        Args:
            shapes: of the weights by name, ``module.parameter``; of one module alone, ``parameter`` will do.

        Raises:
            ConfigError: it lacks one, or has it in another shape.
        """
        stored = self._metadata.state_dict_metadata
        places = next((each for each in _named(shapes) if set(each.values()) <= stored.keys()), None)
        if places is None:
            wanted = next(_named(shapes))
            lacking = next(place for place in wanted.values() if place not in stored)
            raise ConfigError(
                f"model.checkpoint: '{self._folder}' has no '{lacking}', which is trained; what it has begins with "
                f"{', '.join(repr(name) for name in sorted(stored)[:3])}. Save the weights under the names they have "
                "here, below 'model'; with model.lora those of the adapters."
            )
        for name, place in places.items():
            entry = stored[place]
            assert isinstance(entry, TensorStorageMetadata)
            if entry.size != shapes[name]:
                raise ConfigError(
                    f"model.checkpoint: '{place}' of '{self._folder}' has shape {tuple(entry.size)}, the model "
                    f"{tuple(shapes[name])}. It is a checkpoint of another model, or of adapters of another rank."
                )
        return places

    @torch.no_grad()
    def read(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return weights by name, float32 on the CPU.

        Raises:
            ConfigError: it lacks one, or a file is not what the metadata says.
        """
        places = self.places(shapes)
        found = {place: torch.empty(shapes[name], dtype=torch.float32) for name, place in places.items()}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(found, storage_reader=_Reader(self._folder, self._metadata), no_dist=True)
        except (CheckpointException, RuntimeError) as error:
            raise ConfigError(
                f"model.checkpoint: the files of '{self._folder}' are not what its {METADATA} says ({error}). Copy "
                "the checkpoint again."
            ) from None
        return {name: found[place] for name, place in places.items()}


def _named(shapes: Mapping[str, torch.Size]) -> Iterator[dict[str, str]]:
    """Yield what weights may be called in a checkpoint."""
    for prefix in _PREFIXES:
        yield {name: prefix + name for name in shapes}
    if len({name.partition(".")[0] for name in shapes}) == 1:
        for prefix in _PREFIXES:
            yield {name: prefix + name.partition(".")[2] for name in shapes}


class _Record:
    """An object of a pickle, of which only the state is of use."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes records alone. All that a pickle can name is made for this one, so that nothing it does to it stays."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], Any] = {key: type(key[1], (_Record,), {}) for key in _RECORDS}
        self._known |= {key: lambda *_: None for key in _DROPPED}
        self._known["torch", "Size"] = lambda sizes: tuple(sizes)
        dtypes = (kind for kind in vars(torch).values() if isinstance(kind, torch.dtype))
        self._known |= {("torch", str(kind).removeprefix("torch.")): kind for kind in dtypes}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name of the pickle."""
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self._known[module, name]


def _unpickled(folder: Path) -> Mapping[str, Any]:
    with (folder / METADATA).open("rb") as file:
        state: Mapping[str, Any] = _Unpickler(file).load().state
    return state


def _checked(state: Mapping[str, Any], folder: Path) -> Metadata:
    """Return the metadata of the tensors alone, made of records whose content is what it must be."""
    tensors = {
        str(name): TensorStorageMetadata(
            TensorProperties(dtype=_dtype(entry.state["properties"].state)),
            _size(entry.state["size"]),
            [
                ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
                for chunk in entry.state["chunks"]
            ],
        )
        for name, entry in state["state_dict_metadata"].items()
        if type(entry).__name__ == "TensorStorageMetadata"
    }
    parts = {}
    for index, part in state["storage_data"].items():
        if index.state["fqn"] in tensors:
            offset = index.state.get("offset")
            key = MetadataIndex(index.state["fqn"], None if offset is None else _size(offset))
            parts[key] = _part(part.state, folder)
    return Metadata(dict(tensors), storage_data=parts)


def _dtype(properties: Any) -> torch.dtype:
    found = properties[0]
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a tensor is of {found!r}")
    return found


def _size(sizes: Any) -> torch.Size:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes!r} is no size")
    return torch.Size(sizes)


def _part(state: Mapping[str, Any], folder: Path) -> _StorageInfo:
    """Return where a part lies: in a file of the folder itself."""
    name, offset, length = state["relative_path"], state["offset"], state["length"]
    if Path(name).name != name or not (folder / name).is_file() or (folder / name).is_symlink():
        raise ValueError(f"'{name}' is no file in the folder")
    if state.get("transform_descriptors"):
        raise ValueError("its files are compressed")
    _size((offset, length))
    return _StorageInfo(name, offset, length)


class _Reader(FileSystemReader):
    """Reads what was checked."""

    def __init__(self, folder: Path, checked: Metadata) -> None:
        super().__init__(folder)
        self._checked = checked

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was read before."""
        return self._checked


class _Writer(FileSystemWriter):
    def storage_meta(self) -> None:
        """Return nothing: torch would note the folder, which is another once it is moved."""


class _Reading(DefaultSavePlanner):
    """Asks for a tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written."""
        found = super().lookup_object(index)
        return self._read(index.fqn) if isinstance(found, torch.Tensor) and found.is_meta else found
