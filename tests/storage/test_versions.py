"""Stores written by earlier versions are read; newer ones are refused with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from configs.errors import CorruptError
from storage.commit import ArtifactStore
from storage.layout import ArtifactRef
from storage.schema import REWARDS, read_table
from storage.trajectories.webdataset import WebDatasetStore
from storage.verify import verify_store

FIXTURES = Path(__file__).parents[1] / "fixtures"
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


def test_a_newer_manifest_is_refused(store: ArtifactStore) -> None:
    path = Path(store.root.uri) / "rewards" / REWARDED.id / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(CorruptError, match=r"schema version 99; this flowmill reads up to \d+. Upgrade flowmill"):
        store.manifest(REWARDED)


def test_a_newer_table_is_refused(tmp_path: Path) -> None:
    from storage.files import FolderFiles

    (source,) = (FIXTURES / "store_v1").rglob("rewards.parquet")
    table = pq.read_table(source)
    pq.write_table(table.replace_schema_metadata({"flowmill.schema_version": "99"}), tmp_path / "rewards.parquet")
    with pytest.raises(CorruptError, match="schema version 99"):
        read_table(FolderFiles(tmp_path), "rewards.parquet", REWARDS)
