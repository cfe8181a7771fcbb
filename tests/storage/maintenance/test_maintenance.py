"""repair, gc, export, cp and following a sample, on a small real run."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flowmill.configs.errors import (
    CommitLostError,
    ConfigError,
    CorruptError,
    NotCommittedError,
    RunConflictError,
    StoreError,
    TrustError,
)
from flowmill.flows.cli.store import gc, repair
from flowmill.storage import layout
from flowmill.storage.artifacts.checkpoints import commit_checkpoint, latest_checkpoint
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder, list_runs
from flowmill.storage.artifacts.records import removal_note
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.garbage_collection import Removal, Retention, plan_removals, remove
from flowmill.storage.maintenance.quarantine import leave_trace, quarantine
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.storage.maintenance.verify import find_problems, verify_store
from flowmill.storage.trajectories.tables import TABLES
from flowmill.tasks.inputs.store_trust import remember
from flowmill.tasks.reports.dataset import FORMATS, export_run
from flowmill.tasks.reports.trace import trace_sample
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runs.repairs import makers
from flowmill.tasks.runs.staleness import is_complete
from flowmill.tasks.specs.stages import STAGES
from flowmill.tasks.stages.stage_run import StageRun
from pages import schema_page
from tests.conftest import ROOT, ConfigFactory, FlowmillCommand
from tests.support.inside import make_stage, prepare, run_epoch, run_stage, stage_run


@pytest.fixture
def context(trained: RunContext) -> RunContext:
    return trained


def folder_of(context: RunContext, stage: str, epoch: int, slot: str = "") -> tuple[ArtifactRef, Path]:
    ref = context.chain.require(epoch, stage, slot).ref
    return ref, Path(context.store.root.uri) / ref.path


def damage_by_flipping(folder: Path) -> None:
    (path, *_) = sorted(folder.glob("*/*.tar"))
    data = bytearray(path.read_bytes())
    data[5000] ^= 255
    path.write_bytes(data)


def damage_by_truncating(folder: Path) -> None:
    (path, *_) = sorted(folder.glob("*/*.tar"))
    path.write_bytes(path.read_bytes()[:-1000])


def damage_by_removing_a_file(folder: Path) -> None:
    sorted(folder.glob("*/*.tar"))[0].unlink()


def damage_by_removing_a_record(folder: Path) -> None:
    sorted(folder.glob("_shards/*.json"))[0].unlink()


def damage_the_record(folder: Path) -> None:
    sorted(folder.glob("_shards/*.json"))[0].write_text("{")


def damage_by_another_record(folder: Path) -> None:
    first, second = sorted(folder.glob("_shards/*.json"))
    first.write_text(second.read_text())


def damage_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def damage_by_another_manifest(folder: Path) -> None:
    (other, *_) = [path for path in folder.parent.glob("*/manifest.json") if path.parent != folder]
    shutil.copy(other, folder / "manifest.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_by_flipping, "has checksum"),
        (damage_by_truncating, "bytes, its commit record says"),
        (damage_by_removing_a_file, "is missing; its commit record names it"),
        (damage_by_removing_a_record, "is missing or damaged; the manifest names it"),
        (damage_the_record, "is not JSON"),
        (damage_by_another_record, "is the record of"),
        (damage_the_manifest, "is not a manifest|is not JSON"),
        (damage_by_another_manifest, "is the record of trajectories/"),
    ],
)
def test_damage_is_found_set_aside_and_made_anew(
    context: RunContext, damage: Callable[[Path], None], message: str
) -> None:
    expected = context.chain.digest()
    ref, folder = folder_of(context, "rollout", 1)
    damage(folder)
    fresh = open_run(context.store.root.uri, "small")
    problems = find_problems(fresh.store, deep=True)
    assert {problem.ref for problem in problems} == {ref}
    assert any(word in problem.message for problem in problems for word in message.split("|")), [
        problem.message for problem in problems
    ]
    with pytest.raises((CorruptError, NotCommittedError)):
        # Never trained on.
        StageRun(make_stage(fresh, "optimize", 1), force=True).execute()
    for problem in problems:
        quarantine(fresh.store, problem)
    (due,) = verify_store(fresh.store, deep=True)["problems"]
    assert due.endswith("manifest.json is missing; the lineage of run 'small' names it.")
    again = open_run(context.store.root.uri, "small")
    StageRun(make_stage(again, "rollout", 1)).execute()
    assert again.chain.digest() == expected
    assert verify_store(again.store, deep=True)["problems"] == []


def test_a_repair_looks_at_trust_before_it_moves_a_file(
    context: RunContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = Path(context.store.root.uri)
    _, folder = folder_of(context, "rollout", 2)
    damage_by_removing_a_file(folder)

    def files() -> list[Path]:
        return sorted(path for path in root.rglob("*") if path.name != ".lock")

    before = files()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(TrustError, match="with --trust-store"):
        repair(root=str(root), quick=False, only_quarantine=False, trust_store=False)
    assert files() == before
    repair(root=str(root), quick=False, only_quarantine=True, trust_store=False)
    assert files() != before


def test_orphans_are_named_and_set_aside(context: RunContext) -> None:
    _, folder = folder_of(context, "rollout", 1)
    (folder / "000000-000009-0123456789ab").mkdir()
    (folder / "000000-000009-0123456789ab" / "samples.tar").write_bytes(b"left by an unknown writer")
    (problem,) = find_problems(context.store, deep=False)
    assert (problem.kind, problem.shard) == ("orphaned", None)
    quarantine(context.store, problem)
    assert find_problems(context.store, deep=True) == []
    assert list(Path(context.store.root.uri, "quarantine").rglob("samples.tar"))


def test_a_stray_file_or_copy_leaves_the_shard_it_lies_with(context: RunContext) -> None:
    _, folder = folder_of(context, "rollout", 1)
    (shard, *_) = folder.glob("000000-*")
    (shard / ".DS_Store").touch()
    copy = Path(shutil.copytree(shard, f"{shard} copy"))
    problems = find_problems(context.store, deep=True)
    assert {problem.path for problem in problems} == {
        str(path.relative_to(context.store.root.uri)) for path in (shard / ".DS_Store", copy)
    }
    assert not any(problem.lacks for problem in problems)
    for problem in problems:
        assert quarantine(context.store, problem) == [problem.path]
    assert find_problems(context.store, deep=True) == []


def test_files_of_past_epochs_go_and_leave_their_trace(context: RunContext) -> None:
    store, expected = context.store, context.chain.digest()
    ref, folder = folder_of(context, "rollout", 1)
    (removal,) = plan_removals(store, Retention(keep_epochs=1))
    assert (removal.label, removal.trace) == (str(ref), True)
    assert removal.size > 0
    assert list(folder.glob("*/*.tar"))
    # Killed right after its first step, the removal is found again.
    store.root.create(layout.removed(ref), removal_note(ref, removal.reason))
    assert plan_removals(store, Retention(keep_epochs=1)) == [removal]
    remove(store, removal)
    assert not list(folder.glob("*/*.tar"))
    fresh = open_run(store.root.uri, "small")
    assert plan_removals(fresh.store, Retention(keep_epochs=1)) == []
    assert fresh.chain.digest() == expected
    assert verify_store(fresh.store, deep=True)["problems"] == []
    with pytest.raises(NotCommittedError, match="removed by 'flowmill store gc'"):
        fresh.store.folder(ref, fresh.store.records(ref)[0])
    check_notes_of_removals(context, ref)


def test_what_was_removed_is_made_anew_where_something_damaged_needs_it(context: RunContext) -> None:
    store, expected = context.store, context.chain.digest()
    for removal in plan_removals(store, Retention(keep_epochs=1, stages=["rollout", "score"])):
        remove(store, removal)
    policy, folder = folder_of(context, "optimize", 1)
    next(folder.glob("*/policy.safetensors")).unlink()
    for problem in find_problems(store, deep=False):
        quarantine(store, problem)
    again = open_run(store.root.uri, "small")
    with pytest.raises(NotCommittedError, match="'flowmill store repair' regenerates both"):
        StageRun(make_stage(again, "optimize", 1)).execute()
    due = makers(store, {policy: "small"})
    assert due == [("small", stage, 1) for stage in ("rollout", "optimize")], "training reads advantages, not scores"
    for _, stage, epoch in due:
        StageRun(make_stage(again, stage, epoch)).execute()
    assert again.chain.digest() == expected
    assert verify_store(store, deep=True)["problems"] == []
    # By hand it is the same artifact again, not another attempt, whose files nobody would look for.
    scores, _ = folder_of(context, "score", 1, "jpeg_compressibility")
    assert store.removed(scores)
    forced = StageRun(make_stage(open_run(store.root.uri, "small"), "score", 1, "jpeg_compressibility"), force=True)
    forced.execute()
    assert (forced.ref, store.removed(scores)) == (scores, False)
    assert verify_store(store, deep=True)["problems"] == []


def check_notes_of_removals(context: RunContext, removed: ArtifactRef) -> None:
    """A note that is lost, flipped or copied elsewhere is seen, and put right."""
    store, (other, _) = context.store, folder_of(context, "rollout", 2)
    note, elsewhere = (Path(store.root.uri) / layout.removed(ref) for ref in (removed, other))
    whole = note.read_bytes()
    elsewhere.write_bytes(whole)
    assert not store.removed(other), "what is not its own says nothing"
    (problem,) = find_problems(store, deep=True)
    assert f"is the record of {removed}" in problem.message
    quarantine(store, problem)
    assert not elsewhere.exists()
    note.write_bytes(whole[:-20])
    (problem,) = find_problems(store, deep=True)
    assert "is not JSON as it was committed" in problem.message
    assert not problem.lacks
    quarantine(store, problem)
    assert find_problems(store, deep=True) == []
    note.unlink()
    assert {problem.kind for problem in find_problems(store, deep=False)} == {"missing"}
    # As version 0.1.0 wrote it.
    note.write_text(json.dumps({"removed": 1.0, "reason": "r"}))
    assert find_problems(store, deep=True) == []


def two_shards(tmp_path: Path) -> tuple[ArtifactStore, ArtifactRef]:
    store, ref = ArtifactStore(str(tmp_path / "s")), ArtifactRef("rewards", "0" * 32)
    for shard in "01":
        with store.root.staging() as folder:
            (folder / "x").write_text(shard)
            store.commit(ref, shard, folder, rows=1, producer={"started": 0.0})
    store.seal(ref, shards=["0", "1"], summary={}, stage="score", stage_version=1, options={}, inputs=())
    return store, ref


def test_what_nothing_makes_anew_leaves_its_trace(tmp_path: Path) -> None:
    store, ref = two_shards(tmp_path)
    before = store.require(ref)
    for _ in range(2):
        # Again, as what is left of it may be damaged later.
        for path in Path(store.root.uri).glob("rewards/*/0-*/x"):
            path.write_text("y")
        for problem in find_problems(store, deep=True):
            quarantine(store, problem)
        assert store.manifest(ref) is None or store.removed(ref)
        assert leave_trace(store, ref, "nobody makes it")
        assert (store.require(ref), store.removed(ref)) == (before, True)
        assert find_problems(store, deep=True) == []
    with pytest.raises(NotCommittedError, match="'flowmill store gc' or 'repair'"):
        ArtifactStore(store.root.uri).files(ref, store.shards(ref)[1])


def test_what_is_lost_with_its_records_leaves_none(tmp_path: Path) -> None:
    store, ref = two_shards(tmp_path)
    (Path(store.root.uri) / layout.record(ref, "0")).write_text("{")
    for problem in find_problems(store, deep=True):
        quarantine(store, problem)
    assert not leave_trace(store, ref, "nobody makes it")
    assert not store.removed(ref)


def test_a_removal_that_was_killed_is_found_again(tmp_path: Path) -> None:
    store, ref = two_shards(tmp_path)
    (removal,) = plan_removals(store, Retention())

    class KilledError(Exception):
        pass

    done, carried_out = 0, store.root.remove

    def remove_some(path: str) -> None:
        nonlocal done
        if done == 0:
            raise KilledError
        done -= 1
        carried_out(path)

    for steps in range(5):
        done = steps
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(store.root, "remove", remove_some)
            with contextlib.suppress(KilledError):
                remove(store, removal)
        if not store.root.list(ref.path):
            return
        assert [each.label for each in plan_removals(store, Retention())] == [str(ref)], steps
    pytest.fail("it never ends")


def test_files_of_others_next_to_artifacts_stay(tmp_path: Path) -> None:
    store, ref = two_shards(tmp_path)
    root = Path(store.root.uri)
    images = root / "prompts" / "images"
    images.mkdir(parents=True)
    others = [root / "rewards" / ".DS_Store", images / "a-1.png", root / "prompts" / "list.txt"]
    for path in others:
        path.touch()
    # Of a process that was killed before its first record.
    (root / "policies" / "abc" / f"policy-{'0' * 12}").mkdir(parents=True)
    removals = plan_removals(store, Retention(older_than_s=0))
    assert {removal.label for removal in removals} == {str(ref), "policies/abc"}
    for removal in removals:
        remove(store, removal)
    assert all(path.exists() for path in others)
    assert verify_store(store, deep=True)["problems"] == []


@pytest.mark.parametrize("shards_left", [1, 0, None])
def test_files_are_removed_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards_left: int | None
) -> None:
    """A note has room when only so many shards are left, or never."""
    store, ref = two_shards(tmp_path)
    removal, create = Removal(label=str(ref), size=2, reason="r", trace=True), store.root.create

    def folders() -> int:
        return len(list((tmp_path / "s" / ref.path).glob("[01]-*")))

    def full(path: str, data: bytes) -> bool:
        if shards_left is None or folders() > shards_left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, data)

    monkeypatch.setattr(store.root, "create", full)
    if shards_left is None:
        with pytest.raises(StoreError, match=r"/s': No space left on device\. Committed data stays"):
            remove(store, removal)
    else:
        remove(store, removal)
        assert find_problems(store, deep=True) == []
    assert (folders(), store.removed(ref)) == (0, shards_left is not None)


def test_a_lock_is_taken_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = ArtifactStore(str(tmp_path)).root

    def full(*about: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flowmill.storage.backends.local.os.write", full)
    with root.lock("runs/r/.lock", "Run 'r'"):
        assert root.locked("runs/r/.lock")


@pytest.mark.parametrize("deep", [True, False])
def test_a_damaged_checkpoint_is_seen_and_set_aside(tmp_path: Path, deep: bool) -> None:
    store, ref = ArtifactStore(str(tmp_path / "s")), ArtifactRef("policies", "0" * 32)
    for update in (1, 2):
        with store.root.staging() as folder:
            (folder / "policy.safetensors").write_text(f"weights {update}")
            commit_checkpoint(store, ref, update, folder)
    assert find_problems(store, deep=deep) == []
    (newest,) = Path(store.root.uri).glob("policies/*/_checkpoints/000002-*/policy.safetensors")
    newest.write_text("weights 0" if deep else "weights")
    with pytest.raises(CorruptError, match="'flowmill store repair' sets it aside"):
        latest_checkpoint(store, ref)
    (problem,) = find_problems(store, deep=deep)
    assert not problem.lacks
    assert len(quarantine(store, problem)) == 2
    assert find_problems(store, deep=deep) == []
    assert latest_checkpoint(store, ref) is not None
    assert latest_checkpoint(store, ref)[0] == 1


def test_what_replay_still_reads_stays(make_config: ConfigFactory) -> None:
    context = prepare(make_config("run.name=replays", "run.epochs=4", "optimize.replay={epochs: 2}"))
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
    store = context.store
    rollouts = {epoch: str(context.chain.require(epoch, "rollout").ref) for epoch in (1, 2, 3)}
    removals = plan_removals(store, Retention(keep_epochs=1))
    assert [removal.label for removal in removals] == [rollouts[1]], "epoch 4 trains on epochs 2 and 3 too"
    remove(store, removals[0])
    run_epoch(open_run(store.root.uri, "replays"), 4)


@pytest.mark.parametrize("forced", [True, False], ids=["stale", "not evaluated"])
def test_files_that_an_unfinished_run_reads_stay(make_config: ConfigFactory, forced: bool) -> None:
    """A stage that was made again makes epochs behind it stale; evaluations read policies of earlier epochs."""
    reward = "tests.support.rewards:Restless"
    config = make_config(f"rewards=[{{name: '{reward}'}}]", "run.epochs=2", "evaluate.every=1")
    context = prepare(config)
    remember(config)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    store, chain = context.store, context.chain
    before = {stage: chain.require(1, stage).ref for stage in ("rollout", "advantage", "optimize")}
    if forced:
        run_stage(context, "score", 1, reward, force=True)
    gc(root=store.root.uri, keep_epochs=1, stage=[*before], older_than=0.0, delete=True)
    needed = {"rollout"} if forced else {"optimize"}
    assert {stage for stage, ref in before.items() if not store.removed(ref)} == needed
    again = begin_run(config)
    for node in again.chain.nodes():
        run_stage(again, node.stage, node.epoch, node.slot)
    assert is_complete(open_run(store.root.uri, "small", reads=True).chain)


@pytest.mark.campaign_cases("optimize")
@pytest.mark.parametrize("stage", ["rollout", "optimize"])
def test_policies_and_rollouts_of_a_run_that_is_ahead_stay(make_config: ConfigFactory, stage: str) -> None:
    context = prepare(make_config("run.name=ahead", "run.epochs=4", "execution.ahead=1"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    StageRun(make_stage(context, "rollout", 3)).execute()
    removals = plan_removals(context.store, Retention(keep_epochs=1, stages=[stage]))
    assert removals == [], "epoch 3 is rolled out with policy 1"
    run_epoch(open_run(context.store.root.uri, "ahead"), 3)


def test_what_another_run_needs_stays(context: RunContext, make_config: ConfigFactory) -> None:
    other = prepare(make_config("run.name=other"))
    run_epoch(other, 1)
    store = context.store
    # 'other' is at epoch 1, so the rollout of epoch 1 is its newest.
    assert plan_removals(store, Retention(keep_epochs=1)) == []
    given_up = {removal.label for removal in plan_removals(store, Retention(forget=["small"], older_than_s=0))}
    named = {entry.artifact for entry in other.run.entries()}
    assert "runs/small" in given_up
    assert not given_up & named
    for removal in plan_removals(store, Retention(forget=["small"], older_than_s=0)):
        remove(store, removal)
    assert RunFolder(store, "small").describe() is None
    assert verify_store(store, deep=True)["problems"] == []
    assert all(store.manifest(entry.ref) for entry in other.chain.entries() if entry.ref.kind != "embeddings")


def test_unnamed_artifacts_stay_while_they_are_young(context: RunContext) -> None:
    ref = ArtifactRef("rewards", "0" * 32)
    with context.store.root.staging() as folder:
        (folder / "x").write_text("x")
        context.store.commit(ref, "0", folder, rows=1, producer={"started": time.time()})
    assert plan_removals(context.store, Retention()) == []
    (removal,) = plan_removals(context.store, Retention(older_than_s=0))
    assert (removal.label, removal.reason) == (str(ref), "no run names it")
    # A policy that is being trained has a checkpoint and no record yet.
    training = ArtifactRef("policies", "0" * 32)
    with context.store.root.staging() as folder:
        (folder / "policy.safetensors").write_text("x")
        commit_checkpoint(context.store, training, 3, folder)
    assert plan_removals(context.store, Retention()) == []


def test_shards_of_an_interrupted_stage_stay_until_its_run_is_forgotten(
    context: RunContext,
    make_config: ConfigFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    context = prepare(make_config("run.epochs=3"))
    store, rollout = context.store, stage_run(context, "rollout", 3)
    rollout.run_shards(rollout.pending()[:1])
    claim = Path(store.root.uri) / layout.claim(rollout.ref)

    def collect(*forget: str) -> list[str]:
        gc(root=store.root.uri, forget=list(forget), older_than=-1.0, delete=True)
        return store.committed(rollout.ref)

    whole = claim.read_bytes()
    assert len(collect()) == 1
    assert plan_removals(store, Retention(older_than_s=-1)) == [], "the claim alone holds it"
    claim.unlink()
    assert len(collect()) == 1, "the run makes it next"
    prepare(make_config("run.name=theirs", "advantage.estimator={name: 'tests.tasks.checks.test_plug_ins:Signs'}"))
    with monkeypatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
        assert len(collect()) == 1, "its code is not trusted, so it may make them next"
        assert "stay: theirs may continue with them, and names code" in " ".join(capsys.readouterr().out.split())
    claim.write_bytes(whole)
    assert collect("small", "theirs") == []


def test_a_copied_run_is_the_same_run(context: RunContext, tmp_path: Path) -> None:
    target = ArtifactStore(str(tmp_path / "copy"))
    seen: list[int] = []
    counts = copy_run(context.store, target, "small", progress=lambda ref, done, total: seen.append(done))
    assert seen == list(range(1, counts["artifacts"] + 1))
    assert open_run(target.root.uri, "small").chain.digest() == context.chain.digest()
    assert verify_store(target, deep=True)["problems"] == []
    again = copy_run(context.store, target, "small", progress=lambda ref, done, total: None)
    assert (again["shards"], again["bytes"]) == (0, 0)
    copied = open_run(target.root.uri, "small")
    assert not StageRun(make_stage(copied, "rollout", 2)).pending()


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_exported_as_one_table(context: RunContext, tmp_path: Path) -> None:
    import datasets
    import deltalake
    import duckdb

    for form in ("parquet", "datasets"):
        rows = export_run(context, tmp_path / form, form, epochs=(), progress=lambda done, total: None)
        assert rows == 32
    query = f"select epoch, count(*), max(abs(advantage)) > 0 from '{tmp_path}/parquet/*.parquet' group by 1 order by 1"
    assert duckdb.sql(query).fetchall() == [(1, 16, True), (2, 16, True)]
    loaded = datasets.load_dataset(str(tmp_path / "datasets"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded[0]["image"].size == (32, 16)
    assert loaded[0]["reward_jpeg_compressibility"] < 0
    export_run(context, tmp_path / "delta", "delta", epochs=[2], progress=lambda done, total: None)
    assert deltalake.DeltaTable(str(tmp_path / "delta")).to_pyarrow_table().num_rows == 16
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export_run(context, tmp_path / "parquet", "parquet", epochs=(), progress=lambda done, total: None)
    for form in FORMATS:

        def stop(done: int, total: int, folder: Path = tmp_path / f"stopped-{form}") -> None:
            assert not folder.exists(), "an epoch is not the table"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            export_run(context, tmp_path / f"stopped-{form}", form, epochs=(), progress=stop)
        assert not (tmp_path / f"stopped-{form}").exists()
    with pytest.raises(StoreError, match="has no rollouts of these epochs; it has 1 to 2"):
        export_run(context, tmp_path / "new", "parquet", epochs=[7], progress=lambda done, total: None)
    with pytest.raises(ConfigError, match="--format 'csv' does not exist"):
        export_run(context, tmp_path / "new", "csv", epochs=(), progress=lambda done, total: None)


def test_the_recipe_of_the_docs_keeps_runs_attempts_and_monitors_apart(
    context: RunContext, make_config: ConfigFactory, tmp_path: Path
) -> None:
    """Its rows for each artifact of rewards equal those of the run's export."""
    import duckdb

    other = prepare(make_config("run.name=other", "run.seed=1", "monitors=[{name: jpeg_incompressibility}]"))
    run_epoch(other, 1)
    StageRun(make_stage(other, "score", 1, "jpeg_compressibility"), force=True).execute()
    page = (ROOT / "docs" / "store.md").read_text()
    (query,) = re.findall(r'duckdb.sql\("""(.*?)"""\)', page, re.DOTALL)
    said = duckdb.sql(query_of(context, query)).fetchall()
    for run, labels in (
        (context, ["jpeg_compressibility"]),
        (other, ["jpeg_compressibility", "jpeg_incompressibility"]),
    ):
        folder = tmp_path / f"table-{run.run.name}"
        export_run(run, folder, "parquet", epochs=[1], progress=lambda done, total: None)
        for label in labels:
            exported = f"select prompt, avg(reward_{label}) from '{folder}/*.parquet' group by 1 order by 1"
            scores = {entry.artifact for entry in run.run.entries_of(1, "score", label)}
            assert len(scores) == (2 if run is other and label == labels[0] else 1)
            for artifact in scores:
                mine = [(*row[3:],) for row in said if row[:3] == (artifact, label, 1)]
                assert mine == duckdb.sql(exported).fetchall()
    counted = query_of(context, query).replace("avg(reward)", "count(reward)")
    right, mixed = (
        sum(row[4] for row in duckdb.sql(counted.replace("artifact, sample_id)", f"{key})")).fetchall())
        for key in ("artifact, sample_id", "sample_id")
    )
    assert right < mixed, "other samples have the same names"


