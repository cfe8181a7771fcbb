"""The contract of every trajectory store; parametrized over the table. Open formats are proven with the real tools."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from flowmill.configs.errors import ConfigError, CorruptError
from flowmill.configs.registry import resolve
from flowmill.storage.artifacts.collective_publish import describe
from flowmill.storage.artifacts.row_digest import Contents
from flowmill.storage.backends.checksums import hash_file
from flowmill.storage.trajectories import TRAJECTORY_STORES
from flowmill.storage.trajectories.base import Sample, TrajectoryShard, TrajectoryStore
from flowmill.storage.trajectories.media import MediaFormat, Sound
from flowmill.storage.trajectories.parquet import ParquetStore
from flowmill.storage.trajectories.schema import SAMPLES, read_table, write_table
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from tests.support.folder_files import FolderFiles
from tests.support.trajectories import write_samples


@pytest.fixture(params=sorted(TRAJECTORY_STORES))
def trajectory_store(request: pytest.FixtureRequest) -> TrajectoryStore:
    return resolve(TRAJECTORY_STORES, request.param, label="store")()


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
    write_samples(trajectory_store, tmp_path, written)
    shard = trajectory_store.open(FolderFiles(tmp_path))
    for row, sample in enumerate(written):
        assert sample.latents is not None
        np.testing.assert_array_equal(shard.array("latents", row), sample.latents)
        assert shard.array("latents", row).dtype == dtype
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
    write_samples(trajectory_store, tmp_path, written)
    shard = trajectory_store.open(FolderFiles(tmp_path))
    for row, sample in enumerate(written):
        assert sample.means is not None
        assert shard.array("means", row).dtype == np.float32
        np.testing.assert_array_equal(shard.array("means", row), sample.means)
    (tmp_path / "without").mkdir()
    write_samples(trajectory_store, tmp_path / "without", samples())
    with pytest.raises(CorruptError, match="row 0 has no means"):
        trajectory_store.open(FolderFiles(tmp_path / "without")).array("means", 0)


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
    write_samples(
        trajectory_store, tmp_path, [Sample(sample_id="train-p-0000", sigmas=[1.0, 0.0], media=image, **plain)]
    )
    np.testing.assert_array_equal(trajectory_store.open(FolderFiles(tmp_path)).media(0), image)


@pytest.mark.parametrize("form", ["png", "webp"])
def test_images_are_kept_without_loss(trajectory_store: TrajectoryStore, tmp_path: Path, form: str) -> None:
    written = samples()
    write_samples(trajectory_store, tmp_path, written, MediaFormat(name=form))
    shard = trajectory_store.open(FolderFiles(tmp_path))
    for row, sample in enumerate(written):
        assert shard.media_format(row) == form
        np.testing.assert_array_equal(shard.media(row), sample.media)


def test_clips_are_kept_without_loss_unless_asked_for(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    clip = np.linspace(0, 255, 5 * 32 * 48 * 3).reshape(5, 32, 48, 3).astype(np.uint8)
    one = [replace(samples(1)[0], media=clip)]
    for name, media in {
        "exact": MediaFormat(fps=8),
        "small": MediaFormat(lossless=False),
        "again": MediaFormat(fps=8),
    }.items():
        (tmp_path / name).mkdir()
        write_samples(trajectory_store, tmp_path / name, one, media)
    exact, small = (trajectory_store.open(FolderFiles(tmp_path / name)) for name in ("exact", "small"))
    assert exact.media_format(0) == "mp4"
    np.testing.assert_array_equal(exact.media(0), clip)
    assert small.media(0).shape == clip.shape
    assert np.abs(small.media(0).astype(int) - clip).mean() < 4
    names = sorted(path.name for path in (tmp_path / "exact").iterdir())
    assert [hash_file(tmp_path / "exact" / n) for n in names] == [hash_file(tmp_path / "again" / n) for n in names]


@pytest.mark.parametrize("channels", [1, 2])
def test_sound_is_kept_exactly_however_clips_are(
    trajectory_store: TrajectoryStore, tmp_path: Path, channels: int
) -> None:
    rng = np.random.default_rng(0)
    clips = rng.integers(0, 256, (3, 5, 32, 48, 3), dtype=np.uint8)
    heard = [Sound(samples=rng.integers(-32768, 32768, (4801, channels), dtype=np.int16), rate=24000) for _ in clips]
    made = [replace(one, media=clip, sound=sound) for one, clip, sound in zip(samples(), clips, heard, strict=True)]
    for lossless in (True, False):
        (tmp_path / str(lossless)).mkdir()
        write_samples(trajectory_store, tmp_path / str(lossless), made, MediaFormat(lossless=lossless))
        shard = trajectory_store.open(FolderFiles(tmp_path / str(lossless)))
        for row, sound in enumerate(heard):
            found = shard.sound(row)
            assert found.rate == 24000
            np.testing.assert_array_equal(found.samples, sound.samples)
            assert bool((shard.media(row) == clips[row]).all()) is lossless
    assert str(contents(made)) != str(contents([replace(one, sound=None) for one in made]))


def test_a_clip_without_sound_is_the_file_it_was_and_says_so(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    clip = np.zeros((5, 32, 48, 3), np.uint8)
    write_samples(trajectory_store, tmp_path, [replace(samples(1)[0], media=clip)])
    shard = trajectory_store.open(FolderFiles(tmp_path))
    assert shard.sound_of(0) is None
    with pytest.raises(CorruptError, match="row 0 has no sound; the model that made it makes none"):
        shard.sound(0)


def contents(made: list[Sample]) -> Contents:
    found = Contents()
    for sample in made:
        sample.add_to(found)
    return found


def test_a_format_that_cannot_hold_the_media_is_refused(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold an image"):
        write_samples(trajectory_store, tmp_path, samples(), MediaFormat(name="mp4"))


def test_tokens_and_unconditional_predictions(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    tokens = [np.arange(5 + i, dtype=np.int32) for i in range(3)]
    text = [
        replace(sample, latents=None, media=None, tokens=tokens[i], token_mask=(tokens[i] > 2).astype(np.uint8))
        for i, sample in enumerate(samples())
    ]
    images = [replace(sample, unconditional=np.float16([[1.5, i]])) for i, sample in enumerate(samples())]
    for name, written in {"text": text, "images": images}.items():
        (tmp_path / name).mkdir()
        write_samples(trajectory_store, tmp_path / name, written)
    shard = trajectory_store.open(FolderFiles(tmp_path / "text"))
    for row in range(3):
        np.testing.assert_array_equal(shard.array("tokens", row), tokens[row])
        np.testing.assert_array_equal(shard.array("token_mask", row), tokens[row] > 2)
        assert shard.media_format(row) == ""
    with pytest.raises(CorruptError, match="row 0 has no media"):
        shard.media(0)
    shard = trajectory_store.open(FolderFiles(tmp_path / "images"))
    np.testing.assert_array_equal(shard.array("unconditional", 2), np.float16([[1.5, 2]]))


def test_texts_of_a_few_bytes_and_empty_ones(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    """Payloads so short that headers of pages hold the same bytes: how a text ended is one, often 0."""
    wrote = ["46", "", "0", "46", "", ""]
    written = [
        replace(
            sample,
            prompt_id=f"p{row // 2}",
            latents=None,
            media=None,
            steps=(),
            states=(),
            tokens=np.arange(2 + len(text), dtype=np.int32),
            log_probs=-np.arange(1 + len(text), dtype=np.float32),
            sampled_log_probs=np.zeros(1 + len(text), np.float32),
            finish=np.array([row == 4], np.uint8),
            text=np.frombuffer(text.encode(), np.uint8),
        )
        for row, (sample, text) in enumerate(zip(samples(6), wrote, strict=True))
    ]
    write_samples(trajectory_store, tmp_path, written)
    shard = trajectory_store.open(FolderFiles(tmp_path))
    for row, sample in enumerate(written):
        for name, array in sample.arrays().items():
            np.testing.assert_array_equal(shard.array(name, row), array)


def test_a_group_larger_than_a_page_is_split(
    trajectory_store: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowmill.storage.trajectories.parquet._PAGE", 500)
    written = [replace(sample, prompt_id="p", group_id="p") for sample in samples(7)]
    write_samples(trajectory_store, tmp_path, written)
    shard = trajectory_store.open(FolderFiles(tmp_path))
    for row, sample in enumerate(written):
        np.testing.assert_array_equal(shard.array("latents", row), sample.latents)


def test_a_group_whose_media_are_larger_than_a_page_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.storage.trajectories.parquet._PAGE", 900)
    monkeypatch.setattr(MediaFormat, "encode", lambda self, media, sound=None: bytes(400))
    written = [replace(sample, prompt_id="p", latents=None, states=(), steps=()) for sample in samples(7)]
    write_samples(ParquetStore(), tmp_path, written)
    groups = pq.read_metadata(tmp_path / "samples.parquet")
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [2, 2, 2, 1]


def test_a_payload_of_another_dtype_is_refused(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    write_samples(trajectory_store, tmp_path, samples())
    shard = trajectory_store.open(FolderFiles(tmp_path))
    entries = shard.table.column("arrays").to_pylist()
    entries[1][0]["dtype"] = "float64"
    table = shard.table.set_column(14, "arrays", [entries])
    shard = TrajectoryShard(lambda: table, lambda: shard._payloads(), "shard")
    with pytest.raises(CorruptError, match=r"latents of row 1 are 288 bytes, but shape .* of float64 needs 576"):
        shard.array("latents", 1)


def test_equal_samples_give_equal_bytes(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_samples(trajectory_store, tmp_path / name, samples())
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert [hash_file(tmp_path / "a" / name) for name in names] == [hash_file(tmp_path / "b" / name) for name in names]


def test_how_samples_are_dealt_out_changes_no_byte(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    written = [replace(sample, prompt_id=f"p{i // 3}") for i, sample in enumerate(samples(7))]
    for name, sizes in {"whole": (7,), "batches": (2, 0, 4, 1)}.items():
        (tmp_path / name).mkdir()
        writer, start = trajectory_store.writer(tmp_path / name), 0
        for size in sizes:
            writer.add(written[start : start + size])
            start += size
        known = writer.end()
        described = {entry.name: entry for entry in describe(tmp_path / name)}
        assert all(described[entry.name] == entry for entry in known)
    whole, batches = (describe(tmp_path / name) for name in ("whole", "batches"))
    assert whole == batches


def test_latents_are_views_of_the_mapped_file(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    write_samples(trajectory_store, tmp_path, samples())
    latents = trajectory_store.open(FolderFiles(tmp_path)).array("latents", 1)
    assert not latents.flags.owndata
    assert not latents.flags.writeable


def test_a_truncated_payload_is_refused(trajectory_store: TrajectoryStore, tmp_path: Path) -> None:
    write_samples(trajectory_store, tmp_path, samples())
    payload = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    payload.write_bytes(payload.read_bytes()[:600])
    with pytest.raises(CorruptError):
        trajectory_store.open(FolderFiles(tmp_path)).array("latents", 2)


class TestWebDataset:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_samples(resolve(TRAJECTORY_STORES, "webdataset", label="store")(), tmp_path, samples())
        return tmp_path

    def test_tar_lists_members(self, folder: Path) -> None:
        listed = subprocess.run(["tar", "tf", folder / "samples.tar"], capture_output=True, text=True, check=True)
        assert listed.stdout.splitlines()[:3] == [
            "e00001-p0-0000.latents.npy",
            "e00001-p0-0000.png",
            "e00001-p0-0000.json",
        ]

    @pytest.mark.parametrize("name", ["s", "s" * 88, "é"])
    def test_members_are_written_as_tarfile_writes_them(self, tmp_path: Path, name: str) -> None:
        (sample,) = samples(1)
        write_samples(WebDatasetStore(), tmp_path, [replace(sample, sample_id=name)])
        raw = (tmp_path / "samples.tar").read_bytes()
        with tarfile.open(tmp_path / "samples.tar") as tar:
            members = tar.getmembers()
        assert [member.name for member in members] == [f"{name}.{end}" for end in ("latents.npy", "png", "json")]
        for member in members:
            header = raw[member.offset : member.offset_data]
            assert header == member.tobuf(tarfile.USTAR_FORMAT)
            assert (member.mode, member.mtime, member.uid, member.uname) == (0o644, 0, 0, "")

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"dtype": "nonsense"}, "there are no latents of type nonsense"),
            ({"dtype": "O"}, "there are no latents of type O"),
            ({"dtype": "V0"}, "there are no latents of type V0"),
            ({"shape": [1] * 70}, "there are no latents of type float32 and shape"),
            ({"shape": [2**31 - 1, 2**31 - 1, 2**31 - 1, 0], "size": 0}, "there are no latents of type float32"),
            ({"shape": None}, "says nothing of some arrays"),
            ({"shape": [None, 4]}, "says nothing of some arrays"),
            ({"offset": None}, "says nothing of some arrays"),
            ({"shape": [-1, -24]}, "there are no latents of type float32 and shape"),
            ({"size": 8}, "are 8 bytes, but shape"),
            ({"offset": 1 << 40}, "lie outside the file"),
            ({"offset": -512}, "lie outside the file"),
        ],
    )
    def test_entries_that_cannot_be_are_named(self, tmp_path: Path, entry: Mapping[str, Any], message: str) -> None:
        write_samples(WebDatasetStore(), tmp_path, samples(1))
        rows = read_table(FolderFiles(tmp_path), "samples.parquet", SAMPLES).to_pydict()
        rows["arrays"][0][0].update(entry)
        write_table(tmp_path / "samples.parquet", rows, SAMPLES)
        with pytest.raises(CorruptError, match=message):
            WebDatasetStore().open(FolderFiles(tmp_path)).array("latents", 0)

    def test_payloads_are_aligned_at_the_offsets_in_the_table(self, folder: Path) -> None:
        import pyarrow.parquet as pq

        raw = (folder / "samples.tar").read_bytes()
        for row, sample in zip(pq.read_table(folder / "samples.parquet").to_pylist(), samples(), strict=True):
            (latents,) = row["arrays"]
            assert latents["offset"] % 64 == 0
            assert row["media_offset"] % 512 == 0
            assert sample.latents is not None
            assert raw[latents["offset"] :][: latents["size"]] == sample.latents.tobytes()

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


class TestParquet:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        write_samples(resolve(TRAJECTORY_STORES, "parquet", label="store")(), tmp_path, samples())
        return tmp_path / "samples.parquet"

    def test_payloads_lie_at_the_offsets_in_the_metadata(self, file: Path) -> None:
        import pyarrow.parquet as pq

        raw, places = file.read_bytes(), json.loads(pq.read_metadata(file).metadata[b"flowmill.offsets"])
        assert pq.ParquetFile(file).num_row_groups == 3
        for offset, sample in zip(places["latents"], samples(), strict=True):
            assert sample.latents is not None
            assert raw[offset:].startswith(sample.latents.tobytes())

    def test_pyarrow_and_duckdb_read_the_payloads(self, file: Path) -> None:
        latents = samples()[2].latents
        assert latents is not None
        found = duckdb.sql(f"select latents, arrays[1].shape from '{file}' where prompt_id = 'p2'").fetchall()
        assert found == [(latents.tobytes(), list(latents.shape))]

    @pytest.mark.filterwarnings("ignore")
    def test_datasets_reads_it(self, file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        import datasets

        cache = str(tmp_path_factory.mktemp("cache"))
        table = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=cache)
        latents = samples()[1].latents
        assert latents is not None
        assert table[1]["latents"] == latents.tobytes()

    def test_a_file_without_offsets_is_refused(self, file: Path) -> None:
        import pyarrow.parquet as pq

        pq.write_table(pq.read_table(file), file)
        shard = resolve(TRAJECTORY_STORES, "parquet", label="store")().open(FolderFiles(file.parent))
        with pytest.raises(CorruptError, match="does not say where"):
            shard.array("latents", 0)
