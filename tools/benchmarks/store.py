"""Trajectory stores against raw reads and writes of the same bytes and against other formats, as ratios within one run.

Every figure is CPU time (user + system) of the raw operation over that of the format, the median of interleaved
repeats: 1 is as fast as raw, and warm caches on both sides. Both sides open, hash and wait for the disk; other formats
check nothing. Wall time on a shared machine says little.
"""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from flowmill.configs.registry import resolve
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.storage.trajectories.base import Sample
from flowmill.tasks.modalities.reader import SampleReader

#: 11 latents of a 512-pixel SD3 sample in half precision: 1.44 MB.
_SHAPE, _ROWS, _REPEATS = (11, 16, 64, 64), 64, 7
_REF = ArtifactRef("trajectories", "b" * 32)


def _cpu(function: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _ratios(raw: Callable[[], object], others: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return CPU time of ``raw`` over that of each other, medians of interleaved repeats after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ["raw", *others]}
    for _ in range(_REPEATS + 1):
        for name, function in {"raw": raw, **others}.items():
            times[name].append(_cpu(function))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {name: medians["raw"] / medians[name] for name in others}


def _samples(latents: np.ndarray) -> list[Sample]:
    return [
        Sample(
            sample_id=f"s{i:08d}",
            prompt_id=f"p{i // 16}",
            group_id=f"p{i // 16}",
            prompt=f"prompt {i // 16}",
            epoch=1,
            replica=i % 16,
            seed=i,
            policy="policies/x",
            sigmas=np.linspace(1, 0, len(rows)).tolist(),
            steps=range(len(rows) - 1),
            states=range(len(rows)),
            log_probs=np.zeros(len(rows) - 1, np.float32),
            latents=rows,
        )
        for i, rows in enumerate(latents)
    ]


class Formats:
    """The same latents in every format, each written, opened and read anew every time."""

    def __init__(self, folder: Path) -> None:
        """Make the latents and write each once."""
        self.folder = folder
        self.latents = np.random.default_rng(0).normal(size=(_ROWS, *_SHAPE)).astype(np.float16)
        self.tensor = torch.from_numpy(self.latents)
        self.samples = _samples(self.latents)
        self.buffer = np.empty_like(self.latents)
        for write in (self.raw_write, *self.writers().values()):
            write()

    def raw_write(self) -> None:
        """Write the bytes and wait until they are on the disk."""
        with (self.folder / "raw").open("wb", buffering=0) as file:
            view = self.latents.data.cast("B")
            while len(view):
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def writers(self) -> Mapping[str, Callable[[], object]]:
        """Return how each format is written, until it is on the disk; ours with checksums and record."""
        others = {
            "torch.save": self._write_torch,
            "safetensors": self._write_safetensors,
            "parquet (pyarrow)": self._write_parquet,
            "webdataset": self._write_webdataset,
            "datasets": self._write_datasets,
        }
        synced = {name: partial(self._until_on_disk, write) for name, write in others.items()}
        return {f"flowmill {name}": partial(self._commit, name) for name in TRAJECTORY_STORES} | synced

    def readers(self, order: np.ndarray) -> dict[str, Callable[[], object]]:
        """Return how rows are copied out of what is opened and checked."""
        return {
            "preadv": lambda: self._read_preadv(order),
            **{f"flowmill {name}": partial(self._read_ours, name, order) for name in TRAJECTORY_STORES},
        }

    def unchecked(self) -> dict[str, Callable[[], object]]:
        """Return how other formats are opened and read whole; they check nothing."""
        return {
            "torch.save": lambda: self._fill(torch.load(self.folder / "torch.pt", weights_only=True).numpy()),
            "safetensors": self._read_safetensors,
            "parquet (pyarrow)": self._read_parquet,
            "webdataset": self._read_webdataset,
            "datasets": self._read_datasets,
        }

    def raw_read(self, order: np.ndarray) -> None:
        """Map the bytes, hash each row and copy it."""
        with (self.folder / "raw").open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        size = self.latents[0].nbytes
        for target, row in zip(self.buffer, order, strict=True):
            view = mapped[row * size : (row + 1) * size]
            xxhash.xxh3_64_intdigest(view)
            np.copyto(target, np.frombuffer(view, np.float16).reshape(_SHAPE))

    def _read_preadv(self, order: np.ndarray) -> None:
        size = self.latents[0].nbytes
        with (self.folder / "raw").open("rb", buffering=0) as file:
            for target, row in zip(self.buffer, order, strict=True):
                os.preadv(file.fileno(), [target.data.cast("B")], int(row) * size)
                xxhash.xxh3_64_intdigest(target.data.cast("B"))

    def _read_ours(self, name: str, order: np.ndarray) -> None:
        store = ArtifactStore(str(self.folder / name))
        record = store.records(_REF)[0]
        reader = SampleReader([resolve(TRAJECTORY_STORES, name, label="store")().open(store.files(_REF, record))])
        for target, row in zip(self.buffer, order, strict=True):
            np.copyto(target, reader.array("latents", int(row)))

    def _commit(self, name: str) -> None:
        """Commit a shard instead of the one before."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        store = ArtifactStore(str(self.folder / name))
        with store.root.staging() as folder:
            writer = resolve(TRAJECTORY_STORES, name, label="store")().writer(folder)
            writer.add(self.samples)
            store.commit(_REF, "000000-000004", folder, rows=_ROWS, hashed=writer.end())

    def _until_on_disk(self, write: Callable[[], Path]) -> None:
        written = write()
        for path in written.iterdir() if written.is_dir() else [written]:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _fill(self, values: np.ndarray) -> None:
        np.copyto(self.buffer, values)

    def _write_torch(self) -> Path:
        torch.save(self.tensor, self.folder / "torch.pt")
        return self.folder / "torch.pt"

    def _write_safetensors(self) -> Path:
        save_file({"latents": self.tensor}, self.folder / "x.safetensors")
        return self.folder / "x.safetensors"

    def _read_safetensors(self) -> None:
        with safe_open(self.folder / "x.safetensors", framework="pt") as file:
            self._fill(file.get_tensor("latents").numpy())

    def _write_parquet(self) -> Path:
        values = pa.array([row.tobytes() for row in self.latents], pa.binary(self.latents[0].nbytes))
        table = pa.table({"latents": values})
        pq.write_table(table, self.folder / "x.parquet", compression="NONE", use_dictionary=False)
        return self.folder / "x.parquet"

    def _read_parquet(self) -> None:
        column = pq.read_table(self.folder / "x.parquet").column("latents")
        for row, value in enumerate(column):
            np.copyto(self.buffer[row], np.frombuffer(value.as_buffer(), np.float16).reshape(_SHAPE))

    def _write_webdataset(self) -> Path:
        import webdataset

        with webdataset.TarWriter(str(self.folder / "x.tar")) as writer:
            for number, row in enumerate(self.latents):
                writer.write({"__key__": f"{number:08d}", "latents.npy": row})
        return self.folder / "x.tar"

    def _read_webdataset(self) -> None:
        import webdataset

        read = webdataset.WebDataset(str(self.folder / "x.tar"), shardshuffle=False).decode()
        for row, sample in enumerate(read):
            np.copyto(self.buffer[row], sample["latents.npy"])

    def _write_datasets(self) -> Path:
        import datasets

        datasets.disable_progress_bars()
        rows = {"latents": [row.tobytes() for row in self.latents]}
        datasets.Dataset.from_dict(rows).save_to_disk(str(self.folder / "hf"))
        return self.folder / "hf"

    def _read_datasets(self) -> None:
        import datasets

        for row, sample in enumerate(datasets.load_from_disk(str(self.folder / "hf"))):
            np.copyto(self.buffer[row], np.frombuffer(sample["latents"], np.float16).reshape(_SHAPE))


def formats() -> str:
    """Return a table of CPU time of raw operations over that of every format: commit, all rows, random rows."""
    with tempfile.TemporaryDirectory() as folder:
        made = Formats(Path(folder))
        forward = np.arange(_ROWS)
        shuffled = np.random.default_rng(1).permutation(_ROWS)
        writes = _ratios(made.raw_write, made.writers())
        reads = _ratios(lambda: made.raw_read(forward), made.readers(forward) | made.unchecked())
        rows = _ratios(lambda: made.raw_read(shuffled), made.readers(shuffled))
    lines = ["| | commit | open, check, read | the same, rows at random |", "|---|---|---|---|"]
    for name in {**rows, **reads}:
        cells = (f"{found[name]:.2f}" if name in found else "" for found in (writes, reads, rows))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table() -> str:
    """Return the table of formats."""
    torch.set_num_threads(1)
    return f"{formats()}\n"


if __name__ == "__main__":
    sys.stdout.write(table())
