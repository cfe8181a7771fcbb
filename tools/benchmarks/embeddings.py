"""The embedding cache at the size of Stable Diffusion 3's rows: seconds, memory, and ratios to a plain copy.

python -m tools.benchmarks.embeddings --rows 20000   # takes 55 GB of disk
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.embeddings import EmbeddingCache, EmbeddingWriter, Rows
from flowmill.tasks.runtime.process_memory import process_peak

#: Tokens and width of the joint text encoders, and the pooled rows: 2.7 MB in bfloat16.
_SHAPES = {"prompt_embeds": (333, 4096), "pooled": (2048,)}
_BITS = dict.fromkeys(_SHAPES, "bfloat16")
_SHARD, _BATCH, _READ = 256, 8, 16
_REF = ArtifactRef("embeddings", "b" * 32)


def _write(store: ArtifactStore, texts: list[str]) -> None:
    draw = np.random.default_rng(0)
    batch = {name: draw.integers(0, 2**16, (_BATCH, *shape), np.uint16) for name, shape in _SHAPES.items()}
    for start in range(0, len(texts), _SHARD):
        shard = texts[start : start + _SHARD]
        with store.root.staging() as folder:
            with EmbeddingWriter(folder, shard) as writer:
                for first in range(0, len(shard), _BATCH):
                    count = len(shard[first : first + _BATCH])
                    batch["pooled"][:, 0] = start + first
                    writer.add(Rows({name: rows[:count] for name, rows in batch.items()}, _BITS))
            store.commit(_REF, f"{start:08d}", folder, rows=len(shard))


def _seconds(function: Callable[[], object], repeats: int = 1) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench(rows: int = 512) -> dict[str, float]:
    """Write, digest and read; return the figures by name."""
    texts = [f"prompt {number}" for number in range(rows)]
    chosen = [texts[i] for i in np.random.default_rng(1).integers(0, rows, _READ)]
    with tempfile.TemporaryDirectory() as folder:
        store = ArtifactStore(folder)
        figures = {"write_s": _seconds(lambda: _write(store, texts)), "write_peak_gb": process_peak() / 1e9}
        cache = EmbeddingCache(store, _REF)
        figures["plan_s"] = _seconds(lambda: cache.missing(texts))
        figures["digest_s"] = _seconds(lambda: cache.digest(texts))
        cache.load(chosen)
        again = EmbeddingCache(store, _REF)
        again.missing([])
        figures["batch_cached_by_system_s"] = _seconds(lambda: again.load(chosen))
        figures["batch_in_memory_s"] = _seconds(lambda: cache.load(chosen), repeats=9)
        arrays = cache.load(chosen).arrays
        figures["copy_s"] = _seconds(lambda: [np.stack(list(array)) for array in arrays.values()], repeats=9)
    figures["batch_over_copy"] = figures["batch_in_memory_s"] / figures["copy_s"]
    return {**figures, "peak_gb": process_peak() / 1e9}


def table(rows: int = 512) -> str:
    """Return the figures of the cache."""
    return ", ".join(f"`{name}` {value:.4g}" for name, value in bench(rows).items()) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    sys.stdout.write(table(parser.parse_args().rows))
