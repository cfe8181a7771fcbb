"""The interface of trajectory stores: samples, readers and writers.

A sample is a chain of S >= 0 trained transitions: ``states`` lists the denoising steps whose latents are stored,
``steps`` the S trained ones; step i leads from state i to state i + 1. Evaluation images have S = 0, as do
forward-process samples, which store their final latents. A causal LM's sample has tokens instead of latents.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from flowmill.configs.errors import CorruptError
from flowmill.configs.fingerprint import canonical_json
from flowmill.storage.artifacts.row_digest import Contents
from flowmill.storage.artifacts.shard_files import Files
from flowmill.storage.backends.base import Blob, FileEntry
from flowmill.storage.backends.checksums import REMEDY
from flowmill.storage.trajectories.arrays import stored_dtype
from flowmill.storage.trajectories.media import MediaFormat, Sound, decode, decode_sound

#: Fields of a sample that are stored as raw arrays if present, in this order, with their descriptions.
ARRAYS = {
    "latents": "Latents of the stored states (N, ...), float32 or float16.",
    "means": "Means of the trained steps under the policy that sampled (S, ...), float32.",
    "unconditional": "Predictions without the prompt, of the trained steps (S, ...).",
    "tokens": "Token ids of prompt and completion (L,), int32.",
    "token_mask": "1 for each token the policy chose (L,), uint8.",
    "final": "Latents the sampling ended in.",
    "sampled_log_probs": "Log-probs of chosen tokens as the sampler computed them (S,), float32.",
    "finish": "Why each turn of a text ended (turns,), uint8.",
    "text": "UTF-8 of a completion (bytes,), uint8.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One generated sample."""

    sample_id: str
    """Unique within the artifact; no dots (WebDataset splits names at the first one)."""
    prompt_id: str
    """Identity of the prompt."""
    group_id: str
    """Group of samples that are compared with each other: of one prompt, or with branching of one step."""
    prompt: str
    epoch: int
    """Epoch of the rollout."""
    replica: int
    """Position within the group."""
    seed: int
    """Seed of the initial noise."""
    policy: str
    """Artifact of the policy that sampled it."""
    sigmas: Sequence[float]
    """Noise levels of the whole schedule, [T + 1] from 1 to 0."""
    media: np.ndarray | None = None
    """(H, W, 3) uint8 image or (F, H, W, 3) uint8 clip; None for text and for samples that are not decoded."""
    sound: Sound | None = None
    """Sound of a clip, stored in the same file; None if it has none."""
    steps: Sequence[int] = ()
    """Trained steps, [S]."""
    states: Sequence[int] = ()
    """Steps whose latents are stored, [N]."""
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """(S,) float32 behavior log-probs, mean over latent dims."""
    reference_kl: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """(S,) float32 KL of each trained step to the base model, or (0,) if not computed."""
    latents: np.ndarray | None = None
    """(N, ...) float32 or float16 latents, one per stored state."""
    means: np.ndarray | None = None
    """(S, ...) float32 means of the behavior policy's trained steps, for algorithms that compare means."""
    unconditional: np.ndarray | None = None
    """(S, ...) float32 or float16 predictions without the prompt, which the first update can reuse."""
    tokens: np.ndarray | None = None
    """(L,) int32 token ids, prompt and completion, of a causal LM."""
    token_mask: np.ndarray | None = None
    """(L,) uint8, 1 for tokens the policy chose."""
    final: np.ndarray | None = None
    """(...) float32 or float16 final latents, for rewards that score latents."""
    sampled_log_probs: np.ndarray | None = None
    """(S,) float32 log-probs of chosen tokens from the sampler, whose rounding differs from training."""
    finish: np.ndarray | None = None
    """(turns,) uint8 reasons why the turns of a text ended; in samples of 0.8.0 and before the last one alone."""
    text: np.ndarray | None = None
    """(bytes,) uint8 UTF-8 of a completion, for rewards and for display."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the prompt source, for rewards."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the stored arrays by name, contiguous."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}

    def columns(self) -> dict[str, Any]:
        """Return the columns of ``schema.SAMPLES`` without those of payloads."""
        plain = ("sample_id", "prompt_id", "group_id", "prompt", "epoch", "replica", "seed", "policy")
        return {
            **{name: getattr(self, name) for name in plain},
            "metadata": canonical_json(dict(self.metadata)),
            "sigmas": list(self.sigmas),
            "steps": list(self.steps),
            "states": list(self.states),
            "log_probs": np.asarray(self.log_probs, np.float32),
            "reference_kl": np.asarray(self.reference_kl, np.float32),
        }

    def add_to(self, contents: Contents) -> None:
        """Add all stored values to a digest of rows."""
        columns = self.columns()
        arrays = {name: columns.pop(name) for name in ("log_probs", "reference_kl")}
        media = {"media": self.media, "sound": None if self.sound is None else self.sound.samples}
        stored = {name: array for name, array in media.items() if array is not None}
        contents.add(columns, {**arrays, **self.arrays(), **stored})


class TrajectoryShard:
    """A shard for reading: table and payload file are opened when they are first needed, payloads read in ranges."""

    def __init__(self, read: Callable[[], pa.Table], payloads: Callable[[], Blob], where: str) -> None:
        """Bind to the functions that read the table, of ``flowmill.storage.trajectories.schema.SAMPLES``, and open the
        payload file."""
        self._read_table = read
        self._payloads = payloads
        self._table: pa.Table | None = None
        self._blob: Blob | None = None
        self._where = where

    @property
    def table(self) -> pa.Table:
        """The table, which stays in memory until ``close``."""
        # Another thread may close it at any time.
        table = self._table
        if table is None:
            table = self._table = self._read_table()
        return table

    def only(self, sample_ids: pa.Array, prompt_ids: pa.Array) -> TrajectoryShard:
        """Return the shard with some of its samples, and the ids of the prompts that they are trained with."""
        import pyarrow.compute as pc

        def chosen() -> pa.Table:
            table = self._read_table()
            places = pc.index_in(table.column("sample_id"), value_set=sample_ids)
            table, number = table.filter(pc.is_valid(places)), table.column_names.index("prompt_id")
            return table.set_column(number, "prompt_id", prompt_ids.take(places.drop_null()))

        return TrajectoryShard(chosen, self._payloads, self._where)

    @cached_property
    def _stored(self) -> _Stored:
        return _Stored(self.table.column("arrays"), self._where)

    def index(self) -> None:
        """Note where the arrays of all rows lie, so that they are read without the table."""
        _ = self._stored

    def close(self) -> None:
        """Close the payload file and drop the table; both are opened again when needed."""
        self._blob = self._table = None

    def shape(self, name: str, row: int) -> tuple[int, ...]:
        """Return the shape of a stored array of a row; empty if there is none."""
        place = self._stored.find(row, name)
        return () if place is None else place[0].shape

    def array(self, name: str, row: int) -> np.ndarray:
        """Return a stored array of a row, without decoding; read-only."""
        place = self._stored.find(row, name)
        if place is None:
            raise CorruptError(f"{self._where}: row {row} has no {name}; the rollout did not store any.")
        kind, offset, size = place
        if size != kind.size:
            raise CorruptError(
                f"{self._where}: {name} of row {row} are {size} bytes, but shape {list(kind.shape)} of {kind.dtype} "
                f"needs {kind.size}."
            )
        # One call instead of frombuffer and reshape, which would be slow with a cold CPU cache.
        return np.ndarray(kind.shape, kind.dtype, self._read(offset, size))

    def final_latents(self, row: int) -> np.ndarray:
        """Return the final latents of a row, float32."""
        states = self.table.column("states")[row].as_py()
        last = len(self.table.column("sigmas")[row]) - 1
        if self._stored.find(row, "final") is None and last in states:
            return np.asarray(self.array("latents", row)[states.index(last)], np.float32)
        return np.asarray(self.array("final", row), np.float32)

    def text(self, row: int) -> str | None:
        """Return the text of a row, None for samples that are not texts."""
        if self._stored.find(row, "text") is None:
            return None
        return bytes(self.array("text", row)).decode("utf-8", errors="replace")

    def media(self, row: int) -> np.ndarray:
        """Return the (H, W, 3) image or (F, H, W, 3) clip of a row, uint8."""
        return decode(self.media_file(row), self.media_format(row), where=f"{self._where}: media of row {row}")

    def sound(self, row: int) -> Sound:
        """Return the sound of a row's clip."""
        sound = self.sound_of(row)
        if sound is None:
            raise CorruptError(f"{self._where}: the clip of row {row} has no sound; the model that made it makes none.")
        return sound

    def sound_of(self, row: int) -> Sound | None:
        """Return the sound of a row's clip, None if it has none."""
        if self.media_format(row) != "mp4":
            return None
        return decode_sound(self.media_file(row), where=f"{self._where}: media of row {row}")

    def media_format(self, row: int) -> str:
        """Return the format of a row's media, empty without any."""
        return str(self.table.column("media_format")[row].as_py())

    def media_file(self, row: int) -> memoryview:
        """Return the encoded media of a row."""
        if not self.media_format(row):
            raise CorruptError(f"{self._where}: row {row} has no media.")
        return self._read(self.table.column("media_offset")[row].as_py(), self.table.column("media_size")[row].as_py())

    def _read(self, offset: int, size: int) -> memoryview:
        blob = self._blob or self._payloads()
        self._blob = blob
        return blob.read(offset, size)


