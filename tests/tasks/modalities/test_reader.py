"""Planning an epoch and reading its rows: neither the order nor the memory depends on how samples are sharded."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowmill.configs.errors import ConfigError, CorruptError
from flowmill.configs.registry import resolve
from flowmill.storage.trajectories import TRAJECTORY_STORES, webdataset
from flowmill.storage.trajectories.base import Sample, TrajectoryShard
from flowmill.tasks.modalities.reader import SampleReader
from flowmill.tasks.modalities.rows import (
    Units,
    joint_rows,
    micro_batches,
    padded,
    plan_updates,
    row_counts,
    single_rows,
)
from flowmill.tasks.training.loop import read_ahead
from tests.support.folder_files import FolderFiles
from tests.support.trajectories import write_samples


def sample(number: int, steps: int = 2) -> Sample:
    return Sample(
        sample_id=f"s{number:04d}",
        prompt_id=f"p{number // 2}",
        group_id=f"p{number // 2}",
        prompt=f"prompt {number // 2}",
        epoch=1,
        replica=number % 2,
        seed=number,
        policy="policies/x",
        sigmas=[1.0, 0.5, 0.0],
        steps=range(steps),
        states=range(steps + 1),
        log_probs=np.full(steps, number, np.float32),
        latents=np.full((steps + 1, 1, 2, 2), number, np.float32) + np.arange(steps + 1)[:, None, None, None],
    )


def shards(folder: Path, count: int, per_shard: int, store: str = "webdataset") -> list[TrajectoryShard]:
    made = []
    for start in range(0, count, per_shard):
        target = folder / f"{start:04d}"
        target.mkdir(parents=True)
        opener = resolve(TRAJECTORY_STORES, store, label="store")()
        write_samples(opener, target, [sample(n) for n in range(start, min(start + per_shard, count))])
        made.append(opener.open(FolderFiles(target)))
    return made


@pytest.mark.parametrize("per_shard", [1, 3, 8])
def test_samples_are_numbered_across_shards(tmp_path: Path, per_shard: int) -> None:
    reader = SampleReader(shards(tmp_path, 8, per_shard), max_open=2)
    assert len(reader) == 8
    assert reader.sample_ids.to_pylist() == [f"s{n:04d}" for n in range(8)]
    assert [reader.prompt_ids[row] for row in reader.prompt_rows] == [f"p{n // 2}" for n in range(8)]
    for n in (7, 0, 3, 3, 6, 1):
        np.testing.assert_array_equal(reader.array("latents", n), sample(n).latents)
        np.testing.assert_array_equal(reader.log_probs[n], [n, n])


@pytest.mark.parametrize("store", sorted(TRAJECTORY_STORES))
def test_few_payload_files_are_mapped_at_a_time(tmp_path: Path, store: str) -> None:
    reader = SampleReader(shards(tmp_path, 12, 1, store), max_open=3)
    gc.freeze()
    for n in range(12):
        reader.array("latents", n)
        gc.collect()
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = {line.split()[-1] for line in lines if str(tmp_path) in line}
        assert 0 < len(mapped) <= 3


def test_tables_are_read_once_and_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=webdataset.read_table)
    monkeypatch.setattr(webdataset, "read_table", read)
    opened = shards(tmp_path, 12, 1)
    assert read.call_count == 0
    reader = SampleReader(opened, max_open=3)
    for n in (11, 0, 5, 11, 3, 7, 0):
        np.testing.assert_array_equal(reader.array("latents", n), sample(n).latents)
    assert read.call_count == 12
    assert all(shard._table is None for shard in opened)
    assert [reader.id_and_metadata(n)[0] for n in range(12)] == [f"s{n:04d}" for n in range(12)]
    assert sum(shard._table is not None for shard in opened) <= 3


def test_a_missing_payload_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    reader = SampleReader(shards(tmp_path, 4, 2))
    (tmp_path / "0002" / "samples.tar").unlink()
    reader.array("latents", 1)
    with pytest.raises(CorruptError, match="is missing"):
        reader.array("latents", 2)


def units(sizes: list[int]) -> Units:
    rows = np.stack([np.arange(sum(sizes)), np.zeros(sum(sizes), int)], axis=1)
    return Units(rows, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_every_row_enters_every_inner_epoch_once(sizes: list[int], updates: int, inner: int, seed: int) -> None:
    plan = plan_updates(units(sizes), updates=updates, inner_epochs=inner, seed=seed, epoch=1)
    seen = np.concatenate([part.rows[:, 0] for part in plan]) if plan else np.zeros(0, int)
    assert sorted(seen.tolist()) == sorted(list(range(sum(sizes))) * inner)


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(5, 9))
def test_micro_batches_keep_units_whole_and_in_order(sizes: list[int], size: int) -> None:
    packed = micro_batches(units(sizes), size)
    assert [n for part in packed for n in part.sizes.tolist()] == sizes
    assert [row for part in packed for row in part.rows[:, 0].tolist()] == list(range(sum(sizes)))
    assert all(0 < len(part.rows) <= size for part in packed)
    assert len(packed) == fewest(sizes, size)


def fewest(sizes: list[int], size: int) -> int:
    """Return how many micro-batches there are if each takes as many units as it can."""
    count, room = 0, 0
    for rows in sizes:
        if rows > room:
            count, room = count + 1, size
        room -= rows
    return count


@given(st.integers(1, 600), st.integers(1, 64))
def test_micro_batches_of_single_rows_pad_little(rows: int, size: int) -> None:
    packed = [len(part.rows) for part in micro_batches(units([1] * rows), size)]
    computed = sum(padded(count, size) for count in packed)
    assert computed <= -(-rows // size) * size
    unit = max(4, -(-size // 16))
    # Each but the last is full; and the last has the others' size at most.
    assert computed - rows < unit * len(packed) or computed <= size
    assert max(packed) == packed[0]
    assert {padded(count, size) for count in packed} <= set(row_counts(size))


def test_an_update_a_little_larger_than_a_micro_batch_is_not_computed_twice() -> None:
    assert [len(part.rows) for part in micro_batches(units([1] * 288), 512)] == [288]
    assert padded(288, 512) == 288
    assert [len(part.rows) for part in micro_batches(units([1] * 520), 512)] == [288, 232]
    assert row_counts(512) == list(range(32, 513, 32))
    assert [row_counts(size) for size in (1, 3, 8, 16)] == [[1], [3], [4, 8], [4, 8, 12, 16]]


def test_a_unit_larger_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size is 3, but this algorithm compares 4"):
        micro_batches(units([1, 4]), 3)


def test_units_of_rows_and_groups() -> None:
    positions = np.array([2, 0, 3])
    assert single_rows(np.array([2, 0]), positions).rows.tolist() == [[2, 0], [2, 1], [2, 2], [0, 0], [0, 1]]
    joint = joint_rows([[0, 2], [1, 3, 4]], np.full(5, 2))
    assert joint.sizes.tolist() == [2, 2, 3, 3]
    assert joint.rows[:4].tolist() == [[0, 0], [2, 0], [0, 1], [2, 1]]
    assert len(joint_rows([], positions)) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_reading_ahead_keeps_the_order(count: int) -> None:
    chunks = [units([n + 1]) for n in range(count)]
    assert [len(batch.rows) for batch in read_ahead(lambda chunk: chunk, chunks)] == list(range(1, count + 1))  # type: ignore[arg-type,return-value,attr-defined]


def test_an_error_while_reading_ahead_comes_out() -> None:
    def broken(chunk: Units) -> None:
        raise CorruptError("damaged")

    before = torch.get_num_threads()
    with pytest.raises(CorruptError, match="damaged"):
        list(read_ahead(broken, [units([1])] * 3))  # type: ignore[arg-type]
    assert torch.get_num_threads() == before
