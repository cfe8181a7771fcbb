"""Whatever is lost, swapped or doubled among the records of runs is seen and put back, and never loops."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flowmill.configs.errors import CorruptError, RunConflictError, StoreError
from flowmill.storage import layout
from flowmill.storage.artifacts.checksummed_json import seal, unseal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import LineageEntry, RunFolder, damaged_records, list_runs
from flowmill.storage.artifacts.mirrored_records import lost_newest, write
from flowmill.storage.backends.process_tags import tag
from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals, remove
from flowmill.storage.maintenance.quarantine import quarantine
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.storage.maintenance.verify import find_problems

CONFIGS = ({"run": {"epochs": 1}}, {"run": {"epochs": 2}}, {"run": {"epochs": 3}})


def entry(epoch: int, letter: str, stage: str = "rollout") -> LineageEntry:
    return LineageEntry(epoch=epoch, stage=stage, slot="", artifact=f"embeddings/{letter * 8}")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(ArtifactStore(str(tmp_path / "s")), "r")
    made.create({"config": CONFIGS[0], "prompts": "p"})
    for config in CONFIGS[:2]:
        made.add("configs", config)
    for each in (entry(1, "a"), entry(1, "b"), entry(2, "c"), entry(2, "d", "score")):
        made.append(each)
    return made


def records(run: RunFolder) -> list[Path]:
    return sorted((Path(run.store.root.uri) / "runs" / run.name).rglob("*.json"))


def fresh(run: RunFolder) -> RunFolder:
    return RunFolder(ArtifactStore(run.store.root.uri), run.name)


def state(run: RunFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in records(run)}


def problems(run: RunFolder) -> list[str]:
    return [loss.path for loss in damaged_records(fresh(run).store)]


def repair(run: RunFolder) -> None:
    store = fresh(run).store
    for loss in find_problems(store, deep=True):
        if loss.ref is None:
            quarantine(store, loss)


@pytest.mark.slow
def test_every_lost_record_is_seen_and_put_back(run: RunFolder) -> None:
    whole = state(run)
    assert len(whole) == 2 * (1 + 2 + 4)
    for path, data in whole.items():
        path.unlink()
        assert problems(run) == [str(path.relative_to(run.store.root.uri))]
        repair(run)
        assert path.read_bytes() == data
        assert problems(run) == []
    assert state(run) == whole


def test_copies_of_records_without_are_not_looked_for(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions wrote none, and on S3 each look is a request."""
    shutil.rmtree(Path(run.store.root.uri) / layout.copies(run.name))
    for path in records(run):
        content = unseal(path.read_bytes(), str(path.relative_to(run.store.root.uri)))
        path.write_bytes(seal({name: value for name, value in content.items() if name != "at"}))
    store, asked = fresh(run).store, list[str]()
    read_many = store.root.read_many
    monkeypatch.setattr(store.root, "read_many", lambda paths: asked.extend(paths) or read_many(paths))
    assert list(damaged_records(store)) == []
    assert not [path for path in asked if layout.COPIES in path]


def test_every_swap_and_doubling_is_seen_and_put_back(run: RunFolder) -> None:
    whole = state(run)
    for one, other in itertools.permutations(whole, 2):
        if whole[one] == whole[other]:
            continue
        one.write_bytes(whole[other])
        assert problems(run), f"{other} over {one}"
        if one < other:
            other.write_bytes(whole[one])
            assert problems(run), f"{one} and {other} swapped"
        repair(run)
        if one.parent.parent.name != other.parent.parent.name or one.name != other.name:
            assert problems(run) == [], (one, other)
            assert state(run) == whole
        shutil.rmtree(Path(run.store.root.uri) / "quarantine", ignore_errors=True)
        for path, data in whole.items():
            path.write_bytes(data)


@pytest.mark.parametrize("data", [b"", b"junk", b"[]", b"{}", b'{"at": 1}', seal({"run": {}, "model": {}}), b"early"])
def test_the_damaged_one_of_a_record_and_its_copy_is_named_and_put_back(run: RunFolder, data: bytes) -> None:
    """A config of an early version, without a checksum, is readable, but not in the place of one that has a copy."""
    for path, whole in state(run).items():
        path.write_bytes(b'{"run": {}, "model": {}}' if data == b"early" else data)
        assert problems(run) == [str(path.relative_to(run.store.root.uri))]
        repair(run)
        assert path.read_bytes() == whole
        assert problems(run) == []


