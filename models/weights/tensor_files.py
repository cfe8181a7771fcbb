"""Tensors in safetensors files: whole ones, and parts written by several ranks.

Parts are written and read by ``torch.distributed.checkpoint`` with its safetensors storage, which records the position
of each part in the file's header. Each reader requests tensors, whole or sharded over any number of ranks, and reads
only those. The files hold no pickles.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from flowmill.configs.errors import CorruptError
from flowmill.models.weights.safetensors_header import canonical_header

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata


#: Separator of file and tensor name in files of parts, which are written together.
_IN = "/"


class TensorFiles:
    """Stored tensors: files of whole tensors, or the parts of one set of tensors."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers; raise CorruptError if a file is not a safetensors file, or the parts do not make up whole
        tensors."""
        self._reader = _read_headers(files)
        self._folder, prefix = files[0].parent, files[0].name + _IN
        entries = self._reader.metadata.state_dict_metadata.items()
        self._stored = {
            key.removeprefix(prefix): (key, entry.size, entry.properties.dtype)
            for key, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The full shape of every tensor, by name."""
        return {name: size for name, (_, size, _) in self._stored.items()}

    @torch.no_grad()
    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors in place; if they are sharded, each rank reads its part without waiting for the others. Raises
        KeyError if the files lack a tensor; CorruptError if a shape differs, or a dtype is incompatible. ``targets``:
        tensors by name, of the stored shapes; floating ones of any dtype, others of the stored dtype."""
        for name, tensor in targets.items():
            _, size, dtype = self._stored[name]
            alike = (tensor.is_floating_point() and dtype.is_floating_point) or tensor.dtype == dtype
            if tensor.shape != size or not alike:
                raise CorruptError(
                    f"'{self._folder}' has '{name}' of {dtype} and shape {tuple(size)}, where {tensor.dtype} and "
                    f"{tuple(tensor.shape)} are read. It belongs to another model."
                )
        by_key = {self._stored[name][0]: tensor.detach() for name, tensor in targets.items()}
        with warnings.catch_warnings():
            # Every rank reads for itself, so torch warns of a program with one process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(by_key, storage_reader=self._reader, no_dist=True)


def _read_headers(files: Sequence[Path]) -> _Reader:
    try:
        reader = _Reader(files)
        for name, entry in reader.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                try:
                    check_covered(entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
                except ValueError as error:
                    raise ValueError(f"{name[:100]!r}: {error}") from None
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        names = f"'{files[0]}'" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        raise CorruptError(
            f"{names} cannot be read as safetensors files of whole tensors ({str(error)[:300]}). Copy them again."
        ) from None
    return reader


def write_parts(files: Mapping[str, Mapping[str, Tensor]], folder: Path, group: ProcessGroup | None = None) -> None:
    """Write this rank's part of some tensors; all ranks must call this together. ``files``: tensors by name, by file
    name; whole ones are written by one rank; ``group``: the ranks; None: all."""
    named, writer = _together(files, folder)
    save(named, storage_writer=writer, process_group=group)
    finish_parts(files, folder)


def begin_parts(files: Mapping[str, Mapping[str, Tensor]], folder: Path, group: ProcessGroup) -> Future[Any]:
    """Copy this rank's part of some tensors to host memory, and write it in the background. All ranks must call this
    together. When the future is done, call ``finish_parts``. ``group``: the ranks, with a backend for host memory; it
    must not be used otherwise meanwhile."""
    named, writer = _together(files, folder)
    # The writer's own staging does not copy tensors in host memory, which training would change meanwhile.
    with contextlib.closing(DefaultStager(StagingOptions(False, False, False, False))) as stager:
        started = async_save(named, storage_writer=writer, process_group=group, async_stager=stager)
    assert isinstance(started, Future)
    return started


def finish_parts(files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Rename the files of a finished write, and make their headers canonical."""
    for path in sorted(folder.glob("*.safetensors")):
        # "shard-<rank>-model-<file>-of-<files>", counted from 1.
        number = int(path.stem.split("-")[3])
        target = folder / list(files)[number - 1]
        os.replace(path, target)
        canonical_header(target)


def _together(files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> tuple[dict[str, Tensor], Any]:
    folder.mkdir(parents=True, exist_ok=True)
    pairs = ((f"{file}{_IN}{name}", value) for file, tensors in files.items() for name, value in tensors.items())
    # Headers list tensors in the order passed, which changes after a checkpoint was read.
    named = dict(sorted(pairs, key=lambda pair: pair[0]))
    numbers = {key: list(files).index(key.partition(_IN)[0]) + 1 for key in named}
    return named, HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)


class _Reader(HuggingFaceStorageReader):
    """Reads some files instead of all files of one folder."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(str(files[0].parent))
        self.fs = _Listed(files)
        self.metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class _Listed(FileSystem):
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(file) for file in files]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._files


#: Weights have five dimensions at most; the work is exponential in them.
MAX_DIMENSIONS = 6


def check_covered(size: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Check that boxes tile a tensor, without gaps, overlaps or points outside; raise ValueError.

    The number of boxes over each point is a step function, determined by its steps: the corners of the boxes with signs
    (+ where a box begins, - where it ends, multiplied over the dimensions). The boxes tile the tensor if and only if
    their corners add up to those of the tensor. The work is linear in the number of boxes.

    ``chunks``: offsets and sizes of its parts.
    """
    if len(size) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(size)} dimensions, and {MAX_DIMENSIONS} are read at most")
    steps: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in chunks:
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise ValueError(f"a part of a tensor of shape {tuple(size)} has {len(sizes)} dimensions")
        _add(steps, offsets, sizes, 1)
    _add(steps, [0] * len(size), size, -1)
    odd = next((corner for corner, count in sorted(steps.items()) if count), None)
    if odd is not None:
        kind = "overlap or lie outside of it" if steps[odd] > 0 else "leave a gap"
        raise ValueError(f"the parts of a tensor of shape {tuple(size)} {kind} at {odd}")


def _add(steps: Counter[tuple[int, ...]], offsets: Sequence[int], sizes: Sequence[int], sign: int) -> None:
    if 0 in sizes:
        return
    ends = [(offset, offset + extent) for offset, extent in zip(offsets, sizes, strict=True)]
    for choice in product((0, 1), repeat=len(sizes)):
        corner = tuple(end[chosen] for end, chosen in zip(ends, choice, strict=True))
        steps[corner] += -sign if sum(choice) % 2 else sign
