"""The chain derived from the config of a run, stale artifacts with their causes, and side results."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError, NotCommittedError
from flowmill.configs.schema import RunConfig
from flowmill.storage import layout
from flowmill.storage.artifacts.lineage import LineageEntry
from flowmill.storage.backends.local import LocalBackend
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.checks.stage_forecast import forecast
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.metrics.evaluations import evaluation_figures, named_figures
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runs.stage_selection import named_stages
from flowmill.tasks.runs.staleness import Freshness, due, explain, side_results, status_of, statuses
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.specs.stages import STAGES
from tests.support.inside import Make, evaluate, make_stage, prepare, run_epoch, stage_run
from tests.support.small import small_config

pytestmark = pytest.mark.slow
REWARD = "jpeg_compressibility"
RESTLESS = "rewards=[{name: 'tests.support.rewards:Restless'}]"


def finish(config: RunConfig) -> RunContext:
    """Run everything a config asks for, here, skipping what is committed."""
    context = begin_run(config)
    for node in RunPlan(config).nodes():
        execute(context, node)
    return context


@pytest.fixture(scope="module")
def store(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the small run, whole; tests take copies of it."""
    folder = tmp_path_factory.mktemp("chain")
    for epochs in (1, 2):
        finish(small_config(folder, tiny_base, f"run.epochs={epochs}"))
    shutil.rmtree(folder / "store" / "runs")
    return folder / "store"


Finished = Callable[[int], RunContext]


@pytest.fixture
def finished(store: Path, make_config: Make, tmp_path: Path) -> Finished:
    """Returns the small run of some epochs, whose artifacts are all there."""
    shutil.copytree(store, tmp_path / "store", symlinks=True)
    return lambda epochs: finish(make_config(f"run.epochs={epochs}"))


def execute(context: RunContext, node: Node, *, force: bool = False) -> ArtifactRef:
    run = stage_run(context, node.stage, node.epoch, node.slot, force=force)
    run.execute()
    return run.ref


def states(context: RunContext) -> dict[str, str]:
    return {str(each.node): each.state.value for each in statuses(context.chain) if each.state is not Freshness.FRESH}


def test_what_is_required_of_an_epoch_beyond_the_last_is_refused_with_the_epochs_of_the_run(make_config: Make) -> None:
    """An epoch is named that is trained; a stage of the next one can be run before."""
    context = prepare(make_config())
    chain = context.chain
    with pytest.raises(NotCommittedError, match=r"export for epoch 2: 0 of its 2 epochs are trained\. Train it "):
        chain.require(2, "export")
    run_epoch(context, 1)
    said = (
        r"'small' has no {} for epoch {}: 1 of its 2 epochs are trained\. Name an epoch up to 1, or .* --name small "
        r"--set run.epochs={} --root [^ ]+$"
    )
    for stage, epoch in (("rollout", 3), ("optimize", 9), ("export", 2), ("export", 3), ("evaluate", 9)):
        with pytest.raises(NotCommittedError, match=said.format(stage, epoch, epoch)):
            chain.require(epoch, stage)
    for stage, epoch in (("rollout", 2), ("export", 1), ("evaluate", 0)):
        with pytest.raises(NotCommittedError, match=rf"no {stage} for epoch {epoch} yet\. Run 'flowmill stage {stage}"):
            chain.require(epoch, stage)


def test_nodes_come_after_what_they_read(make_config: Make) -> None:
    config = make_config("run.epochs=3", "evaluate.every=2", "optimize.replay={epochs: 1}")
    context = begin_run(config)
    nodes = list(RunPlan(config).nodes())
    assert len(nodes) == len(set(nodes)) == 4 + 2 * 3 + 3 * 4 + 1
    for index, node in enumerate(nodes):
        assert set(context.chain.identity(node).upstream()) <= set(nodes[:index]), node