@pytest.mark.parametrize("kept", [False, True], ids=["both", "copy"])
def test_a_record_damaged_with_its_copy_is_set_aside_with_it_and_can_be_written_again(
    run: RunFolder, kept: bool
) -> None:
    """``kept``: only the damaged copy is left."""
    run.add("states", {"state": "running"})
    run.add("states", {"state": "done"})
    top = Path(run.store.root.uri) / "runs" / "r"
    for path in [each for each in records(run) if "copies" not in each.parts]:
        name, before = str(path.relative_to(top)), state(run)
        (top / "copies" / name).write_bytes(b"junk")
        path.unlink() if kept else path.write_bytes(b"junk")
        assert problems(run) == [f"runs/r/{name}"]
        repair(run)
        assert not path.exists()
        assert not (top / "copies" / name).exists()
        # A later state replaces an earlier one; all other records are missed until they are written again.
        lost = [] if name == "states/0001.json" else [f"runs/r/{name}"]
        assert problems(run) == lost
        older = ("configs/0001.json", "lineage/00001.rollout.-.001.json")
        assert lost_newest(run.store.root, "r") == ([] if name in older else lost)
        value = unseal(before[path], name)
        value.pop("at")
        assert write(run.store.root, f"runs/r/{name}", value)
        assert problems(run) == lost_newest(run.store.root, "r") == []
        assert state(run) == before


def test_a_record_in_the_place_of_a_new_one_is_seen(run: RunFolder) -> None:
    lineage = Path(run.store.root.uri) / "runs" / "r" / "lineage"
    (lineage / "00001.rollout.-.003.json").write_bytes((lineage / "00001.rollout.-.002.json").read_bytes())
    assert "runs/r/lineage/00001.rollout.-.003.json" in problems(run)
    with pytest.raises(CorruptError, match="copied from elsewhere"):
        fresh(run).entries()


@pytest.mark.parametrize("with_copy", [True, False])
@pytest.mark.parametrize("lost", ["configs/0001", "configs/0002", "lineage/00001.rollout.-.001"])
def test_a_run_goes_on_without_a_record(run: RunFolder, lost: str, with_copy: bool) -> None:
    top = Path(run.store.root.uri) / "runs" / "r"
    (top / f"{lost}.json").unlink()
    if not with_copy:
        (top / "copies" / f"{lost}.json").unlink()
    again = fresh(run)
    again.add("configs", CONFIGS[2])
    again.append(entry(1, "e"))
    assert fresh(run).config() == CONFIGS[2]
    assert fresh(run).entries_of(1, "rollout")[-1] == entry(1, "e")


def test_no_record_can_be_added_is_said(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.store.root, "create", lambda path, data: False)
    with pytest.raises(StoreError, match="no record can be added"):
        run.add("configs", CONFIGS[2])
    with pytest.raises(StoreError, match="no record can be added"):
        run.append(entry(1, "f"))


def without_copies(run: RunFolder) -> Iterator[Path]:
    """Make the records those of earlier versions."""
    top = Path(run.store.root.uri) / "runs" / "r"
    shutil.rmtree(top / "copies")
    for path in records(run):
        value = unseal(path.read_bytes(), str(path))
        value.pop("at")
        path.write_bytes(seal(value))
        yield path


def test_records_of_earlier_versions_are_read_and_their_losses_seen(run: RunFolder) -> None:
    expected = run.entries()
    old = {path.relative_to(run.store.root.uri).as_posix() for path in without_copies(run)}
    assert fresh(run).entries() == expected
    assert problems(run) == []
    for lost in ("run.json", "configs/0001.json", "lineage/00001.rollout.-.001.json"):
        assert f"runs/r/{lost}" in old
        path = Path(run.store.root.uri) / "runs" / "r" / lost
        data = path.read_bytes()
        path.unlink()
        assert problems(run) == [f"runs/r/{lost}"]
        path.write_bytes(data)
    one, other = (
        Path(run.store.root.uri) / "runs/r/lineage" / f"{name}.001.json"
        for name in ("00001.rollout.-", "00002.rollout.-")
    )
    one.write_bytes(other.read_bytes())
    assert problems(run) == [layout.lineage_entry("r", 1, "rollout", "", 1)]


def test_nothing_is_removed_while_a_record_is_damaged_and_no_run_disappears(run: RunFolder) -> None:
    store = fresh(run).store
    list(without_copies(run))
    for name in ("run.json", "lineage/00002.score.-.001.json"):
        path = Path(store.root.uri) / "runs" / "r" / name
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="Nothing is removed"):
            plan_removals(fresh(run).store, Retention(older_than_s=0))
        repair(run)
        assert list_runs(fresh(run).store) == ["r"], "repair makes no run disappear"
        assert fresh(run).config() == CONFIGS[1]
        with pytest.raises(StoreError, match="Nothing is removed"):
            plan_removals(fresh(run).store, Retention(older_than_s=0))
    assert [removal.label for removal in plan_removals(fresh(run).store, Retention(forget=["r"]))] == ["runs/r"]


