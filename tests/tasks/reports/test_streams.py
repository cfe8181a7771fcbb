"""Committed samples as streams: the same samples as the store's tables, split and continued without loss."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flowmill
from flowmill.configs.data import DataSection
from flowmill.configs.errors import ConfigError, CorruptError
from flowmill.tasks.inputs.data_rows import read_data_rows
from tests.support.inside import Make, evaluate, prepare, run_epoch
from tests.support.small import small_config


@pytest.fixture(scope="module")
def run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> flowmill.Run:
    config = small_config(tmp_path_factory.mktemp("streams"), tiny_base, "rollout.groups_per_shard=1")
    context = prepare(config)
    run_epoch(context, 1)
    evaluate(context, 1)
    return flowmill.open(context.store.root.uri).run("small")


def test_a_stream_has_the_samples_of_the_table(run: flowmill.Run) -> None:
    table = run.samples(1).to_pylist()
    found = {sample["__key__"]: sample for sample in run.stream(1)}
    assert [*found] == [row["sample_id"] for row in table]
    images, latents = run.images(1), run.arrays(1)
    for row in table:
        sample = found[row["sample_id"]]
        assert sample["scores"]["reward"] == row["reward"]
        assert sample["scores"]["advantage"] == row["advantage"]
        assert json.loads(sample["json"])["prompt"] == row["prompt"]
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(sample["png"]))), np.asarray(images[row["sample_id"]]))
        assert np.array_equal(np.load(io.BytesIO(sample["latents.npy"]), allow_pickle=False), latents[row["sample_id"]])


def test_tars_of_a_run_are_given_data_of_another(run: flowmill.Run) -> None:
    tars = sorted(Path(run.store.root.removeprefix("file://")).rglob("samples.tar"))
    found = read_data_rows(DataSection(train="::".join(map(str, tars))))
    files = {row.samples[0].name.rpartition(" ")[2]: row for row in found.rows}
    for sample in run.stream(1):
        row = files[f"{sample['__key__']}.png"]
        assert row.samples[0].read() == sample["png"]
        assert row.text == json.loads(sample["json"])["prompt"]


def test_a_stream_continues_at_a_position(run: flowmill.Run) -> None:
    whole = [sample["__key__"] for sample in run.stream(1)]
    for start in (0, 3, 4, 7, 16, 20):
        assert [sample["__key__"] for sample in run.stream(1, start=start)] == whole[start:]


def test_ranks_and_workers_share_a_stream(run: flowmill.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [sample["__key__"] for sample in run.stream(1)]
    parts = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        parts.append([sample["__key__"] for sample in run.stream(1)])
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    assert all(parts)


def test_a_dataset_has_the_samples_and_continues(run: flowmill.Run) -> None:
    from datasets.distributed import split_dataset_by_node

    table, dataset = run.samples(1).to_pylist(), run.dataset(1)
    rows = list(dataset)
    assert [row["sample_id"] for row in rows] == [row["sample_id"] for row in table]
    assert [row["reward.jpeg_compressibility"] for row in rows] == [row["reward.jpeg_compressibility"] for row in table]
    assert rows[0]["image"].size == (32, 16)
    iterator = iter(dataset)
    first = [next(iterator)["sample_id"] for _ in range(5)]
    again = run.dataset(1)
    again.load_state_dict(dataset.state_dict())
    assert first + [row["sample_id"] for row in again] == [row["sample_id"] for row in rows]
    parts = [[row["sample_id"] for row in split_dataset_by_node(run.dataset(1), rank, 2)] for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(row["sample_id"] for row in rows)


def test_a_loader_of_torch_takes_both(run: flowmill.Run) -> None:
    count = run.samples(1).num_rows
    assert sum(1 for _ in torch.utils.data.DataLoader(run.stream(1), batch_size=None)) == count
    assert sum(1 for _ in torch.utils.data.DataLoader(run.dataset(1), batch_size=None)) == count


def test_samples_of_an_evaluation(run: flowmill.Run) -> None:
    table = run.evaluation(1).to_pylist()
    found = {sample["__key__"]: sample["scores"] for sample in run.stream(1, evaluation=True)}
    assert found == {
        row["sample_id"]: {"reward.jpeg_compressibility": row["reward.jpeg_compressibility"]} for row in table
    }


def test_a_damaged_tar_is_refused(run: flowmill.Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.store.root.removeprefix("file://"), tmp_path / "copy", symlinks=True))
    first = sorted(copy.glob("trajectories/*/*/samples.tar"))[0]
    data = bytearray(first.read_bytes())
    data[700] ^= 1
    first.chmod(0o644)
    first.write_bytes(data)
    with pytest.raises(CorruptError, match=r"samples\.tar"):
        list(flowmill.open(str(copy)).run("small").stream(1))


def test_a_store_without_tars_has_no_stream(make_config: Make) -> None:
    context = prepare(make_config("rollout.store=parquet"))
    run_epoch(context, 1)
    made: Any = flowmill.open(context.store.root.uri).run("small")
    with pytest.raises(ConfigError, match=r"in no tars. Read them with dataset"):
        made.stream(1)
    assert len(list(made.dataset(1))) == 16
