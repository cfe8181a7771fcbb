"""The stages on a tiny real model: resume, skip, force, re-run alone, determinism over shards and processes."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flowmill.configs.errors import (
    ConfigError,
    CorruptError,
    FlowmillError,
    RewardError,
    RunConflictError,
)
from flowmill.configs.schema import RunConfig
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.weights.tensor_files import TensorFiles
from flowmill.storage.artifacts.records import ShardRecord
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.trajectories.embeddings import Rows
from flowmill.storage.trajectories.schema import ADVANTAGES, read_table
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.algorithms import ALGORITHMS
from flowmill.tasks.algorithms.base import Models
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.prompts import StoredPrompt
from flowmill.tasks.inputs.weight_sources import Weights, policy_folder, tensor_files
from flowmill.tasks.metrics.describe import describe_result
from flowmill.tasks.modalities.diffusion.conditioning import conditioning_of
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, finished_result, mark_finished, open_run
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.stages.rollout import RolloutStage
from flowmill.tasks.stages.stage import Shard
from flowmill.tasks.stages.stage_run import StageRun
from flowmill.tasks.training import epoch as training
from flowmill.tasks.training.reference_cache import recall_reference
from tests.reference import advantages as slow
from tests.support.inside import (
    Make,
    collect,
    evaluate,
    make_stage,
    prepare,
    run_epoch,
    run_stage,
    session_of,
    stage_rows,
    stage_run,
    stored_shards,
    summary_of,
    updates_of,
)
from tests.support.language_models import texts_config


def execute(context: RunContext, name: str, epoch: int, slot: str = "", **options: Any) -> ArtifactRef:
    run = stage_run(context, name, epoch, slot, **options)
    run.execute()
    return run.ref


def trajectories(context: RunContext, epoch: int = 1) -> dict[str, tuple[np.ndarray, list[float], np.ndarray]]:
    """Return latents, log-probs and image of every sample of an epoch."""
    found = {}
    for shard in stored_shards(context, epoch, "rollout"):
        for row, columns in enumerate(shard.table.to_pylist()):
            found[columns["sample_id"]] = (shard.array("latents", row), columns["log_probs"], shard.media(row))
    return found


def weights(context: RunContext, epoch: int = 1) -> dict[str, torch.Tensor]:
    return stored(context, epoch, Weights.TRAINED.value)


def stored(context: RunContext, epoch: int, file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one file of a policy, whole, regardless of the writer."""
    files = TensorFiles(tensor_files(policy_folder(context.store, context.policy_ref(epoch)), file))
    tensors = {name: torch.empty(shape) for name, shape in files.shapes.items()}
    files.read_into(tensors)
    return tensors


def base_weights(context: RunContext) -> dict[str, torch.Tensor]:
    """Return the base model's weights as trained parameters."""
    held = session_of(context).host.trainable(context.policy_ref(0))
    names = [name for name, _ in held.named_parameters()]
    return dict(zip(names, session_of(context).host.stored_weights(None), strict=True))