@pytest.mark.parametrize("series", ["lineage", "tracking"])
def test_a_record_whose_writer_was_stopped_before_its_copy_counted_is_written_to_the_end(
    run: RunFolder, series: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two writes, another writer goes on: nothing is lost, and nothing is to be repaired."""
    root, create = run.store.root, run.store.root.create
    monkeypatch.setattr(root, "create", lambda path, data: create(path, data) if layout.COPIES in path else stop())

    def stop() -> bool:
        raise KeyboardInterrupt

    def write(letter: str) -> None:
        if series == "lineage":
            run.append(entry(3, letter))
        else:
            run.add(series, {"run": letter})

    with pytest.raises(KeyboardInterrupt):
        write("e")
    monkeypatch.undo()
    assert len(list(find_problems(run.store, deep=False))) == 1
    run.refresh()
    write("f")
    assert list(find_problems(run.store, deep=False)) == []
    run.refresh()
    newest = run.entries_of(3, "rollout")[-1].artifact if series == "lineage" else run.newest(series)
    assert newest == (entry(3, "f").artifact if series == "lineage" else {"run": "f"})


def test_lost_preferences_and_rated_samples_are_seen_though_no_lineage_names_them(run: RunFolder) -> None:
    run.add("preferences", {"artifact": "preferences/aaaaaaaa"})
    run.add("ratings", {f"{side}_artifact": f"trajectories/{side}" for side in ("first", "second")})
    messages = [problem.message for problem in find_problems(fresh(run).store, deep=False)]
    assert [message.partition(" names it.")[0] for message in messages] == [
        "preferences/aaaaaaaa/manifest.json is missing; runs/r/preferences/0001.json",
        "trajectories/first/manifest.json is missing; runs/r/ratings/0001.json",
        "trajectories/second/manifest.json is missing; runs/r/ratings/0001.json",
    ]
    assert "'flowmill rate RUN' makes it of the answers of a run" in messages[0]


def test_records_that_are_written_meanwhile_are_not_lost(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    store, files = fresh(run).store, run.store.root.files

    def write_after(path: str) -> Mapping[str, int]:
        listed = files(path)
        if path.endswith("copies"):
            run.append(entry(len(run.entries()), "e"))
        return listed

    monkeypatch.setattr(store.root, "files", write_after)
    for _ in range(2):
        assert damaged_records(store) == []
    assert len(run.entries()) == 6


@pytest.mark.parametrize("series", ["lineage", "configs", "preferences", "ratings"])
def test_a_run_that_was_continued_in_two_stores_is_not_copied(run: RunFolder, tmp_path: Path, series: str) -> None:
    target = ArtifactStore(str(tmp_path / "target"))
    copy_run(run.store, target, run.name, progress=lambda *about: None)
    other = RunFolder(target, run.name)
    if series == "lineage":
        other.append(entry(9, "a"))
        run.append(entry(9, "b"))
    else:
        other.add(series, {"artifact": "preferences/aaaaaaaa"})
        run.add(series, {"artifact": "preferences/bbbbbbbb"})
    before = state(other)
    with pytest.raises(RunConflictError, match=f"runs/r/{series}/.*json' in .* was continued in both"):
        copy_run(run.store, target, run.name, progress=lambda *about: None)
    assert state(other) == before


def test_unfinished_files_go_when_their_process_is_gone_or_of_another_machine_and_old(run: RunFolder) -> None:
    staging = Path(run.store.root.uri) / ".staging"
    host, machine, pid, start, number = tag().split("~")
    own, young = ("~".join((each, machine, pid, start, name)) for each, name in ((host, number), ("other", "f" * 32)))
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name, hours in {
        own: 23,
        "~".join((host, machine, str(ended.pid), "1", "e" * 32)): 2,
        "~".join(("other", machine, pid, start, "0" * 32)): 25,
        young: 23,
        "thesis": 500,
    }.items():
        (staging / name / "part").mkdir(parents=True)
        (staging / name / "part" / "file").write_bytes(b"12345")
        for path in (staging / name / "part" / "file", staging / name / "part", staging / name):
            os.utime(path, (time.time() - hours * 3600,) * 2)
    removals = [each for each in plan_removals(run.store, Retention()) if each.label.startswith(".staging/")]
    said = {each.label[-1]: (each.size, each.reason.rpartition(", ")[2]) for each in removals}
    assert said == {"e": (5, "unchanged for 2 h 0 min"), "0": (5, "unchanged for 25 h 0 min")}
    for each in removals:
        remove(run.store, each)
    assert sorted(path.name for path in staging.iterdir()) == sorted([own, young, "thesis"])
