"""Trajectory stores against raw reads and writes of the same bytes and against other formats, as ratios within one run.

Every figure is CPU time (user + system) of the raw operation over that of the format, the median of interleaved
repeats: 1 is as fast as raw, and warm caches on both sides. Wall time on a shared machine says little.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from configs.registry import resolve
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.trajectories import TRAJECTORY_STORES
from storage.trajectories.base import Sample, TrajectoryShard
from tasks.optimize.reader import SampleReader
from tasks.optimize.rows import plan_updates, single_rows

#: 11 latents of a 512-pixel SD3 sample in half precision: 1.44 MB.
_SHAPE, _ROWS, _REPEATS = (11, 16, 64, 64), 64, 7
_REF = ArtifactRef("trajectories", "b" * 32)


def _cpu(function: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    function()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _ratios(raw: Callable[[], object], others: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return CPU time of ``raw`` over that of each other, medians of interleaved repeats after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ["raw", *others]}
    for _ in range(_REPEATS + 1):
        for name, function in {"raw": raw, **others}.items():
            times[name].append(_cpu(function))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {name: medians["raw"] / medians[name] for name in others}


def _samples(latents: np.ndarray, first: int = 0) -> list[Sample]:
    return [
        Sample(
            sample_id=f"s{first + i:08d}",
            prompt_id=f"p{(first + i) // 16}",
            group_id=f"p{(first + i) // 16}",
            prompt=f"prompt {(first + i) // 16}",
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
    """The same latents in every format."""

    def __init__(self, folder: Path) -> None:
        """Make the latents and write each once."""
        self.folder = folder
        self.latents = np.random.default_rng(0).normal(size=(_ROWS, *_SHAPE)).astype(np.float16)
        self.tensor = torch.from_numpy(self.latents)
        self.samples = _samples(self.latents)
        self.buffer = np.empty_like(self.latents)
        for write in self.writers().values():
            write()

    def raw_write(self) -> None:
        """Write the bytes."""
        with (self.folder / "raw").open("wb", buffering=0) as file:
            view = self.latents.data.cast("B")
            while len(view):
                view = view[file.write(view) :]

    def raw_read(self) -> None:
        """Read the bytes into a buffer that is there."""
        with (self.folder / "raw").open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [self.buffer.data.cast("B")], 0)

    def writers(self) -> dict[str, Callable[[], object]]:
        """Return how each format is written."""
        return {
            **{f"flowmill {name}": lambda name=name: self._write(name) for name in TRAJECTORY_STORES},
            "torch.save": lambda: torch.save(self.tensor, self.folder / "torch.pt"),
            "safetensors": lambda: save_file({"latents": self.tensor}, self.folder / "x.safetensors"),
            "parquet (pyarrow)": self._write_parquet,
            "webdataset": self._write_webdataset,
            "datasets": self._write_datasets,
        }

    def readers(self) -> dict[str, Callable[[], object]]:
        """Return how all latents of each format are read into the buffer."""
        shards = {name: self._open(name) for name in TRAJECTORY_STORES}
        return {
            **{f"flowmill {name}": lambda s=shard: self._copy_all(s) for name, shard in shards.items()},
            "torch.save": lambda: self._fill(torch.load(self.folder / "torch.pt", weights_only=True).numpy()),
            "safetensors": self._read_safetensors,
            "parquet (pyarrow)": self._read_parquet,
            "webdataset": self._read_webdataset,
            "datasets": self._read_datasets,
        }

    def batches(self) -> dict[str, Callable[[], object]]:
        """Return how 64 random rows of each of our formats are copied."""
        readers = {name: SampleReader([self._open(name)]) for name in TRAJECTORY_STORES}
        order = np.random.default_rng(1).permutation(_ROWS)

        def copy(reader: SampleReader) -> None:
            for target, row in zip(self.buffer, order, strict=True):
                np.copyto(target, reader.array("latents", int(row)))

        return {f"flowmill {name}": lambda r=reader: copy(r) for name, reader in readers.items()}

    def row_copy(self) -> None:
        """Copy 64 random rows within memory."""
        for target, row in zip(self.buffer, np.random.default_rng(1).permutation(_ROWS), strict=True):
            np.copyto(target, self.latents[row])

    def _write(self, name: str) -> None:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        resolve(TRAJECTORY_STORES, name, what="store")().write(folder, self.samples)

    def _open(self, name: str) -> TrajectoryShard:
        from storage.files import FolderFiles

        shard: TrajectoryShard = resolve(TRAJECTORY_STORES, name, what="store")().open(FolderFiles(self.folder / name))
        return shard

    def _copy_all(self, shard: TrajectoryShard) -> None:
        for row in range(_ROWS):
            np.copyto(self.buffer[row], shard.array("latents", row))

    def _fill(self, values: np.ndarray) -> None:
        np.copyto(self.buffer, values)

    def _read_safetensors(self) -> None:
        with safe_open(self.folder / "x.safetensors", framework="pt") as file:
            self._fill(file.get_tensor("latents").numpy())

    def _write_parquet(self) -> None:
        values = pa.array([row.tobytes() for row in self.latents], pa.binary(self.latents[0].nbytes))
        table = pa.table({"latents": values})
        pq.write_table(table, self.folder / "x.parquet", compression="NONE", use_dictionary=False)

    def _read_parquet(self) -> None:
        column = pq.read_table(self.folder / "x.parquet").column("latents")
        for row, value in enumerate(column):
            np.copyto(self.buffer[row], np.frombuffer(value.as_buffer(), np.float16).reshape(_SHAPE))

    def _write_webdataset(self) -> None:
        import webdataset

        with webdataset.TarWriter(str(self.folder / "x.tar")) as writer:
            for number, row in enumerate(self.latents):
                writer.write({"__key__": f"{number:08d}", "latents.npy": row})

    def _read_webdataset(self) -> None:
        import webdataset

        read = webdataset.WebDataset(str(self.folder / "x.tar"), shardshuffle=False).decode()
        for row, sample in enumerate(read):
            np.copyto(self.buffer[row], sample["latents.npy"])

    def _write_datasets(self) -> None:
        import datasets

        datasets.disable_progress_bars()
        rows = {"latents": [row.tobytes() for row in self.latents]}
        datasets.Dataset.from_dict(rows).save_to_disk(str(self.folder / "hf"))

    def _read_datasets(self) -> None:
        import datasets

        for row, sample in enumerate(datasets.load_from_disk(str(self.folder / "hf"))):
            np.copyto(self.buffer[row], np.frombuffer(sample["latents"], np.float16).reshape(_SHAPE))


def formats() -> str:
    """Return a table of write and read ratios of every format, and of random batches of ours."""
    with tempfile.TemporaryDirectory() as folder:
        made = Formats(Path(folder))
        writes = _ratios(made.raw_write, made.writers())
        reads = _ratios(made.raw_read, made.readers())
        batches = _ratios(made.row_copy, made.batches())
    lines = ["| format | write | read all | 64 random rows |", "|---|---|---|---|"]
    for name in writes:
        batch = f"{batches[name]:.2f}" if name in batches else ""
        lines.append(f"| {name} | {writes[name]:.2f} | {reads[name]:.2f} | {batch} |")
    return "\n".join(lines)


def many_shards(shards: int = 1000, per_shard: int = 100) -> str:
    """Return how long a stage's listing, opening and planning takes, and the memory that reading every shard adds."""
    with tempfile.TemporaryDirectory() as folder:
        store = ArtifactStore(folder)
        trajectories = resolve(TRAJECTORY_STORES, "webdataset", what="store")()
        latents = np.zeros((per_shard, 3, 4, 4, 4), np.float32)
        for number in range(shards):
            with store.root.staging() as staging:
                trajectories.write(staging, _samples(latents, number * per_shard))
                store.commit(_REF, f"{number:06d}-{number + 1:06d}", staging, rows=per_shard)
        fresh = ArtifactStore(folder)
        begun = time.process_time()
        opened = [trajectories.open(fresh.files(_REF, record)) for record in fresh.records(_REF)]
        reader = SampleReader(opened)
        units = single_rows(np.arange(len(reader)), reader.steps.sizes)
        plan = plan_updates(units, updates=8, inner_epochs=1, seed=0, epoch=1)
        seconds = time.process_time() - begun
        rows = sum(len(part.rows) for part in plan)
        memory = [_read_shards(reader, per_shard, range(stop)) for stop in (shards // 10, shards)]
    return (
        f"{shards * per_shard:,} samples in {shards:,} shards: listed, opened and planned ({rows:,} rows) in "
        f"{seconds:.2f} CPU s; reading a tenth of the shards adds {memory[0]:.0f} MB, all of them {memory[1]:.0f} MB"
    )


def _read_shards(reader: SampleReader, per_shard: int, shards: range) -> float:
    """Read one sample of each shard; return by how many MB resident memory has grown."""
    before = _resident()
    for number in shards:
        reader.array("latents", number * per_shard).sum()
    return (_resident() - before) / 1e6


def _resident() -> int:
    for line in io.StringIO(Path("/proc/self/status").read_text()):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def main() -> None:
    """Print both."""
    torch.set_num_threads(1)
    sys.stdout.write(f"{formats()}\n{many_shards()}\n")


if __name__ == "__main__":
    main()