def assert_same_trajectories(one: RunContext, other: RunContext) -> None:
    a, b = trajectories(one), trajectories(other)
    assert a.keys() == b.keys()
    assert len(a) == 16
    for sample in a:
        for left, right in zip(a[sample], b[sample], strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("store", ["webdataset", "parquet"])
def test_digests_depend_on_the_seed_and_not_on_shards(make_config: Make, tmp_path: Path, store: str) -> None:
    digests = []
    for size, seed in ((1, 0), (2, 0), (3, 0), (3, 1)):
        changes = (f"rollout.groups_per_shard={size}", f"run.seed={seed}", f"rollout.store={store}")
        context = prepare(make_config(f"store.root={tmp_path / f'{size}-{seed}'}", *changes))
        run_epoch(context, 1)
        digests.append(context.chain.digest())
    assert len(set(digests[:3])) == 1
    assert digests[2] != digests[3]


def test_runs_of_other_batch_sizes_make_attempts_of_their_own(make_config: Make) -> None:
    """Unfinished artifacts are continued in batches of the same sizes; all runs find complete ones."""
    first = prepare(make_config())
    begun = stage_run(first, "rollout", 1)
    begun.run_shard(begun.pending()[0])
    small = ("execution.rollout_batch_size=3", "execution.micro_batch_size=5")
    other, same = prepare(make_config("run.name=other", *small)), prepare(make_config("run.name=same"))
    apart, together = (stage_run(each, "rollout", 1) for each in (other, same))
    assert apart.ref == begun.ref.attempt(2)
    assert together.ref == begun.ref
    for context in (other, first):
        run_epoch(context, 1)
    digests = [context.chain.digest() for context in (first, other)]
    assert all(context.chain.require(1, "optimize") for context in (first, other))
    assert digests == [open_run(first.store.root.uri, name, reads=True).chain.digest() for name in ("small", "other")]
    assert other.chain.require(1, "rollout").ref == begun.ref.attempt(2)
    scored = Node(1, "score", "jpeg_compressibility")
    assert other.chain.require(*scored).ref == other.chain.result_of(scored, (begun.ref.attempt(2),))
    third = prepare(make_config("run.name=third", *small))
    assert stage_run(third, "rollout", 1).ref == begun.ref, "what is complete is found"


def test_a_run_goes_on_with_what_it_began_whatever_its_sizes_are_now(make_config: Make) -> None:
    context = prepare(make_config())
    begun = stage_run(context, "rollout", 1)
    begun.run_shard(begun.pending()[0])
    again = stage_run(prepare(make_config("execution.rollout_batch_size=4")), "rollout", 1)
    assert again.ref == begun.ref
    assert len(again.pending()) == 1


def test_embeddings_that_were_committed_first_count(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (begin_run(make_config(f"run.name=by{n}", f"execution.encode_batch_size={n}")) for n in (1, 8))
    for context in (one, other):
        run_stage(context, "base", 0)
    late, early = (stage_run(context, "encode", 0) for context in (one, other))
    due, record = late.pending()[0], late.store.record
    committed = early.run_shard(early.pending()[0])
    looks: list[str] = []

    def not_at_first(ref: ArtifactRef, shard: str) -> ShardRecord | None:
        looks.append(shard)
        return record(ref, shard) if len(looks) > 1 else None

    monkeypatch.setattr(late.store, "record", not_at_first)
    assert late.run_shard(due).digest == committed.digest


def test_a_new_reward_needs_no_rollout_and_no_policy(make_config: Make) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    other = open_run(
        context.store.root.uri,
        "small",
        overrides=["rewards=[{name: jpeg_compressibility, options: {scale: 1}, label: kb}]"],
    )
    ref = execute(other, "score", 1, "kb")
    assert other.ledger.stages() == ["score"]
    assert session_of(other).host.loaded() == {}
    before = context.chain.require(1, "score", "jpeg_compressibility").ref
    means = [context.store.require(each).summary["mean"] for each in (ref, before)]
    assert means[0] == pytest.approx(500 * means[1], rel=1e-5)
    assert not stage_run(open_run(context.store.root.uri, "small"), "advantage", 1).pending()


def test_an_interrupted_rollout_goes_on_where_it_stopped(make_config: Make, tmp_path: Path) -> None:
    whole = prepare(make_config(f"store.root={tmp_path / 'whole'}"))
    execute(whole, "rollout", 1)
    broken = prepare(make_config())
    run = stage_run(broken, "rollout", 1)
    run.run_shard(run.pending()[1])
    assert broken.chain.find(1, "rollout") is None
    again = open_run(broken.store.root.uri, "small")
    resumed = stage_run(again, "rollout", 1)
    assert [shard.name for shard in resumed.pending()] == ["000000-000002"]
    resumed.execute()
    assert again.ledger.seconds("rollout") > 0
    assert_same_trajectories(whole, again)
    digests = [w.store.require(w.chain.require(1, "rollout").ref).digest for w in (whole, again)]
    assert digests[0] == digests[1]


class Stop(Exception):
    pass


def stop_after(context: RunContext, update: int) -> None:
    """Make the context's reporter raise after an optimizer update, as a kill would stop it."""

    class Reporter:
        def progress(self, stage: str, epoch: int, done: int, total: int, detail: str = "") -> None:
            if stage == "optimize" and done == update + 1:
                raise Stop

        def message(self, text: str) -> None:
            pass

    context.reporter = Reporter()


def continued(make_config: Make, root: Path, *settings: str) -> tuple[RunContext, RunContext]:
    """Return a run of two epochs, and one that was stopped after two updates and opened again, of equal digests."""
    whole, broken = prepare(make_config(f"store.root={root}", *settings)), prepare(make_config(*settings))
    stop_after(broken, 2)
    with pytest.raises(Stop):
        run_epoch(broken, 1)
    again = open_run(broken.store.root.uri, "small")
    for epoch in (1, 2):
        run_epoch(again, epoch)
        run_epoch(whole, epoch)
    assert again.chain.digest() == whole.chain.digest()
    return whole, again


@pytest.mark.slow_cases("ema")
@pytest.mark.parametrize("trained", ["full", "lora", "ema"])
def test_training_resumes_from_the_checkpoint_within_the_epoch(make_config: Make, tmp_path: Path, trained: str) -> None:
    extra = {"full": [], "lora": ["model.lora={rank: 2, alpha: 4}"], "ema": ["optimize.ema={decay: 0.5}"]}[trained]
    extra += ["optimize.updates_per_epoch=4", "execution.checkpoint_every=1", "optimize.algorithm.options.kl_coef=0.1"]
    whole = prepare(make_config(f"store.root={tmp_path / 'whole'}", *extra))
    run_epoch(whole, 1)
    broken = prepare(make_config(*extra))
    stop_after(broken, 2)
    with pytest.raises(Stop):
        run_epoch(broken, 1)
    again = open_run(broken.store.root.uri, "small")
    reported: list[str] = []
    again.reporter.message = reported.append  # type: ignore[method-assign]
    run_epoch(again, 1)
    assert reported == ["epoch 1: training resumes after update 2."]
    assert again.chain.digest() == whole.chain.digest()
    policy = policy_folder(again.store, again.policy_ref(1))
    assert (policy / "ema.safetensors").exists() == (trained == "ema")
    assert not (Path(again.store.root.uri) / str(again.policy_ref(1)) / "_checkpoints").exists()


@pytest.mark.parametrize(("kind", "rows"), [("images", 50), ("shared prompts", 25)])
def test_a_resumed_epoch_compares_rows_with_the_base_model_as_their_first_micro_batches_did(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    """Kernels differ with the number of rows, and micro-batches of these updates have several."""
    recalled: list[int] = []

    def noted(models: Models, *values: Any, **options: Any) -> None:
        recall_reference(models, *values, **options)
        recalled.append(len(models.remembered or ()))

    monkeypatch.setattr(training, "recall_reference", noted)
    make, size = (make_config, 16) if kind == "images" else (partial(texts_config, tmp_path), 8)
    options = ["optimize.algorithm={name: grpo, options: {clip_range: 0.1, kl_coef: 0.5}}"]
    options += [f"optimize.shared_prompts={kind == 'shared prompts'}", f"execution.micro_batch_size={size}"]
    options += ["optimize.inner_epochs=3", "optimize.updates_per_epoch=3", "execution.checkpoint_every=1"]
    options += ["rollout.group_size=5", "rollout.prompts_per_epoch=5"]
    whole = prepare(make(f"store.root={tmp_path / 'whole'}", *options))
    run_epoch(whole, 1)
    broken = prepare(make(*options))
    stop_after(broken, 4)
    with pytest.raises(Stop):
        run_epoch(broken, 1)
    again = prepare(make(*options))
    run_epoch(again, 1)
    assert recalled == [0, 0, rows]
    assert again.chain.digest() == whole.chain.digest()


@pytest.mark.parametrize("trained", ["full", "lora"])
def test_half_precision_forward_with_float32_weights(make_config: Make, trained: str) -> None:
    extra = ["model.lora={rank: 2, alpha: 4}"] if trained == "lora" else []
    context = prepare(make_config("model.dtype=bfloat16", "model.guidance_scale=3", *extra))
    execute(context, "evaluate", 0)
    run_epoch(context, 1)
    first = updates_of(context, 1)[0]
    assert (first["ratio_mean"], first["ratio_std"]) == (1.0, 0.0)
    assert first["replay_gap_max"] < 1e-3
    assert first["grad_norm"] > 0
    assert all(value.dtype == torch.float32 for value in weights(context).values())


FORWARD = "rollout.plan={name: final}"
ALGORITHM_RUNS: dict[str, list[str]] = {
    "grpo": [],
    "tempflow": ["rollout.plan={name: subset, options: {count: 1}}", "rollout.sampler={name: cps}"],
    "grpo_guard": ["rollout.plan={name: window, options: {size: 1}}", "rollout.sampler={name: dance_sde}"],
    "flow_dppo": ["optimize.inner_epochs=2", "optimize.algorithm.options={threshold: 1}"],
    "nft": [FORWARD, "rollout.solver=dpm2", "optimize.algorithm.options={decay: {rate: 0.1, maximum: 0.5}}"],
    "awm": [FORWARD, "optimize.algorithm.options={times: {kind: grid, count: 2}, kl_coef: 0.1}"],
    "dpo": [FORWARD, "optimize.algorithm.options={times: {kind: logit_normal}}"],
    "dgpo": [FORWARD, "model.lora={rank: 2, alpha: 4}"],
    "crd": [FORWARD, "optimize.algorithm.options={temperature: 0.5}"],
    "opd": [],
    "flash_grpo": ["rollout.plan={name: subset, options: {count: 1}}", "optimize.algorithm.options={surrogate: spo}"],
    "v_grpo": [FORWARD, "advantage.soft_clip=3"],
    "reward_gradient": [FORWARD, "rewards=[{name: digits_network}]", "optimize.inner_epochs=2"],
    "refl": ["rollout.plan={name: late, options: {count: 2, low: 1}}", "rewards=[digits_network]"],
    "direct_align": [FORWARD, "rewards=[digits_network]", "optimize.algorithm.options={times: {count: 1}}"],
    "apo_zero": [FORWARD, "optimize.algorithm.options={times: {count: 2}}"],
    "kto": [FORWARD, "optimize.algorithm.options={times: {count: 2}}"],
    "sft": [FORWARD, "optimize.algorithm.options={prediction: epsilon, times: {kind: grid, count: 2}}"],
    "ram": [FORWARD, "optimize.algorithm.options={times: {count: 2}}"],
    "fdfo": [
        "rollout.plan={name: all, options: {keep_final: true}}",
        "rollout.same_noise=true",
        "rollout.own_noise=0.3",
        "rollout.sampler={name: precise}",
    ],
}


def algorithm_run(make_config: Make, name: str, *further: str) -> RunConfig:
    return make_config(f"optimize.algorithm={{name: {name}}}", *ALGORITHM_RUNS[name], *further)


def test_every_algorithm_has_a_run() -> None:
    assert set(ALGORITHM_RUNS) == set(ALGORITHMS)


def test_a_loss_may_leave_out_the_guidance_of_rollouts(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the policy, of what rolled out, and of the base model."""
    negatives: dict[str, set[bool]] = {}
    guided, stage = PipelinePolicy._guided, "rollout"

    def noted(policy: Any, modules: Any, latents: Any, sigma: Any, conditioning: Conditioning) -> Any:
        negatives.setdefault(stage, set()).add(conditioning.negative is not None)
        return guided(policy, modules, latents, sigma, conditioning)

    monkeypatch.setattr(PipelinePolicy, "_guided", noted)
    options = "optimize.algorithm.options={guided: false, kl_coef: 0.1, decay: {rate: 0.1, maximum: 0.5}}"
    context = prepare(algorithm_run(make_config, "dgpo", options, "model.guidance_scale=3"))
    collect(context)
    stage = "optimize"
    execute(context, stage, 1)
    assert negatives == {"rollout": {True}, "optimize": {False}}


@pytest.mark.campaign_cases(
    "refl",
    "awm",
    "crd",
    "flash_grpo",
    "flow_dppo",
    "grpo_guard",
    "ram",
    "tempflow",
    "v_grpo",
    "direct_align",
    "reward_gradient",
    "fdfo",
    "dgpo",
)
@pytest.mark.slow_cases("sft")
@pytest.mark.parametrize("name", sorted(ALGORITHM_RUNS))
def test_every_algorithm_trains_and_equal_runs_are_equal(
    make_config: Make, tmp_path: Path, tiny_base: Path, name: str
) -> None:
    teacher = [f"optimize.algorithm.options.teacher={tiny_base}"] * (name == "opd")
    configs = [algorithm_run(make_config, name, f"store.root={tmp_path / root}", *teacher) for root in ("a", "b")]
    check_config(configs[0])
    again, context = map(prepare, configs)
    for each, epoch in ((again, 1), (context, 1), (context, 2)):
        run_epoch(each, epoch)
    first, second = (each.store.require(each.policy_ref(1)).digest for each in (again, context))
    assert first == second
    for epoch in (1, 2):
        updates = updates_of(context, epoch)
        assert updates, epoch
        assert all(np.isfinite(list(update.values())).all() for update in updates)
        if name != "opd" or epoch == 2:
            assert updates[-1]["grad_norm"] > 0
    first = updates_of(context, 1)[0]
    if "ratio_mean" in first:
        assert (first["ratio_mean"], first["ratio_std"]) == (1.0, 0.0)
        # The ratio is 1 by what it is made of; that what was stored is replayed, the gap alone shows.
        assert first.get("replay_gap_max", 0.0) < 1e-6
        assert ("replay_gap_max" in first) == (name not in ("awm", "v_grpo", "fdfo"))
    if name == "opd":
        assert first["teacher_kl"] == 0.0


def test_the_behavior_policy_follows_slowly_and_rolls_out(make_config: Make) -> None:
    context = prepare(algorithm_run(make_config, "nft"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    folders = [policy_folder(context.store, context.policy_ref(epoch)) for epoch in (1, 2)]
    new, behavior = (load_file(folders[0] / f"{name}.safetensors") for name in ("policy", "behavior"))
    base = base_weights(context)
    for name in new:
        torch.testing.assert_close(behavior[name], torch.lerp(new[name], base[name], 0.1))
    held = session_of(context).host.trainable(context.policy_ref(1), Weights.BEHAVIOR).state()
    assert all(torch.equal(held[name], behavior[name]) for name in held)
    averaged = session_of(context).host.trainable(context.policy_ref(1), Weights.AVERAGE).state()
    assert all(torch.equal(averaged[name], new[name]) for name in averaged)
    # Only final latents are stored where nothing else is trained.
    samples = trajectories(context)
    assert {latents.shape[0] for latents, _, _ in samples.values()} == {1}
    assert all(log_probs == [] for _, log_probs, _ in samples.values())


def test_groups_share_their_random_window(make_config: Make) -> None:
    context = prepare(make_config("rollout.steps=6", "rollout.plan={name: window, options: {size: 1}}"))
    execute(context, "rollout", 1)
    windows: dict[str, set[tuple[int, ...]]] = {}
    for shard in stored_shards(context, 1, "rollout"):
        for row in shard.table.to_pylist():
            windows.setdefault(row["prompt_id"], set()).add(tuple(row["steps"]))
    assert {len(drawn) for drawn in windows.values()} == {1}
    assert len(set.union(*windows.values())) > 1


def test_equal_samples_are_counted_whichever_shards_they_are_in(make_config: Make, tmp_path: Path) -> None:
    """Of 2 groups of 8 samples from one noise without any further, all but one of each equal another."""
    equal = ["rollout.plan.name=final", "optimize.algorithm=nft", "rollout.same_noise=true", "rollout.group_size=8"]
    equal += ["rollout.prompts_per_epoch=2", "execution.rollout_batch_size=2", "rollout.groups_per_shard=null"]
    for processes in (1, 4):
        context = prepare(
            make_config(f"store.root={tmp_path / str(processes)}", f"execution.processes={processes}", *equal)
        )
        execute(context, "rollout", 1)
        ref = context.chain.require(1, "rollout").ref
        split = [name for name in context.store.committed(ref) if "_" in name]
        assert bool(split) == (processes > 1)
        assert summary_of(context, 1, "rollout") == {"groups": 2, "samples": 16, "repeats": 14}


@pytest.mark.parametrize(
    ("cut", "rounding"), [("rollout.groups_per_shard=1", 0), ("execution.rollout_batch_size=2", 1)]
)
def test_branches_are_grouped_by_prompt_and_step_and_do_not_depend_on_shards_and_batches(
    make_config: Make, tmp_path: Path, cut: str, rounding: int
) -> None:
    branching = [
        "rollout.plan={name: branch, options: {branches: 2}}",
        "rollout.same_noise=true",
        "rollout.group_size=2",
        "optimize.algorithm={name: tempflow}",
    ]
    one = prepare(make_config(*branching))
    other = prepare(make_config(f"store.root={tmp_path / 'other'}", cut, *branching))
    cost = check_config(one.config)
    for context in (one, other):
        run_epoch(context, 1)
    a, b = trajectories(one), trajectories(other)
    # 4 prompts, 2 trunks, 2 branches at each of 2 steps.
    assert len(a) == cost.samples_per_epoch == 4 * 2 * 2 * 2
    # The order of rows decides which of them an update trains on.
    assert list(a) == list(b)
    for sample in a:
        np.testing.assert_allclose(a[sample][0], b[sample][0], rtol=0, atol=1e-5 * rounding)
    norms = [[update["grad_norm"] for update in updates_of(context, 1)] for context in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3 * rounding, abs=0)
    ref = one.chain.require(1, "advantage").ref
    table = read_table(one.store.files(ref, one.store.records(ref)[0]), "advantages.parquet", ADVANTAGES).to_pandas()
    assert table.group_id.nunique() == 4 * 2
    assert table.groupby("group_id").advantage.sum().abs().max() < 1e-4
    updates = updates_of(one, 1)
    assert updates[0]["ratio_mean"] == 1.0
    assert updates[0]["replay_gap_max"] < 1e-6


def test_pairs_start_near_one_noise_and_train_on_their_difference(make_config: Make) -> None:
    options = ["rollout.same_noise=true", "rollout.plan={name: all, options: {keep_final: true}}"]
    starts = {}
    for own in (0.0, 0.2, 1.0):
        algorithm = "optimize.algorithm={name: fdfo}"
        context = prepare(make_config(*options, algorithm, f"rollout.own_noise={own}", f"run.name=own{own}"))
        execute(context, "rollout", 1)
        found = trajectories(context)
        starts[own] = {name: latents[0].astype(np.float64) for name, (latents, _, _) in found.items()}
        # Every step but the last has a start; the final latents come last.
        assert {len(latents) for latents, _, _ in found.values()} == {context.config.rollout.steps + 1}
    shared, near, apart = starts.values()
    for name, start in near.items():
        expected = math.cos(math.pi / 10) * shared[name] + math.sin(math.pi / 10) * apart[name]
        np.testing.assert_allclose(start, expected, atol=1e-5)
    assert len({start.tobytes() for start in shared.values()}) < len(shared)
    assert len({start.tobytes() for start in apart.values()}) == len(apart)
    run_epoch(context, 1)
    updates = updates_of(context, 1)
    assert (updates[0]["ratio_mean"], updates[0]["ratio_std"]) == (1.0, 0.0)
    assert updates[0]["grad_norm"] > 0


def test_replay_trains_on_earlier_epochs_with_their_own_log_probs(make_config: Make) -> None:
    context = prepare(make_config("optimize.replay={epochs: 1}", "run.epochs=2"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    manifest = context.store.require(context.policy_ref(2))
    assert len(manifest.inputs) == 5
    alone = context.store.require(context.policy_ref(1))
    rows = [sum(update["rows"] for update in each.summary["updates"]) for each in (alone, manifest)]
    # Samples of advantage 0 are left out, so the epochs differ by a few rows.
    assert rows[1] > 1.8 * rows[0]
    first = manifest.summary["updates"][0]
    # Proximal log-probs are those of the policy the epoch starts from, so its first ratios are 1 ...
    assert (first["ratio_mean"], first["ratio_std"], first["ratio_step0"]) == (1.0, 0.0, 1.0)
    assert first["replay_gap_max"] < 1e-6
    assert (first["clip_age0"], first["clip_age1"]) == (0.0, 0.0)
    # ... and what is off-policy is in the importance weights.
    assert first["importance"] != 1.0
    assert 0.5 < first["effective_samples"] < 1.0
    assert first["behavior_kl"] != 0.0


def test_a_kl_in_the_reward_is_that_of_the_stored_steps(make_config: Make) -> None:
    context = prepare(make_config("advantage.kl_coef=100", "optimize.learning_rate=1e-2"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    kls, penalties = [], []
    for epoch in (1, 2):
        tables = [shard.table for shard in stored_shards(context, epoch, "rollout")]
        kls.append(np.mean([kl for table in tables for row in table.column("reference_kl").to_pylist() for kl in row]))
        scored = context.store.require(context.chain.require(epoch, "score", "jpeg_compressibility").ref)
        advantage = context.store.require(context.chain.require(epoch, "advantage").ref)
        penalties.append(scored.summary["mean"] - advantage.summary["reward_mean"])
    assert kls[0] == 0.0
    assert kls[1] > 0.0
    assert penalties == pytest.approx([0.0, 100 * kls[1]], rel=1e-5, abs=1e-9)


def test_running_statistics_are_of_penalized_rewards(make_config: Make) -> None:
    # One prompt pass per epoch: every group meets its own past. The penalty dwarfs the rewards.
    context = prepare(
        make_config(
            "advantage={std: running, buffer: 8, min_count: 1, kl_coef: 1e6, floor: max, epsilon: 1e-6, clip: 100}",
            "run.epochs=3",
            "rollout.prompts_per_epoch=8",
            "rollout.group_size=2",
            "optimize.learning_rate=1e-2",
        )
    )
    penalized: dict[str, list[float]] = {}
    for epoch in (1, 2, 3):
        run_epoch(context, epoch)
        ref = context.chain.require(epoch, "advantage").ref
        table = read_rows(context.store, ref)
        for row in table.to_pylist():
            penalized.setdefault(row["group_id"], []).append(row["reward"])
    inputs = context.store.require(ref).inputs
    assert sum("trajectories" in str(item) for item in inputs) == 3
    assert len(penalized) == 8
    for row in table.to_pylist():
        past = np.array(penalized[row["group_id"]])
        expected = (row["reward"] - past.mean()) / max(past.std(), 1e-6)
        assert row["advantage"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_gdpo_takes_the_kl_off_every_reward(make_config: Make) -> None:
    rewards = (
        "rewards=[{name: jpeg_compressibility, weight: 0.5}, {name: 'tests.support.rewards:Constant', weight: 0.1}]"
    )
    advantage = "advantage={aggregation: gdpo, kl_coef: 1000, epsilon: 1e-6, floor: max, clip: 100}"
    context = prepare(make_config(rewards, advantage, "optimize.learning_rate=1e-2"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    refs = [context.chain.require(2, "score", section.slot).ref for section in context.config.rewards]
    scores = [read_rows(context.store, ref).column("reward").to_pylist() for ref in refs]
    table = stage_rows(context, 2, "advantage").to_pandas()
    penalty = 0.5 * np.array(scores[0]) + 0.1 * np.array(scores[1]) - table.reward.to_numpy()
    assert penalty.min() > 0
    divisor: dict[str, Any] = {"epsilon": 1e-6, "floor": "max", "unbiased": False}
    expected = slow.gdpo(scores, [0.5, 0.1], table.group_id.tolist(), penalty.tolist(), **divisor)
    assert table.advantage.tolist() == pytest.approx(expected, rel=1e-2, abs=1e-3)
    without = slow.gdpo(scores, [0.5, 0.1], table.group_id.tolist(), [0.0] * 16, **divisor)
    assert np.abs(np.array(without) - expected).max() > 0.1


def test_a_kl_to_the_moving_average(make_config: Make) -> None:
    options = "optimize.algorithm.options={clip_range: 0.01, kl_coef: 0.1, kl_reference: average}"
    context = prepare(make_config(options, "optimize.ema={decay: 0.9}", "optimize.updates_per_epoch=4"))
    run_epoch(context, 1)
    updates = updates_of(context, 1)
    assert updates[0]["kl"] == 0.0
    assert updates[-1]["kl"] > 0.0
    with pytest.raises(ConfigError, match=r"optimize\.ema is not set"):
        check_config(make_config(options))


def test_reference_velocities_are_computed_once_per_row_and_epoch(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowmill.models.policies.diffusion import TrainableDenoiser

    calls: list[int] = []
    original = TrainableDenoiser.reference_velocity

    def counted(self: TrainableDenoiser, latents: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(len(latents))
        return original(self, latents, *arguments)

    monkeypatch.setattr(TrainableDenoiser, "reference_velocity", counted)
    options = ["optimize.algorithm.options.kl_coef=0.1", "optimize.inner_epochs=3", "optimize.updates_per_epoch=1"]
    context = prepare(make_config(*options))
    run_epoch(context, 1)
    # 32 rows in micro-batches of 16, however often the epoch passes over them.
    assert calls == [16, 16]


def test_the_optimizer_goes_on_over_epochs(make_config: Make) -> None:
    context = prepare(make_config())
    for epoch in (1, 2):
        run_epoch(context, epoch)
    second = context.store.require(context.policy_ref(2))
    assert [update["update"] for update in second.summary["updates"]] == [3, 4]
    moments = load_file(policy_folder(context.store, context.policy_ref(2)) / "optimizer.safetensors")
    assert {float(value) for key, value in moments.items() if key.startswith("step/")} == {4.0}


def test_zero_advantages_cost_no_forward_and_leave_the_policy(make_config: Make) -> None:
    context = prepare(make_config("rewards=[{name: 'tests.support.rewards:Constant'}]"))
    reported: list[str] = []
    context.reporter.message = reported.append  # type: ignore[method-assign]
    run_epoch(context, 1)
    assert summary_of(context, 1, "advantage")["zero_std_ratio"] == 1.0
    assert updates_of(context, 1) == []
    assert "nothing to learn" in reported[-1]
    run_epoch(context, 2)


def test_a_nan_reward_stops_before_training_and_keeps_the_rollouts(make_config: Make) -> None:
    context = prepare(make_config("rewards=[{name: 'tests.support.rewards:NotANumber'}]"))
    with pytest.raises(RewardError, match="not finite"):
        run_epoch(context, 1)
    assert context.chain.require(1, "rollout")
    assert context.chain.find(1, "optimize") is None


def test_a_loss_that_is_not_finite_is_never_trained_on(make_config: Make) -> None:
    context = prepare(make_config("optimize.algorithm.options.kl_coef=1e38", "optimize.learning_rate=1e3"))
    with pytest.raises(FlowmillError, match="would destroy the policy"):
        run_epoch(context, 1)
    assert context.chain.find(1, "optimize") is None


def test_damaged_trajectories_are_never_trained_on(make_config: Make) -> None:
    context = prepare(make_config())
    collect(context)
    tar = next((Path(context.store.root.uri) / "trajectories").rglob("samples.tar"))
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(bytes(data))
    with pytest.raises(CorruptError, match=r"samples\.tar has checksum"):
        execute(open_run(context.store.root.uri, "small"), "optimize", 1)


def test_embeddings_are_computed_once_ever(make_config: Make, tmp_path: Path) -> None:
    first = prepare(make_config())
    assert "encode" in first.ledger.stages()
    (tmp_path / "train.txt").write_text("".join(f'"{n:02d}"\n' for n in range(10)))
    second = prepare(make_config("run.name=more"))
    cache = ArtifactRef.parse(second.chain.require(0, "encode").artifact)
    rows = [record.rows for record in second.store.records(cache)]
    assert sorted(rows) == [2, 11]
    third = prepare(make_config("run.name=same"))
    assert "encode" not in third.ledger.stages()


def test_whole_numbers_of_conditioning_are_not_rounded(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache:
        def load(self, conditions: list[str]) -> Rows:
            return Rows({"prompt_embeds": np.ones((1, 2), np.float32), "text_ids": np.arange(512)[None]})

    monkeypatch.setattr(RunContext, "embeddings", Cache())
    context = begin_run(make_config("model.dtype=bfloat16"))
    rows = conditioning_of(context, session_of(context).host, [StoredPrompt(id="p", text="a cat")]).positive
    assert rows["prompt_embeds"].dtype == torch.bfloat16
    assert rows["text_ids"].tolist() == [list(range(512))]


def test_a_run_of_this_name_with_other_settings_is_refused(make_config: Make, tmp_path: Path) -> None:
    begin_run(make_config())
    begin_run(make_config("run.epochs=9", "execution.micro_batch_size=4"))
    with pytest.raises(RunConflictError, match=r"optimize\.learning_rate: 0\.001 -> 0\.5") as error:
        begin_run(make_config("optimize.learning_rate=0.5"))
    assert "--name" in str(error.value)
    (tmp_path / "train.txt").write_text('"11"\n"12"\n"13"\n"14"\n')
    with pytest.raises(RunConflictError, match="other prompts now"):
        begin_run(make_config())


@pytest.mark.slow
def test_finished_is_known_without_a_model_and_forgotten_when_anything_changes(make_config: Make) -> None:
    context = prepare(make_config("model.path=null", "model.build={name: digits, options: {steps: 1, vae_steps: 1}}"))
    assert finished_result(context) is None
    mark_finished(context, describe_result(context))
    assert finished_result(context) is not None
    assert not finished_result(
        RunContext(context.store, make_config("model.path=null", "run.epochs=3", _BUILD), context.run)
    )
    evaluate(context, 0, "beside")
    assert finished_result(context) is not None, "what stands beside the run does not matter"
    execute(context, "policy", 0, force=True)
    assert finished_result(context) is None
    mark_finished(context, describe_result(context))
    assert finished_result(context) is not None


_BUILD = "model.build={name: digits, options: {steps: 1, vae_steps: 1}}"


def test_a_stage_says_which_epochs_it_has(make_config: Make) -> None:
    context = prepare(make_config())
    with pytest.raises(ConfigError, match="leave --epoch out"):
        make_stage(context, "base", 2)
    with pytest.raises(ConfigError, match="--epoch 1 or later"):
        make_stage(context, "rollout", 0)
    with pytest.raises(ConfigError, match="Did you mean 'rollout'"):
        make_stage(context, "rolout", 1)


@pytest.mark.parametrize("lora", [False, True])
def test_the_export_loads_in_plain_diffusers_and_draws_the_evaluation_images(
    make_config: Make, tiny_base: Path, lora: bool
) -> None:
    from diffusers import StableDiffusion3Pipeline

    from flowmill.tasks.inputs.weight_sources import exported_folder
    from flowmill.tasks.runs.seeds import derive, generator
    from flowmill.tasks.specs.graph import Node

    extra = ["model.lora={rank: 2, alpha: 8}", "optimize.learning_rate=3e-2"] if lora else []
    context = prepare(make_config("evaluate.samples=8", "optimize.ema={decay: 0.5}", *extra))
    run_epoch(context, 1)
    evaluate(context, 1)
    execute(context, "export", 1)
    folder = exported_folder(context.store, context.chain.target(Node(1, "export")))
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_base if lora else folder)
    if lora:
        pipeline.load_lora_weights(folder)
    shard = stored_shards(context, 1, "evaluate")[1]
    rows = shard.table.to_pylist()
    assert rows[0]["seed"] == derive(0, "evaluate", rows[0]["prompt_id"], 0)
    images = pipeline(
        [row["prompt"] for row in rows],
        generator=[generator(row["seed"]) for row in rows],
        sigmas=[1.0, 2 / 3, 1 / 3],
        guidance_scale=1.0,
        max_sequence_length=1,
        height=16,
        width=32,
        output_type="np",
    ).images
    stored = np.stack([shard.media(row) for row in range(8)]).astype(int)
    assert np.abs((images * 255).round() - stored).max() <= 1
    execute(context, "evaluate", 0)
    base = stored_shards(context, 0, "evaluate")[1]
    assert any(np.any(base.media(row) != shard.media(row)) for row in range(8))


@pytest.mark.parametrize("lora", [False, True])
def test_no_artifact_holds_a_path_of_this_machine(
    make_config: Make, tmp_path: Path, tiny_base: Path, lora: bool
) -> None:
    context = prepare(make_config(*["model.lora={rank: 2, alpha: 8}"] * lora))
    run_epoch(context, 1)
    evaluate(context, 1)
    execute(context, "export", 1)
    for record in Path(context.store.root.uri).rglob("_shards/*.json"):
        for path in (path for path in record.parent.parent.glob(f"{record.stem}-*/**/*") if path.is_file()):
            content = path.read_bytes()
            assert str(tmp_path).encode() not in content, path
            assert str(tiny_base).encode() not in content, path


def test_rollout_shards_are_scored_while_others_are_missing(make_config: Make) -> None:

    context = prepare(make_config())
    rollout = stage_run(context, "rollout", 1)
    stage = make_stage(context, "score", 1, "jpeg_compressibility")
    assert isinstance(rollout.stage, RolloutStage)
    stage.follow(rollout.stage)
    scores = StageRun(stage)
    first = rollout.pending()[0]
    rollout.run_shard(first)
    scores.run_shard(next(shard for shard in scores.pending() if shard.name == first.name))
    assert [record.shard for record in context.store.records(scores.ref)] == [first.name]
    with pytest.raises(FlowmillError, match="which stage 'score' reads"):
        scores.run_shard(Shard("000002-000004"))


def test_what_was_just_made_is_scored_without_decoding_it(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = prepare(make_config(f"store.root={tmp_path / 'other'}"))
    execute(other, "rollout", 1)
    slot = "jpeg_compressibility"
    decoded = open_run(other.store.root.uri, "small")
    stored = decoded.store.require(execute(decoded, "score", 1, slot))
    monkeypatch.setattr(
        "flowmill.storage.trajectories.base.decode", lambda *arguments, **options: pytest.fail("decoded")
    )
    context = prepare(make_config())
    execute(context, "rollout", 1)
    assert context.store.require(execute(context, "score", 1, slot)).digest == stored.digest
    with pytest.raises(FlowmillError, match="raised Failed: decoded"):
        execute(open_run(context.store.root.uri, "small"), "score", 1, slot, force=True)


def test_metadata_reaches_rewards(make_config: Make, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f'"{n:02d}"', "wanted": n}) for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    source = f"prompts.train={tmp_path / 'train.jsonl'}"
    context = prepare(make_config(source, "rewards=[{name: 'tests.support.rewards:Wanted'}]", "prompts.heldout=null"))
    run_epoch(context, 1)
    mean = summary_of(context, 1, "score", "tests.support.rewards:Wanted")["mean"]
    assert mean == pytest.approx(sum(p.metadata["wanted"] for p in make_stage(context, "rollout", 1).groups) / 4)
