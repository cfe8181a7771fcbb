"""Published samples: the uploaded files, and their rows in datasets and webdataset, without flowmill."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import flowmill
from configs.errors import StoreError
from configs.load import load_config
from configs.schema import RunConfig
from tasks.export.request import Part
from tasks.inputs.store_trust import remember
from tasks.ratings.answers import Answer, append_answer
from tasks.reports.dataset_card import dataset_card
from tasks.reports.published import DataFile, parts_of, write_files
from tasks.runs.context import RunContext
from tests.support.given import pairs, write_jsonl
from tests.support.hub import local_hub
from tests.support.inside import evaluate, prepare, run_epoch

Make = Callable[..., RunConfig]
#: Prints every row of each configuration and split; images and clips as their bytes.
READ = """
import json, sys, datasets
for part in datasets.get_dataset_config_names(sys.argv[1]):
    for split, rows in datasets.load_dataset(sys.argv[1], part).items():
        for name, feature in rows.features.items():
            kind = type(feature).__name__
            if kind in ("Image", "Video"):
                rows = rows.cast_column(name, type(feature)(decode=False))
                shown = lambda row, name=name: {name: kind + row[name]["bytes"].hex()}
                rows = datasets.Dataset.from_list([{**row, **shown(row)} for row in rows])
        for row in rows:
            print(json.dumps([part, split, row]))
"""


def loaded(folder: Path, tmp_path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows that datasets loads of a folder, by configuration and split, in a process without flowmill."""
    env = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-I", "-c", READ, str(folder)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        part, split, row = json.loads(line)
        rows.setdefault((part, split), []).append(row)
    return rows


def written(context: RunContext, folder: Path, form: str = "parquet", *parts: Part) -> list[DataFile]:
    """Write all that a run has, with its card."""
    folder.mkdir()
    wanted = parts_of(context, (), parts)
    files = write_files(context, folder, wanted, form)
    (folder / "README.md").write_text(dataset_card(context, "ann/data", files, wanted))
    return files


def rate(context: RunContext, rater: str, preferred: float) -> Answer:
    """Prefer the first sample of the evaluation after training to the one before, or not."""
    first, second = (context.chain.require(epoch, "evaluate") for epoch in (1, 0))
    row = flowmill.open(context.store.root.uri).run(context.run.name).evaluation(1).to_pylist()[0]
    answer = Answer(
        prompt_id=row["prompt_id"],
        prompt=row["prompt"],
        first_artifact=first.artifact,
        first_sample=row["sample_id"],
        second_artifact=second.artifact,
        second_sample=row["sample_id"],
        preferred=preferred,
        rater=rater,
        seconds=1.0,
    )
    append_answer(context.run, answer)
    return answer


@pytest.fixture
def context(make_config: Make) -> RunContext:
    made = prepare(make_config("rollout.groups_per_shard=1"))
    evaluate(made, 0)
    for epoch in (1, 2):
        run_epoch(made, epoch)
    evaluate(made, 1)
    return made