def query_of(context: RunContext, query: str) -> str:
    return query.replace("flowmill-store", context.store.root.uri)


def test_every_column_says_what_it_holds_and_the_page_of_tables_is_what_the_files_say(context: RunContext) -> None:
    page = f"\n{schema_page.render()}"
    files = [path for path in Path(context.store.root.uri).rglob("*.parquet") if "embeddings" not in path.parts]
    of_others = {
        "values",
        "token_advantages",
        "gradients",
        "return_turns",
        "variants",
        "preferences",
        "choices",
        "prompt_states",
    }
    assert {path.name for path in files} == {
        f"{name}.parquet" for name in (*TABLES, "samples") if name not in of_others
    }
    for path in files:
        title, section = next(part.split("\n", 1) for part in page.split("\n## ") if path.name in part.split("\n")[0])
        assert path.relative_to(context.store.root.uri).parts[0] in title
        schema = pq.read_schema(path)
        rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", section, re.MULTILINE)
        assert rows == [(field.name, field.metadata[b"description"].decode()) for field in schema]


def test_a_sample_is_followed_to_its_updates(context: RunContext) -> None:
    ref, _ = folder_of(context, "rollout", 2)
    entered: dict[int, int] = {}
    advantages: dict[str, float] = {}
    for record in context.store.records(ref):
        opened = context.store.files(ref, record).path("samples.parquet")
        for sample in pq.read_table(opened).column("sample_id").to_pylist():
            trace = trace_sample(context.store, ref, sample, [context])["runs"]["small"]
            assert trace["epoch"] == 2
            assert set(trace["rewards"]) == {"jpeg_compressibility"}
            advantages[sample] = trace["advantage"]
            for update in trace["updates"]:
                assert update["policy"] == str(context.chain.require(2, "optimize").ref)
                entered[update["update"]] = entered.get(update["update"], 0) + 1
            assert bool(trace["updates"]) == (trace["advantage"] != 0)
    assert len(advantages) == 16
    # Two updates per epoch; those of the second epoch go on counting.
    assert sorted(entered) == [3, 4]
    with pytest.raises(StoreError, match="has no sample 'missing'"):
        trace_sample(context.store, ref, "missing", [])
    with pytest.raises(StoreError, match="holds no samples"):
        trace_sample(context.store, context.policy_ref(1), "missing", [])