class _Kind(NamedTuple):
    """Name, dtype and shape that many stored arrays share."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int
    """Bytes."""

    @classmethod
    def parse(cls, name: str, dtype: str, shape: tuple[int, ...], where: str) -> _Kind:
        """Return the kind of an array from its description in a table."""
        try:
            kind = stored_dtype(dtype, shape)
        except ValueError:
            label = f"{name} of type {dtype} and shape {list(shape)}"
            raise CorruptError(f"{where}: there are no {label}. {REMEDY}") from None
        return cls(name, kind, shape, math.prod(shape) * kind.itemsize)


class _Stored:
    """An index of the column ``arrays`` of a samples table, as training reads every row once per trained step."""

    def __init__(self, column: pa.ChunkedArray, where: str) -> None:
        lists = column.combine_chunks()
        entries = lists.flatten()
        fields = [entries.field(number) for number in range(entries.type.num_fields)]
        if any(each.null_count for each in (lists, entries, *fields, entries.field("shape").flatten())):
            raise CorruptError(f"{where}: the table says nothing of some arrays. {REMEDY}")
        # Copies, which outlive the table, and whose items are plain integers.
        self._first = array("q", _bounds(lists))
        self._offsets, self._sizes = (array("q", entries.field(name).to_numpy()) for name in ("offset", "size"))
        names, dtypes = (entries.field(name).to_pylist() for name in ("name", "dtype"))
        layouts = zip(names, dtypes, _tuples(entries.field("shape")), strict=True)
        numbers: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._numbers = array("i", [numbers.setdefault(each, len(numbers)) for each in layouts])
        self._kinds = [_Kind.parse(*each, where) for each in numbers]

    def find(self, row: int, name: str) -> tuple[_Kind, int, int] | None:
        """Return kind, offset and bytes of one array of a row, or None if it has none of this name."""
        for at in range(self._first[row], self._first[row + 1]):
            kind = self._kinds[self._numbers[at]]
            if kind.name == name:
                return kind, self._offsets[at], self._sizes[at]
        return None


def _bounds(lists: pa.ListArray) -> list[int]:
    """Return the start of each list in the flattened values, and the end of the last."""
    ends: list[int] = np.cumsum(lists.value_lengths().to_numpy()).tolist()
    return [0, *ends]


def _tuples(lists: pa.ListArray) -> Iterator[tuple[int, ...]]:
    """Yield lists of numbers as tuples, without an Arrow scalar per list, which would take most of the time."""
    values = lists.flatten().to_numpy().tolist()
    for start, end in pairwise(_bounds(lists)):
        yield tuple(values[start:end])


class TrajectoryWriter(Protocol):
    """Writes the files of one shard. The bytes do not depend on the split of samples over calls of ``add``."""

    def add(self, samples: Sequence[Sample]) -> None:
        """Append samples."""

    def end(self) -> Sequence[FileEntry]:
        """Write the rest; return the entries of files whose checksums were computed while they were written."""


class TrajectoryStore(Protocol):
    """Writes and opens shards. Equal samples give equal bytes."""

    def writer(self, folder: Path, media: MediaFormat = ...) -> TrajectoryWriter:
        """Begin a shard in an empty folder."""

    def open(self, files: Files) -> TrajectoryShard:
        """Open a shard."""