def publish(context: RunContext, url: str, *options: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "a-token", "COLUMNS": "200"}
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "flows.cli", "publish", context.run.name, "ann/data", "--dataset", *options]
    command += ["--root", context.store.root.uri]
    return subprocess.run(
        command, env={**kept, **own}, input=answer, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_samples_are_published_once_as_planned_and_load_elsewhere(context: RunContext, tmp_path: Path) -> None:
    rate(context, "Berta Benz", 1.0)
    rate(context, "Carl", 0.5)
    with local_hub() as hub:
        asked = publish(context, hub.url)
        assert asked.returncode == 1
        assert "Nothing was uploaded. Give --yes" in asked.stderr
        assert "new dataset, public: everybody can read it" in asked.stdout
        assert not hub.private, "no repository either"
        hub.most_sent = 2
        failed = publish(context, hub.url, "--yes", "--private")
        assert (failed.returncode, hub.files) == (1, {})
        assert "Nothing was published. Run the command again: files that were sent" in failed.stderr
        hub.most_sent = None
        done = publish(context, hub.url, "--yes", "--private")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"{hub.url}/datasets/ann/data"
        sent, files = hub.sent, dict(hub.files["ann/data"])
        large = {name: data for name, data in files.items() if name.endswith(".parquet")}
        assert sent == len(set(large.values())), "files of the failed upload are not sent again"
        assert hub.private == {"ann/data": True}
        again = publish(context, hub.url, "--yes")
        assert "existing dataset, private" in again.stdout
        assert (hub.sent, hub.files["ann/data"], len(hub.commits)) == (sent, files, 1)
        fewer = publish(context, hub.url, "--yes", "--epoch", "2")
        assert fewer.returncode == 0, fewer.stderr
        assert {name.partition("/")[0] for name in hub.files["ann/data"]} == {"README.md", "rollouts", "preferences"}
        assert all("00002-" in name for name in hub.files["ann/data"] if name.startswith("rollouts/"))
    got = tmp_path / "got"
    for name, data in files.items():
        for secret in (str(tmp_path), "Berta", "a-token"):
            assert secret.encode() not in data, (name, secret)
        (got / name).parent.mkdir(parents=True, exist_ok=True)
        (got / name).write_bytes(data)
    check_rows(context, loaded(got, tmp_path))


def check_rows(context: RunContext, rows: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Compare loaded rows with those of the run."""
    run = flowmill.open(context.store.root.uri).run("small")
    assert {part for part, _ in rows} == {"rollouts", "evaluations", "preferences"}
    expected = [*run.samples(1).to_pylist(), *run.samples(2).to_pylist()]
    media = {**run.images(1), **run.images(2)}
    for row, given in zip(rows["rollouts", "train"], expected, strict=True):
        for name in ("sample_id", "prompt", "policy", "reward", "advantage", "reward.jpeg_compressibility"):
            assert row[name] == given[name], name
        picture = Image.open(io.BytesIO(bytes.fromhex(row["image"].removeprefix("Image"))))
        assert np.array_equal(np.asarray(picture), np.asarray(media[row["sample_id"]]))
    judged = [*rows["evaluations", "train"], *rows["evaluations", "heldout"]]
    assert {row["epoch"] for row in judged} == {0, 1}
    first, tied = rows["preferences", "train"]
    assert (first["rater"], first["tie"], tied["rater"], tied["tie"]) == ("rater 1", False, "rater 2", True)
    assert first["chosen_sample"].startswith(context.chain.require(1, "evaluate").artifact)
    (better,) = (row for row in judged if row["epoch"] == 1 and first["chosen_sample"].endswith(row["sample_id"]))
    assert first["chosen"] == better["image"]


def test_the_card_says_what_it_is(context: RunContext, tmp_path: Path) -> None:
    rate(context, "Berta", 1.0)
    files = written(context, tmp_path / "made")
    card = (tmp_path / "made" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "unknown"
    assert front["task_categories"] == ["text-to-image"]
    assert [each["config_name"] for each in front["configs"]] == ["rollouts", "evaluations", "preferences"]
    assert front["flowmill"]["rows"]["rollouts"] == 32 == sum(f.rows for f in files if f.part == "rollouts")
    assert front["flowmill"]["rewards"] == [{"name": "jpeg_compressibility", "weight": 1.0}]
    for entry in ("rollout", "score", "advantage", "evaluate"):
        ref = context.chain.require(1, entry, "jpeg_compressibility" if entry == "score" else "").artifact
        assert f"`{ref}`" in card
    assert "| evaluation of epoch 1 | evaluation of epoch 0 | all | 1 | 1 | 1.000 |" in card
    files_again = written(context, tmp_path / "again")
    assert [(one.name, one.path.read_bytes()) for one in files] == [(n.name, n.path.read_bytes()) for n in files_again]


@pytest.mark.usefixtures("config_file")
def test_given_pairs_are_published_as_they_are_read(config_data: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**row, "license": "CC0", "file": "/home/ann/x.png"} for row in pairs()]
    columns = {"chosen": "chosen", "rejected": "rejected", "rows_per_shard": 4}
    data = {**config_data, "data": {"train": str(write_jsonl(tmp_path / "given", rows)), **columns}}
    data["prompts"], data["optimize"] = {"heldout": config_data["prompts"]["heldout"]}, {"algorithm": "dpo"}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(data))
    config = load_config(tmp_path / "given.yaml")
    remember(config)
    context = prepare(config)
    written(context, tmp_path / "made")
    front = yaml.safe_load((tmp_path / "made" / "README.md").read_text().split("---\n")[1])
    assert front["license"] == "CC0"
    found = loaded(tmp_path / "made", tmp_path)["given", "train"]
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows]
    assert {row["metadata"] for row in found} == {'{"file":"…/x.png","license":"CC0"}'}
    # The same samples as data of another run.
    files = sorted((tmp_path / "made" / "given").iterdir())
    assert len(files) == 2
    data["data"] = {"train": str(files[0]), **columns}
    data["run"] = {**data["run"], "name": "next"}
    (tmp_path / "next.yaml").write_text(yaml.safe_dump(data))
    following = load_config(tmp_path / "next.yaml")
    remember(following)
    written(prepare(following), tmp_path / "next")
    again = loaded(tmp_path / "next", tmp_path)["given", "train"]
    assert [(row["chosen"], row["rejected"]) for row in again] == [(r["chosen"], r["rejected"]) for r in found[:4]]


def test_tars_are_read_by_both_libraries(context: RunContext, tmp_path: Path) -> None:
    import webdataset as wds

    files = written(context, tmp_path / "made", "webdataset", "rollouts")
    run = flowmill.open(context.store.root.uri).run("small")
    table, images = run.samples(1).to_pylist(), run.images(1)
    shards = [str(file.path) for file in files if "-00001-" in file.name]
    read = wds.WebDataset(shards, shardshuffle=False, empty_check=False).decode("rgb8").to_tuple("png", "json")
    for (pixels, about), row in zip(read, table, strict=True):
        assert np.array_equal(pixels, np.asarray(images[row["sample_id"]]))
        assert (about["sample_id"], about["reward"]) == (row["sample_id"], row["reward"])
    rows = loaded(tmp_path / "made", tmp_path)["rollouts", "train"]
    assert [row["__key__"] for row in rows[:16]] == [row["sample_id"] for row in table]
    assert all(row["png"].startswith("Image89504e47") for row in rows)


def test_what_a_run_has_not_is_refused(context: RunContext) -> None:
    with pytest.raises(StoreError, match=r"has no epoch 7; it has rollouts of epochs \[1, 2\]"):
        parts_of(context, [7], ())
    with pytest.raises(StoreError, match="has no given, preferences"):
        parts_of(context, (), ["given", "preferences"])