@pytest.mark.slow
def test_the_commands(context: RunContext, flowmill: FlowmillCommand, tmp_path: Path) -> None:
    root, expected = context.store.root.uri, context.chain.digest()
    _, folder = folder_of(context, "rollout", 2)
    damage_by_removing_a_file(folder)
    verified = flowmill("store", "verify", "--root", root)
    assert verified.returncode == 1
    repaired = flowmill("store", "repair", "--root", root)
    assert "set aside below quarantine/" in repaired.stdout
    assert flowmill("store", "verify", "--deep", "--root", root).returncode == 0
    assert flowmill("store", "digest", "small", "--root", root).stdout.strip() == expected


def test_copies_keep_and_restore_files_that_were_removed(context: RunContext, tmp_path: Path) -> None:
    """No order of copies and removals makes either store read less than before the copy."""
    archive, late = (ArtifactStore(str(tmp_path / name)) for name in ("archive", "late"))
    copy = partial(copy_run, run="small", progress=lambda *about: None)

    def files(store: ArtifactStore) -> dict[str, bytes]:
        top = Path(store.root.uri)
        below = (path for ref in context.run.named() for path in (top / ref.path).rglob("*") if path.is_file())
        return {str(path.relative_to(top)): path.read_bytes() for path in below}

    copy(context.store, archive)
    whole = files(archive)
    removals = plan_removals(context.store, Retention(keep_epochs=0, stages=[*STAGES], older_than_s=0))
    refs = [ArtifactRef.parse(each.label) for each in removals if each.trace]
    assert {"trajectories", "rewards", "advantages"} <= {ref.kind for ref in refs}
    for removal in removals:
        remove(context.store, removal)
    for target in (archive, late):
        copy(ArtifactStore(context.store.root.uri), target)
    assert files(archive) == whole
    assert all(late.removed(ref) and not archive.removed(ref) for ref in refs)
    for store in (late, ArtifactStore(context.store.root.uri)):
        assert copy(archive, store)["shards"] >= len(refs)
        assert files(store).items() >= whole.items()
        assert not any(store.removed(ref) for ref in refs)
        assert verify_store(store, deep=True)["problems"] == []
        assert copy(archive, store)["shards"] == 0