@pytest.mark.campaign
def test_a_thousand_epochs_are_planned_without_recursion(make_config: Make) -> None:
    context = begin_run(make_config("run.epochs=1000"))
    last = context.chain.ref(Node(1000, "export"))
    assert last.kind == "exports"
    assert last != begin_run(make_config("run.epochs=1000", "run.name=other", "run.seed=1")).chain.ref(
        Node(1000, "export")
    )


def test_a_finished_run_is_fresh_and_a_new_one_missing(make_config: Make, finished: Finished) -> None:
    context = begin_run(make_config("run.epochs=1"))
    assert {each.state for each in statuses(context.chain)} == {Freshness.MISSING}
    context = finished(1)
    assert states(context) == {}
    assert side_results(context.chain) == []
    described = describe_run(context)
    assert set(described["evaluations"]) == {"0", "1"}
    assert {stage["state"] for stage in described["stages"]} == {"fresh"}


def test_looking_at_a_run_reads_every_file_once_and_derives_every_artifact_once(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = finish(make_config("run.epochs=2"))
    expected = describe_run(context)
    reads, settled = Counter[str](), Counter[Node]()
    read, settle = LocalBackend.read, Chain._settle

    def counted(self: LocalBackend, path: str) -> bytes | None:
        reads[path] += 1
        return read(self, path)

    def noted(self: Chain, node: Node) -> ArtifactRef:
        settled[node] += 1
        return settle(self, node)

    reader = open_run(context.store.root.uri, "small", reads=True)
    monkeypatch.setattr(LocalBackend, "read", counted)
    monkeypatch.setattr(Chain, "_settle", noted)
    assert describe_run(reader) == expected
    assert settled == Counter(reader.chain.nodes())
    committed = {path: count for path, count in reads.items() if path.endswith("manifest.json") or "/lineage/" in path}
    assert len(committed) >= 2 * len(settled) - 2
    assert set(committed.values()) == {1}


def test_an_epoch_derives_nothing_of_the_epochs_before_anew(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settled, settle = Counter[Node](), Chain._settle

    def noted(self: Chain, node: Node) -> ArtifactRef:
        settled[node] += 1
        return settle(self, node)

    monkeypatch.setattr(Chain, "_settle", noted)
    context = prepare(make_config("run.epochs=3"))
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
    # Once for what is to be made, once for what was.
    assert max(settled.values()) <= 2, settled


def test_an_artifact_that_others_make_anew_is_seen(finished: Finished) -> None:
    context = finished(1)
    node, chain = Node(1, "score", REWARD), context.chain
    before = chain.ref(node)
    other = open_run(context.store.root.uri, "small")
    again = make_stage(other, node.stage, node.epoch, node.slot)
    again.begin(again=True, chosen=True)
    other.run.append(LineageEntry(epoch=1, stage="score", slot=REWARD, artifact=str(again.ref), forced=True))
    assert chain.ref(node) == before
    context.run.refresh()
    assert chain.ref(node) == again.ref != before


def test_forcing_what_comes_out_equal_makes_nothing_due(finished: Finished) -> None:
    context = finished(1)
    node = Node(1, "score", REWARD)
    before, digest = context.chain.ref(node), context.chain.digest()
    again = execute(context, node, force=True)
    assert (again.fingerprint, again.number) == (before.fingerprint, 2)
    assert context.chain.ref(node) == before
    assert context.chain.find(*node) is not None
    assert due(context.chain, node) == []
    assert states(context) == {}
    assert context.chain.digest() == digest
    (side,) = side_results(context.chain)
    assert side.label == f"attempt 2, equal to {before}"
    assert made_anew(context, node, before) == before
    assert open_run(context.store.root.uri, "small", reads=True).chain.digest() == digest


def made_anew(context: RunContext, node: Node, ref: ArtifactRef) -> ArtifactRef:
    """Lose an attempt and have it made again; return which one the run goes by then."""
    context.store.root.remove(layout.manifest(ref))
    fresh = open_run(context.store.root.uri, "small", trusted=True)
    records = len(fresh.run.entries())
    assert fresh.chain.ref(node) == ref
    assert execute(fresh, node) == ref
    again = open_run(context.store.root.uri, "small", reads=True)
    assert len(again.run.entries()) == records, "it was there before"
    return again.chain.ref(node)


def test_the_progress_of_another_run_takes_nothing_from_a_run(make_config: Make, finished: Finished) -> None:
    """Each stage is made by two runs with other batch sizes at once; the other one is complete later."""
    first = finished(1)
    store, sizes = first.store, ("execution.rollout_batch_size=3", "execution.micro_batch_size=5")
    entries = [each for each in first.chain.entries() if store.root.read(layout.claim(each.ref)) is not None]
    assert {"rollout", "score", "optimize"} <= {entry.stage for entry in entries}
    for number, entry in enumerate(entries):
        manifest = store.root.read(layout.manifest(entry.ref))
        assert manifest is not None
        store.root.remove(layout.manifest(entry.ref))
        config = make_config("run.epochs=1", f"run.name=by{number}", f"rewards.0.batch_size={number + 5}", *sizes)
        run = finish(config)
        own = run.chain.require(*entry.key).ref
        assert own == entry.ref.attempt(2)
        store.root.create(layout.manifest(entry.ref), manifest)
        again = open_run(store.root.uri, f"by{number}", reads=True)
        assert (states(again), again.chain.ref(Node(*entry.key))) == ({}, own), entry


def test_forcing_what_comes_out_different_makes_all_behind_it_due(make_config: Make) -> None:
    config = make_config(RESTLESS)
    context = finish(config)
    node = Node(1, "score", "tests.support.rewards:Restless")
    again = execute(context, node, force=True)
    assert context.chain.ref(node) == again
    behind = [str(each.node) for each in due(context.chain, node)]
    assert behind[:2] == ["advantage@1", "optimize@1"]
    assert {"rollout@2", "evaluate@2", "export@2"} <= set(behind)
    assert not {"rollout@1", "evaluate@0", "base@0"} & set(behind)
    assert set(states(context)) == set(behind)
    lines = explain(context.chain, Node(2, "export"))
    assert lines[0] == f"root cause: {node}: made again with --force, and came out different"
    assert "export@2 is stale: input optimize@2 changed" in lines
    with pytest.raises(NotCommittedError, match="no advantage for epoch 1 with these settings"):
        execute(context, Node(1, "optimize"))
    # What of the old chain still lies there is no figure of this run.
    assert evaluation_figures(context.chain, 2) == {}
    finish(config)
    assert states(open_run(context.store.root.uri, "small", reads=True)) == {}
    assert made_anew(context, node, again.attempt(1)) == again


def test_fewer_epochs_are_the_chain_of_a_run_of_fewer_epochs(
    make_config: Make, finished: Finished, tmp_path: Path
) -> None:
    longer = finished(2)
    digest = longer.chain.digest()
    shorter = finished(1)
    fresh = finish(make_config("run.epochs=1", f"store.root={tmp_path / 'fresh'}"))
    assert shorter.chain.digest() == fresh.chain.digest() != digest
    described, expected = describe_run(shorter), describe_run(fresh)
    for key in ("evaluations", "rewards", "advantages", "finished_epochs"):
        assert described[key] == expected[key]
    labels = {side.label for side in side_results(shorter.chain)}
    assert labels == {"beyond run.epochs 1"}
    assert describe_run(open_run(shorter.store.root.uri, "small"))["epochs"] == 1
    again = finished(2)
    assert again.chain.digest() == digest
    assert again.ledger.stages() == []
    (side,) = side_results(again.chain)
    assert (side.entry.stage, side.label) == ("export", "not scheduled by the run's config")


def test_forced_then_fewer_epochs_never_mixes_two_chains(make_config: Make, tmp_path: Path) -> None:
    finish(make_config(RESTLESS))
    context = begin_run(make_config(RESTLESS))
    execute(context, Node(2, "score", "tests.support.rewards:Restless"), force=True)
    finish(make_config(RESTLESS, "run.epochs=1"))
    again = begin_run(make_config(RESTLESS))
    assert set(evaluation_figures(again.chain, 1)) == {"train", "heldout"}
    # The policy of epoch 2 was trained on rewards that no longer count, so it has no figures.
    assert evaluation_figures(again.chain, 2) == {}
    assert status_of(again.chain, Node(2, "optimize")).state is Freshness.STALE


def test_another_evaluation_is_stale_with_the_option_named(make_config: Make, finished: Finished) -> None:
    finished(1)
    changed = begin_run(make_config("run.epochs=1", "evaluate.samples=6"))
    assert status_of(changed.chain, Node(1, "evaluate")).causes[0].text == "samples 4 -> 6"
    assert explain(changed.chain, Node(1, "judge", REWARD)) == [
        "root cause: evaluate@1: samples 4 -> 6",
        f"judge[{REWARD}]@1 is stale: input evaluate@1 changed",
    ]
    assert evaluation_figures(changed.chain, 1) == {}


def test_another_version_of_a_stage_is_named(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    context, spec = finished(1), STAGES["advantage"]
    monkeypatch.setitem(STAGES, "advantage", replace(spec, version=spec.version + 1))
    opened = open_run(context.store.root.uri, "small", reads=True)
    cause = f"stage version {spec.version} -> {spec.version + 1}"
    assert explain(opened.chain, Node(1, "optimize"))[0] == f"root cause: advantage@1: {cause}"


def test_a_stage_with_other_settings_stands_beside_the_run(finished: Finished) -> None:
    context = finished(2)
    root, digest = context.store.root.uri, context.chain.digest()
    options = ["rewards=[{name: jpeg_compressibility, options: {scale: 1}, label: kb}]"]
    scored = open_run(root, "small", overrides=options, epoch=1)
    ref = execute(scored, Node(1, "score", "kb"))
    # Its rollout is the run's own.
    manifest = context.store.require(ref)
    assert manifest.inputs == (str(context.chain.ref(Node(1, "rollout"))),)
    # The next stage with the same settings reads the side result.
    advantages = execute(open_run(root, "small", overrides=options, epoch=1), Node(1, "advantage"))
    assert context.store.require(advantages).inputs == (str(ref),)
    after = open_run(root, "small")
    assert after.chain.digest() == digest
    assert states(after) == {}
    assert [side.label for side in side_results(after.chain)] == [
        "input score[jpeg_compressibility]@1 changed",
        "reward 'kb' is not in the run's config",
    ]


def test_a_rollout_with_other_noise_starts_from_the_runs_policy(finished: Finished) -> None:
    context = finished(2)
    root = context.store.root.uri
    options = ["rollout.sampler.options.noise_level=0.5"]
    first = execute(open_run(root, "small", overrides=options, epoch=1), Node(1, "rollout"))
    second = execute(open_run(root, "small", overrides=options, epoch=2), Node(2, "rollout"))
    # The side result of epoch 1 is not what policy 1 was trained on, so epoch 2 starts from the run's policy 1.
    assert str(context.policy_ref(1)) in context.store.require(second).inputs
    assert first != context.chain.ref(Node(1, "rollout"))
    # Advantages of other rollouts are never taken for those of these.
    with pytest.raises(NotCommittedError, match="no advantage for epoch 1 with these settings"):
        execute(open_run(root, "small", overrides=options, epoch=1), Node(1, "optimize"))
    after = open_run(root, "small")
    assert states(after) == {}
    # The run's config leaves the noise level out.
    label = "rollout.sampler.options.noise_level 0.5 -> None"
    assert [label in side.label for side in side_results(after.chain)] == [True, True]


def test_an_evaluation_on_other_prompts_has_a_name_of_its_own(finished: Finished, tmp_path: Path) -> None:
    context = finished(1)
    root, before = context.store.root.uri, evaluation_figures(context.chain, 1)
    (tmp_path / "other.txt").write_text('"55"\n"66"\n')
    options = [f"prompts.heldout={tmp_path / 'other.txt'}", "evaluate.samples=2"]
    side = open_run(root, "small", overrides=options, epoch=1)
    nodes = named_stages(side, Node(1, "evaluate"), evaluation="drawbench")
    assert [str(node) for node in nodes] == [
        *("encode@0", "preprocess@0", "evaluate[drawbench]@1", f"judge[{REWARD}@drawbench]@1")
    ]
    for node in nodes:
        execute(side, node)
    after = open_run(root, "small")
    assert states(after) == {}
    assert evaluation_figures(after.chain, 1) == before
    named = named_figures(after.chain, 1, "drawbench")
    assert set(named) == {"train", "heldout"}
    assert named["heldout"] != before["heldout"]
    (listed,) = describe_run(after)["named_evaluations"]
    assert (listed["epoch"], listed["name"]) == (1, "drawbench")
    # Without a name given, the settings make one.
    unnamed = named_stages(open_run(root, "small", overrides=options, epoch=1), Node(1, "evaluate"))
    assert unnamed[-2].slot.startswith("set-")


def test_a_new_judge_needs_no_sampling_and_a_failing_one_loses_nothing(make_config: Make) -> None:
    from flowmill.configs.errors import FlowmillError

    broken = make_config("run.epochs=1", "evaluate.judges=[{name: 'tests.support.rewards:NotANumber'}]")
    context = prepare(broken)
    with pytest.raises(FlowmillError):
        evaluate(context, 0)
    assert context.chain.find(0, "evaluate") is not None
    assert context.chain.find(0, "judge", REWARD) is not None
    mended = begin_run(
        make_config("run.epochs=1", "evaluate.judges=[{name: 'tests.support.rewards:Constant', label: c}]")
    )
    evaluate(mended, 0)
    assert mended.ledger.stages() == ["judge"]
    assert evaluation_figures(mended.chain, 0)["train"]["c"]["mean"] == pytest.approx(0.7)


def test_settings_of_another_run_are_refused_for_a_stage(make_config: Make) -> None:
    context = prepare(make_config())
    side = open_run(context.store.root.uri, "small", overrides=["run.seed=5"], epoch=1)
    with pytest.raises(ConfigError, match="no stage of it can have another"):
        named_stages(side, Node(1, "rollout"))
    with pytest.raises(ConfigError, match="stage 'rollout' has none"):
        named_stages(context, Node(1, "rollout"), evaluation="x")


def test_a_forecast_says_what_would_be_computed_and_why(make_config: Make) -> None:
    config = make_config()
    new = {stage.stage: stage for stage in forecast(config)}
    assert (new["rollout"].due, new["rollout"].fresh, new["rollout"].reason) == (2, 0, "rollout@1 was not made yet")
    context = prepare(config)
    run_epoch(context, 1)
    half = {stage.stage: stage for stage in forecast(config)}
    assert (half["rollout"].due, half["rollout"].fresh) == (1, 1)
    assert half["rollout"].rows == 4 * 4 * 3
    assert half["rollout"].seconds is not None
    other = forecast(make_config("optimize.learning_rate=0.5"))
    by_name = {stage.stage: stage for stage in other}
    assert by_name["rollout"].fresh == 1
    assert "learning_rate 0.001 -> 0.5" in by_name["optimize"].reason
    shared = {s.stage: s for s in forecast(make_config("optimize.learning_rate=0.5", "run.name=other"))}
    assert (shared["rollout"].reused, shared["rollout"].due) == (1, 1)


def test_a_base_model_changed_in_place_is_named(make_config: Make, tiny_base: Path, tmp_path: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_base, model)
    config = make_config("run.epochs=1", f"model.path={model}")
    context = finish(config)
    scheduler = model / "scheduler" / "scheduler_config.json"
    scheduler.write_text(scheduler.read_text().replace('"shift": 1', '"shift": 2'))
    opened = open_run(context.store.root.uri, "small", reads=True)
    assert explain(opened.chain, Node(1, "export"))[0].startswith("root cause: base@0: identity.files.scheduler")
    shutil.rmtree(model)
    # Where the model is gone, what the run wrote down is what counts.
    assert states(open_run(context.store.root.uri, "small", reads=True)) == {}


def test_a_store_is_moved_and_goes_on_where_it_is(make_config: Make, finished: Finished, tmp_path: Path) -> None:
    import shutil

    old, new = tmp_path / "store", tmp_path / "elsewhere" / "store"
    digest = finished(1).chain.digest()
    shutil.copytree(old, new)
    before = {path: path.stat().st_mtime_ns for path in [old, *old.rglob("*")]}
    moved = finish(make_config("run.epochs=2", f"store.root={new}"))
    assert describe_run(moved)["finished_epochs"] == 2
    assert {path: path.stat().st_mtime_ns for path in [old, *old.rglob("*")]} == before
    shutil.rmtree(old)
    back = open_run(str(new), "small")
    assert states(back) == {}
    execute(back, Node(1, "score", REWARD), force=True)
    assert not old.exists()
    assert finish(make_config("run.epochs=1", f"store.root={new}")).chain.digest() == digest
    for record in new.joinpath("runs").rglob("*.json"):
        assert str(old) not in record.read_text(), record


def test_a_stage_is_refused_while_its_run_executes(make_config: Make) -> None:
    from flowmill.configs.errors import RunConflictError
    from flowmill.tasks.runs.locks import executing, holding, refuse_while_executing

    context = prepare(make_config())
    refuse_while_executing(context.store, "small")
    other = open_run(context.store.root.uri, "small")
    with executing(context), pytest.raises(RunConflictError, match="being executed by another process"):
        refuse_while_executing(other.store, "small")
    with holding(other.store, "small"):
        refuse_while_executing(context.store, "small")
        with holding(context.store, "small"), executing(context), pytest.raises(RunConflictError):
            refuse_while_executing(other.store, "small")
    refuse_while_executing(other.store, "small")


def test_stages_of_a_process_share_the_lock_until_the_last_one_ends(make_config: Make) -> None:
    from flowmill.configs.errors import RunConflictError
    from flowmill.tasks.runs.locks import executing, executing_stage, holding, refuse_while_executing

    context = prepare(make_config())
    other = open_run(context.store.root.uri, "small")
    begun, ended = threading.Event(), threading.Event()

    def outlive() -> None:
        with holding(other.store, "small"), executing_stage(other):
            begun.set()
            ended.wait()

    thread = threading.Thread(target=outlive)
    with holding(context.store, "small"), executing_stage(context):
        thread.start()
        begun.wait(30)
        refuse_while_executing(other.store, "small")
        with pytest.raises(RunConflictError), executing(other):
            pass
    assert other.store.root.locked(other.run.lock_path)
    ended.set()
    thread.join()
    assert not other.store.root.locked(other.run.lock_path)
    with executing(context):
        pass


def test_make_stage_knows_every_stage_of_a_run(make_config: Make) -> None:
    followed = ("rewards=[digits_network]", "optimize.algorithm=reward_gradient", "rollout.plan=final")
    for overrides in ((), (*followed, "run.name=followed")):
        context = begin_run(make_config(*overrides))
        for node in context.plan.nodes():
            assert make_stage(context, node.stage, node.epoch, node.slot).node == node
            assert context.chain.has(node)
