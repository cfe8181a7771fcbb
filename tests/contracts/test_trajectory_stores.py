"""What every trajectory store must do; parametrized over the table. Open formats are proven with the real tools."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import duckdb
import numpy as np
import pytest

from configs.errors import CorruptError
from configs.registry import resolve
from storage.commit import hash_file
from storage.trajectories import TRAJECTORY_STORES
from storage.trajectories.base import Sample, TrajectoryStore


@pytest.fixture(params=sorted(TRAJECTORY_STORES))
def trajectory_store(request: pytest.FixtureRequest) -> TrajectoryStore:
    return resolve(TRAJECTORY_STORES, request.param, what="store")()


def samples(count: int = 3, dtype: type = np.float32, states: int = 3, means: bool = False) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(
            sample_id=f"e00001-p{i}-0000",
            prompt_id=f"p{i}",
            group_id=f"p{i}",
            prompt=f'a sign that says "{i}"',
            epoch=1,
            replica=i,
            seed=2**62 + i,
            policy="policies/x",
            sigmas=[1.0, 0.5, 0.25, 0.0],
            steps=range(states - 1),
            states=range(states),
            log_probs=rng.normal(size=states - 1).astype(np.float32),
            latents=rng.normal(size=(states, 4, 2, 3)).astype(dtype),
            means=rng.normal(size=(states - 1, 4, 2, 3)).astype(np.float32) if means else None,
            media=rng.integers(0, 256, (16, 32, 3), dtype=np.uint8),
            metadata={"target": i},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("states", [2, 5])
def test_what_is_written_is_read(trajectory_store: TrajectoryStore, tmp_path: Path, dtype: type, states: int) -> None:
    written = samples(dtype=dtype, states=states)
    trajectory_store.write(tmp_path, written)
    shard = trajectory_store.open(tmp_path)
    for row, sample in enumerate(written):
        assert sample.latents is not None
        np.testing.assert_array_equal(shard.latents(row), sample.latents)
        assert shard.latents(row).dtype == dtype
        np.testing.assert_array_equal(shard.media(row), sample.media)
        columns = shard.table.slice(row, 1).to_pylist()[0]
        assert (columns["sample_id"], columns["seed"], columns["steps"]) == (
            sample.sample_id,
            sample.seed,
            list(sample.steps),
        )
        np.testing.assert_array_equal(np.float32(columns["log_probs"]), sample.log_probs)
        assert json.loads(columns["metadata"]) == {"target": row}


def test_step_means_are_stored_where_asked_for(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    written = samples(dtype=np.float16, means=True)
    trajectory_store.write(tmp_path, written)
    shard = trajectory_store.open(tmp_path)
    for row, sample in enumerate(written):
        assert sample.means is not None
        assert shard.means(row).dtype == np.float32
        np.testing.assert_array_equal(shard.means(row), sample.means)
    (tmp_path / "without").mkdir()
    trajectory_store.write(tmp_path / "without", samples())
    with pytest.raises(CorruptError, match="means of row 0"):
        trajectory_store.open(tmp_path / "without").means(0)


def test_samples_without_latents(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    image = np.full((16, 32, 3), 7, np.uint8)
    plain = {
        "prompt_id": "p",
        "group_id": "p",
        "prompt": "x",
        "epoch": 0,
        "replica": 0,
        "seed": 1,
        "policy": "policies/x",
    }
    trajectory_store.write(tmp_path, [Sample(sample_id="train-p-0000", sigmas=[1.0, 0.0], media=image, **plain)])
    np.testing.assert_array_equal(trajectory_store.open(tmp_path).media(0), image)


def test_equal_samples_give_equal_bytes(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        trajectory_store.write(tmp_path / name, samples())
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert [hash_file(tmp_path / "a" / name) for name in names] == [hash_file(tmp_path / "b" / name) for name in names]


def test_latents_are_views_of_the_mapped_file(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    trajectory_store.write(tmp_path, samples())
    latents = trajectory_store.open(tmp_path).latents(1)
    assert not latents.flags.owndata
    assert not latents.flags.writeable


def test_a_truncated_payload_is_refused(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    trajectory_store.write(tmp_path, samples())
    payload = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    payload.write_bytes(payload.read_bytes()[:600])
    with pytest.raises(CorruptError):
        trajectory_store.open(tmp_path).latents(2)


class TestWebDataset:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        resolve(TRAJECTORY_STORES, "webdataset", what="store")().write(tmp_path, samples())
        return tmp_path

    def test_tar_lists_members(self, folder: Path) -> None:
        listed = subprocess.run(["tar", "tf", folder / "samples.tar"], capture_output=True, text=True, check=True)
        assert listed.stdout.splitlines()[:3] == [
            "e00001-p0-0000.latents.npy",
            "e00001-p0-0000.png",
            "e00001-p0-0000.json",
        ]

    def test_payloads_are_aligned_at_the_offsets_in_the_table(self, folder: Path) -> None:
        import pyarrow.parquet as pq

        raw = (folder / "samples.tar").read_bytes()
        for row, sample in zip(pq.read_table(folder / "samples.parquet").to_pylist(), samples(), strict=True):
            assert row["latents_offset"] % 64 == 0
            assert row["media_offset"] % 512 == 0
            assert sample.latents is not None
            assert raw[row["latents_offset"] :][: row["latents_size"]] == sample.latents.tobytes()

    @pytest.mark.filterwarnings("ignore")
    def test_webdataset_reads_it(self, folder: Path) -> None:
        import webdataset

        read = list(webdataset.WebDataset(str(folder / "samples.tar"), shardshuffle=False).decode())
        np.testing.assert_array_equal(read[1]["latents.npy"], samples()[1].latents)
        assert read[2]["json"]["prompt"] == 'a sign that says "2"'

    @pytest.mark.filterwarnings("ignore")
    def test_datasets_reads_it(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        import datasets

        cache = str(tmp_path_factory.mktemp("cache"))
        files = str(folder / "samples.parquet")
        table = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
        assert table["prompt_id"] == ["p0", "p1", "p2"]
        tar = str(folder / "samples.tar")
        media = datasets.load_dataset("webdataset", data_files=tar, split="train", cache_dir=cache)
        np.testing.assert_array_equal(np.asarray(media[0]["png"]), samples()[0].media)

    def test_duckdb_reads_it(self, folder: Path) -> None:
        query = f"select prompt_id, len(log_probs) from '{folder / 'samples.parquet'}' order by 1 desc limit 1"
        assert duckdb.sql(query).fetchall() == [("p2", 2)]