def test_a_copy_of_a_run_at_work_is_the_run_as_it_was(make_config: ConfigFactory, tmp_path: Path) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    before = {entry.artifact for entry in context.run.entries()}
    target = ArtifactStore(str(tmp_path / "copy"))

    def go_on(artifact: str, done: int, total: int) -> None:
        if done == 1:
            run_epoch(context, 2)

    copy_run(ArtifactStore(context.store.root.uri), target, "small", progress=go_on)
    assert verify_store(target, deep=True)["problems"] == []
    assert {entry.artifact for entry in RunFolder(target, "small").entries()} == before
    # Once more, and the rest comes too.
    copy_run(context.store, target, "small", progress=lambda *about: None)
    assert open_run(target.root.uri, "small", reads=True).chain.digest() == context.chain.digest()


def test_what_is_copied_is_not_removed_meanwhile(context: RunContext, tmp_path: Path) -> None:
    target = ArtifactStore(str(tmp_path / "copy"))

    def collect(artifact: str, done: int, total: int) -> None:
        with pytest.raises(RunConflictError, match="Run 'small' is being executed"):
            gc(root=target.root.uri, older_than=-1.0, delete=True)
        if done == total:
            target.root.remove(layout.manifest(context.policy_ref(1)))

    with pytest.raises(CommitLostError, match="though it was copied"):
        copy_run(context.store, target, "small", progress=collect)
    assert list_runs(target) == []
    copy_run(context.store, target, "small", progress=lambda *about: None)
    assert verify_store(target, deep=True)["problems"] == []


