"""Stores written by earlier versions are read; newer ones are refused with what to do."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from flowmill.configs.errors import ConfigError, CorruptError, StoreError
from flowmill.configs.load import parse_config
from flowmill.storage.artifacts.checksummed_json import seal, unseal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.backends import local
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.verify import list_artifacts, verify_store
from flowmill.storage.trajectories.schema import REWARDS, read_table
from flowmill.storage.trajectories.webdataset import WebDatasetStore
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.reports.dataset import export_run
from flowmill.tasks.reports.report import run_report
from flowmill.tasks.runs.opening import finished_result, mark_finished, open_run
from flowmill.tasks.runs.staleness import Freshness, statuses

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAJECTORIES, REWARDED = ArtifactRef("trajectories", "1" * 32), ArtifactRef("rewards", "2" * 32)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    shutil.copytree(FIXTURES / "store_v1", tmp_path / "store")
    return ArtifactStore(str(tmp_path / "store"))


def test_version_1_is_read(store: ArtifactStore) -> None:
    assert verify_store(store, deep=True)["problems"] == []
    assert store.require(TRAJECTORIES).schema_version == 1
    for group, record in enumerate(store.records(TRAJECTORIES)):
        shard = WebDatasetStore().open(store.files(TRAJECTORIES, record))
        for row in range(2):
            latents = shard.array("latents", row)
            assert latents.dtype == np.float16
            np.testing.assert_array_equal(latents.reshape(-1), np.arange(12) + 100 * row + group)
            np.testing.assert_array_equal(shard.array("means", row).reshape(2, 4)[1], np.arange(4, 8) + row)
            assert shard.media(row)[0, 0, 0] == 40 * row + group
    rewards = read_table(store.files(REWARDED, store.records(REWARDED)[0]), "rewards.parquet", REWARDS)
    assert rewards.column("reward").to_pylist() == [0.0, 1.0, 0.5, 0.5]


def test_a_newer_table_is_refused(tmp_path: Path) -> None:
    from tests.support.folder_files import FolderFiles

    (source,) = (FIXTURES / "store_v1").rglob("rewards.parquet")
    table = pq.read_table(source)
    pq.write_table(table.replace_schema_metadata({"flowmill.schema_version": "99"}), tmp_path / "rewards.parquet")
    with pytest.raises(CorruptError, match="schema version 99"):
        read_table(FolderFiles(tmp_path), "rewards.parquet", REWARDS)


@pytest.fixture
def released(tmp_path: Path) -> str:
    """A run of version 0.1.0, made by it; the files of its base, embeddings and export were removed."""
    shutil.copytree(FIXTURES / "store_0_1_0", tmp_path / "released")
    return str(tmp_path / "released")


def test_a_run_of_0_1_0_is_read_and_whole(released: str) -> None:
    assert verify_store(ArtifactStore(released), deep=True)["problems"] == []
    context = open_run(released, "tiny", reads=True)
    # Its export had a LoRA whose scale was only in metadata, and is the one thing that is made again.
    stale = [each for each in statuses(context.chain) if each.state is not Freshness.FRESH]
    assert [(each.node.stage, each.causes[0].text) for each in stale] == [("export", "stage version 2 -> 3")]
    assert len(context.chain.entries()) == 12
    assert finished_result(context) is not None


def test_who_only_reads_writes_nothing(released: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a store that cannot be written everything that reads works, and nothing of it is touched."""

    def refuse(*given: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(local, "Staging", refuse)
    before = {path: path.lstat().st_mtime_ns for path in Path(released).rglob("*")}
    context = open_run(released, "tiny", reads=True)
    assert context.chain.digest()
    assert describe_run(context)["epochs"] == 1
    assert verify_store(context.store, deep=True)["problems"] == []
    assert list_artifacts(context.store)
    assert "tiny" in run_report(context)
    assert export_run(context, tmp_path / "table", "parquet", epochs=(), progress=lambda done, total: None) == 4
    # Rewards of 0.1.0 have no labels; by run they are known.
    (table,) = (tmp_path / "table").glob("*.parquet")
    assert None not in pq.read_table(table).column("reward_jpeg_compressibility").to_pylist()
    assert {path: path.lstat().st_mtime_ns for path in Path(released).rglob("*")} == before
    with pytest.raises(StoreError, match="cannot be used: Read-only file system"):
        context.run.add("configs", {"run": {"epochs": 9}})


def test_a_stored_config_without_a_setting_of_today_is_the_same_config(released: str) -> None:
    """Walks the schema: whatever setting did not exist yet, the run is as complete as it was."""
    first = open_run(released, "tiny", reads=True)
    digest, result = first.chain.digest(), finished_result(first)
    assert result is not None
    # As 0.1.0 named it, it hangs on each of its settings; as it is named now, on none that has its default.
    mark_finished(first, result)
    newest = Path(released) / "runs" / "tiny" / "configs" / "0002.json"
    whole = unseal(newest.read_bytes(), "config")
    left_out = 0
    for section, settings in whole.items():
        for key in settings if isinstance(settings, dict) else ():
            older = {**whole, section: {name: value for name, value in settings.items() if name != key}}
            try:
                if parse_config(older, where="") != parse_config(whole, where=""):
                    continue
            except ConfigError:
                # One that was always asked for.
                continue
            newest.write_bytes(seal(older))
            context = open_run(released, "tiny", reads=True)
            assert context.chain.own is None, f"{section}.{key}"
            assert finished_result(context) is not None, f"{section}.{key}"
            assert context.chain.digest() == digest
            left_out += 1
    assert left_out > 50
