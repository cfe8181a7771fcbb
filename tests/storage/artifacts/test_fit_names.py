"""Fits whose record or artifact is damaged or lost are found; one that is being made is no problem."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowmill.configs.errors import CorruptError
from flowmill.storage import layout
from flowmill.storage.artifacts.checksummed_json import seal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.fit_names import add_fit, fits_of
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.quarantine import quarantine
from flowmill.storage.maintenance.verify import find_problems, verify_store

REFS = [ArtifactRef("reward_models", digit * 32) for digit in "123"]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """Three finished fits of one name."""
    made = ArtifactStore(str(tmp_path / "store"))
    for ref in REFS:
        add_fit(made, "taste", ref)
        finish(made, ref)
    return made


def finish(store: ArtifactStore, ref: ArtifactRef) -> None:
    def write(folder: Path) -> tuple[int, dict[str, int]]:
        (folder / "head").write_text(ref.id)
        return 1, {}

    store.make(ref, "model", write, stage="reward_fit", stage_version=1, options={}, inputs=())
    store.root.remove(layout.claim(ref))


def problems(store: ArtifactStore) -> list[str]:
    return [str(problem) for problem in verify_store(ArtifactStore(store.root.uri), deep=True)["problems"]]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_lost_artifact_of_a_fit_is_a_problem_until_it_is_made_again(store: ArtifactStore, number: int) -> None:
    assert problems(store) == []
    ref = REFS[number - 1]
    for lost in (ref.path, layout.manifest(ref)):
        store.root.remove(lost)
        (found,) = problems(store)
        assert found.startswith(f"{ref}/manifest.json is missing; fits/taste/000{number}.json names it.")
        assert "'flowmill reward fit' with the config of the fit makes it" in found
        for problem in find_problems(store, deep=True):
            assert quarantine(store, problem) == []
        finish(store, ref)
        assert problems(store) == []
    shutil.rmtree(Path(store.root.uri) / "reward_models")
    assert len(problems(store)) == 3


def test_a_fit_that_is_being_made_is_no_problem(store: ArtifactStore) -> None:
    ref = ArtifactRef("reward_models", "4" * 32)
    assert add_fit(store, "taste", ref) == 4
    assert problems(store) == []
    finish(store, ref)
    assert problems(store) == []


def test_a_lost_copy_of_a_record_is_written_again(store: ArtifactStore) -> None:
    copy = layout.copy_of(layout.fit("taste", 2))
    store.root.remove(copy)
    assert problems(store) == [f"{copy} is lost; the record is there. 'flowmill store repair' copies it again."]
    (problem,) = find_problems(store, deep=True)
    quarantine(store, problem)
    assert problems(store) == []


@pytest.mark.parametrize("data", ["", "junk", "{}", '{"artifact": "reward_models/1"}'])
def test_a_damaged_record_of_a_fit_is_put_back_from_its_copy_or_set_aside(store: ArtifactStore, data: str) -> None:
    path = layout.fit("taste", 2)
    (Path(store.root.uri) / path).write_text(data)
    with pytest.raises(CorruptError, match=f"{path} names no fit"):
        fits_of(store, "taste")
    (problem,) = find_problems(store, deep=True)
    assert problem.message.startswith(path)
    assert quarantine(store, problem) == [path]
    assert problems(store) == []
    assert fits_of(store, "taste") == dict(enumerate(REFS, 1))
    # Earlier versions wrote no copies, and records without their path.
    shutil.rmtree(Path(store.root.uri) / "fits" / "taste" / "copies")
    for number, ref in enumerate(REFS, 1):
        (Path(store.root.uri) / layout.fit("taste", number)).write_bytes(seal({"artifact": str(ref)}))
    assert problems(store) == []
    (Path(store.root.uri) / path).write_text(data)
    said = f"{path} names no fit: the file was damaged. 'flowmill store repair' puts its copy back, or sets it aside; "
    assert [found.startswith(said) for found in problems(store)] == [True]
    (problem,) = find_problems(store, deep=True)
    assert quarantine(store, problem) == [path]
    assert problems(store) == []
    assert fits_of(store, "taste") == {1: REFS[0], 3: REFS[2]}


def test_a_lost_record_of_a_fit_is_seen_and_put_back(store: ArtifactStore) -> None:
    for number in (1, 2, 3):
        path = layout.fit("taste", number)
        store.root.remove(path)
        assert problems(store) == [f"{path} is lost; its copy is there. 'flowmill store repair' puts it back."]
        for problem in find_problems(store, deep=True):
            quarantine(store, problem)
        assert problems(store) == []
    assert fits_of(store, "taste") == dict(enumerate(REFS, 1))