def test_a_copy_does_not_mix_two_runs_of_a_name(make_config: ConfigFactory, tmp_path: Path) -> None:
    one = prepare(make_config())
    other = prepare(make_config("run.seed=1", f"store.root={tmp_path / 'other'}"))
    with pytest.raises(RunConflictError, match="has another run of the name 'small'"):
        copy_run(one.store, other.store, "small", progress=lambda *about: None)


@pytest.mark.campaign_cases("command1")
@pytest.mark.slow
@pytest.mark.parametrize("command", [("gc", "--keep-epochs", "1", "--delete"), ("repair",)])
def test_nothing_is_removed_under_a_run_at_work(
    context: RunContext, flowmill: FlowmillCommand, command: tuple[str, ...]
) -> None:
    before = context.chain.digest()
    with context.store.root.lock(context.run.lock_path, "Run 'small'"):
        refused = flowmill("store", *command, "--root", context.store.root.uri)
        assert flowmill("store", "gc", "--keep-epochs", "1", "--root", context.store.root.uri).returncode == 0, "a look"
    assert refused.returncode == 1
    assert "Run 'small' is being executed by another process" in refused.stderr
    assert verify_store(context.store, deep=True)["problems"] == []
    assert context.chain.digest() == before
    assert flowmill("store", *command, "--root", context.store.root.uri).returncode == 0
