"""Every bit of what a store says about itself is checked."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from flowmill.configs.errors import CorruptError, FlowmillError
from flowmill.storage.artifacts.checksummed_json import seal, unseal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.quarantine import quarantine
from flowmill.storage.maintenance.verify import find_problems, verify_store
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from tests.conftest import ConfigFactory
from tests.support.inside import evaluate, prepare, run_epoch, run_stage

pytestmark = pytest.mark.slow

DATA = {"name": "small", "loss": -0.125, "numbers": [1, 2.5, None], "more": {"é": True, "rate": 1e-05}}


def test_what_is_sealed_comes_back_and_is_the_same_bytes() -> None:
    assert unseal(seal(DATA), "here") == DATA
    assert seal(dict(reversed(DATA.items()))) == seal(DATA)
    assert unseal(b'{"old": 1}', "here", ["old"]) == {"old": 1}, "written before there were checksums"
    for data, before in ((b"{}", ()), (b'{"old": 1}', ()), (b'{"old": 1}', ("old", "more")), (b"{}", ("old",))):
        with pytest.raises(CorruptError, match=r"here lacks the checksum that it was written with.*store repair"):
            unseal(data, "here", before)
    assert seal({"loss": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal({"loss": float("nan")}, finite=True)


def test_any_flipped_bit_is_seen_or_changes_nothing() -> None:
    sealed = seal(DATA)
    seen = 0
    for place in range(len(sealed) * 8):
        flipped = bytearray(sealed)
        flipped[place // 8] ^= 1 << place % 8
        try:
            assert unseal(bytes(flipped), "here") == DATA
        except CorruptError:
            seen += 1
    assert seen > len(sealed) * 8 * 0.98


@pytest.mark.campaign
def test_flips_in_records_of_runs_and_artifacts_are_found_and_repaired(
    make_config: ConfigFactory, tmp_path: Path
) -> None:
    config = make_config("run.epochs=1")
    context = prepare(config)
    run_epoch(context, 1)
    evaluate(context, 1)
    context.run.add("tracking", {"mlflow_run_id": "1"})
    folder = Path(context.store.root.uri)
    files = [file.relative_to(folder) for file in sorted(folder.rglob("*.json")) if ".staging" not in file.parts]
    # Of what is complete, a claim means nothing any more.
    files = [file for file in files if file.name != "_claim.json"]
    assert {file.parts[0] for file in files} >= {"runs", "rewards", "policies", "evaluations"}
    rng = random.Random(0)
    for file in files:
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        damaged = bytearray((copy / file).read_bytes())
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        (copy / file).write_bytes(damaged)
        store = ArtifactStore(str(copy))
        found = find_problems(store, deep=True)
        same = json.loads((folder / file).read_bytes()) if not found else None
        assert found or same == json.loads(damaged), f"{file}: a flip was not seen"
        for problem in found:
            quarantine(store, problem)
        left = verify_store(ArtifactStore(str(copy)), deep=True)["problems"]
        # What was set aside is due.
        assert all(problem.endswith("names it.") for problem in left), (file, left)
        assert not left or file.parts[0] != "runs"
        shutil.rmtree(copy)


@pytest.mark.parametrize("record", ["run.json", "lineage", "configs"])
def test_a_damaged_record_of_a_run_is_named_and_written_anew(
    trained: RunContext, make_config: ConfigFactory, record: str
) -> None:
    digest, top = trained.chain.digest(), Path(trained.store.root.uri) / "runs" / "small"
    damaged = top / record if record == "run.json" else sorted((top / record).glob("*.json"))[-1]
    damaged.write_bytes(damaged.read_bytes().replace(b"1", b"3", 1))
    with pytest.raises(FlowmillError, match=r"does not match its own checksum.*flowmill store repair"):
        open_run(trained.store.root.uri, "small", reads=True).chain.digest()
    store = ArtifactStore(trained.store.root.uri)
    problems = find_problems(store, deep=True)
    assert [problem.path for problem in problems] == [str(damaged.relative_to(store.root.uri))]
    assert [path for problem in problems for path in quarantine(store, problem)] == [problems[0].path]
    again = begin_run(make_config())
    for name in ("base", "encode", "preprocess", "policy"):
        run_stage(again, name, 0)
    for epoch in (1, 2):
        run_epoch(again, epoch)
    assert again.chain.digest() == digest
