"""Arguments passed by a training stage to the loop: its inputs, its plan, the behavior policy, and when it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowmill.configs.load import load_config
from flowmill.tasks.algorithms.base import RowLoss
from flowmill.tasks.algorithms.diffusion import DiffusionBatch, DiffusionModels
from flowmill.tasks.algorithms.grpo import GRPO
from flowmill.tasks.inputs.weight_sources import policy_folder
from flowmill.tasks.modalities.rows import Units, micro_batches
from flowmill.tasks.modalities.sample_set import Correctable, SampleSet
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runtime.ranks import Ranks
from flowmill.tasks.stages.optimize import OptimizeStage
from flowmill.tasks.stages.stage_run import StageRun
from flowmill.tasks.training import checkpoints
from flowmill.tasks.training import epoch as training
from flowmill.tasks.training.loop import run_updates
from flowmill.tasks.training.state import read_state
from tests.support.inside import Make, collect, make_stage, prepare, run_epoch, training_data, updates_of
from tests.support.language_models import texts_config


def optimize(context: RunContext, epoch: int) -> OptimizeStage:
    made = make_stage(context, "optimize", epoch)
    assert isinstance(made, OptimizeStage)
    return made


@pytest.mark.slow
def test_an_epoch_trains_on_itself_and_on_what_it_replays(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = "optimize.algorithm={name: awm}"
    context = prepare(
        make_config(
            algorithm, "rollout.plan={name: final}", "optimize.updates_per_epoch=3", "execution.micro_batch_size=4"
        )
    )
    on_policy: list[bool] = []
    plans: list[list[Units]] = []
    behavior_velocity, run_updates = DiffusionModels.behavior_velocity, training.run_updates

    def noted(self: DiffusionModels, batch: DiffusionBatch, velocity: torch.Tensor) -> torch.Tensor:
        on_policy.append(self.on_policy)
        return behavior_velocity(self, batch, velocity)

    def planned(state: Any, chosen: Any, models: DiffusionModels, plan: list[Units], **options: Any) -> None:
        plans.append(plan)
        assert len(models.behavior) == len(state.parameters)
        run_updates(state, chosen, models, plan, **options)

    monkeypatch.setattr(DiffusionModels, "behavior_velocity", noted)
    monkeypatch.setattr(training, "run_updates", planned)
    run_epoch(context, 1)
    first = len(micro_batches(plans[0][0], 4))
    assert on_policy[:first] == [True] * first
    assert set(on_policy[first:]) == {False}
    chain, stage = context.chain, optimize(context, 1)
    own = (context.policy_ref(0), chain.require(1, "rollout").ref, chain.require(1, "advantage").ref)
    assert stage.inputs() == own
    data = training_data(context)
    ids = data.samples().reader.sample_ids.to_pylist()
    for number, sample in enumerate(ids):
        expected = [i for i, units in enumerate(plans[0]) if number in units.rows[:, 0].tolist()]
        assert data.updates_of(sample) == expected
    assert sum(len(units.rows) for units in plans[0]) > len(ids) / 2
    collect(context, 2)
    assert optimize(context, 2).inputs() == (
        context.policy_ref(1),
        chain.require(2, "rollout").ref,
        chain.require(2, "advantage").ref,
    )
    on_policy.clear()
    StageRun(optimize(context, 2)).execute()
    assert on_policy[0]


def test_a_replayed_epoch_is_an_input(make_config: Make) -> None:
    context = prepare(make_config("optimize.replay={epochs: 1}", "optimize.updates_per_epoch=1"))
    run_epoch(context, 1)
    collect(context, 2)
    chain = context.chain
    assert optimize(context, 2).inputs() == (
        context.policy_ref(1),
        *(chain.require(epoch, name).ref for epoch in (2, 1) for name in ("rollout", "advantage")),
    )


class Unheard(Ranks):
    """A rank whose sums are its own."""

    def _reduce(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        return values

    def gather(self, value: Any) -> list[Any]:
        # Other ranks have rows, and so names of figures, where this one has none.
        return [value, ["loss", "approx_kl"]] if isinstance(value, list) else [value] * self.world


STALE: dict[str, list[str]] = {
    "grpo": [],
    "flow_dppo": ["optimize.algorithm=flow_dppo", "optimize.inner_epochs=2"],
    # Of a pair, one has advantage 0.
    "fdfo": [
        "optimize.algorithm=fdfo",
        "rollout.plan={name: all, options: {keep_final: true}}",
        "rollout.same_noise=true",
        "rollout.sampler={name: cps, options: {noise_level: 0.1}}",
        "rollout.own_noise=0.1",
        "advantage.mode=positive_only",
    ],
    "texts": [],
    "shared prompts": ["optimize.shared_prompts=true"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STALE)
def test_a_row_is_compared_with_one_policy_on_all_ranks_and_until_the_last_measurement(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    make = make_config if case in ("grpo", "flow_dppo", "fdfo") else partial(texts_config, tmp_path)
    settings = ["optimize.replay={epochs: 1}", "optimize.updates_per_epoch=4", "execution.micro_batch_size=8"]
    context = prepare(make(*settings, *STALE[case]))
    run_epoch(context, 1)
    collect(context, 2)
    stage = optimize(context, 2)
    old: dict[tuple[int, int], list[float]] = {}
    correcting, recomputed, read = list[bool](), set[tuple[int, int]](), SampleSet.batch

    def noted(self: SampleSet, units: Units, size: int) -> Any:
        batch: Any = read(self, units, size)
        for key, before, row in zip(batch.keys, batch.old_log_probs, range(size), strict=True):
            values = before[batch.mask[row]].tolist() if hasattr(batch, "mask") else [float(before)]
            if correcting:
                assert key in recomputed or batch.age[row] == 0
                assert old.setdefault(key, values) == pytest.approx(values, rel=1e-4, abs=1e-5)
            else:
                recomputed.add(key)
        return batch

    monkeypatch.setattr(SampleSet, "batch", noted)
    for kind in Correctable.__subclasses__():

        def corrected(self: Any, *values: Any, correct: Any = kind.correct) -> None:
            correct(self, *values)
            correcting.append(True)

        monkeypatch.setattr(kind, "correct", corrected)
    for rank, world in ((0, 1), (0, 2), (1, 2), (2, 3)):
        correcting.clear()
        recomputed.clear()
        stage.host.ranks = Unheard(rank, world)
        folder = tmp_path / f"{rank} of {world}"
        folder.mkdir()
        data = training_data(context, 2)
        with training.TrainingEpoch(data, stage.host, stage.ref).updates(folder, {}) as (run, *_):
            run()
        assert set(old) == {*map(tuple, data.samples(stage.host).units(data.algorithm.requires).rows.tolist())}


def handed_models(monkeypatch: pytest.MonkeyPatch) -> list[DiffusionModels]:
    """Note the models each training stage hands to the loop, as they are before its first update."""
    handed: list[DiffusionModels] = []
    run_updates = training.run_updates

    def noted(state: Any, chosen: Any, models: DiffusionModels, plan: list[Units], **options: Any) -> None:
        handed.append(dataclasses.replace(models, behavior=[value.clone() for value in models.behavior]))
        run_updates(state, chosen, models, plan, **options)

    monkeypatch.setattr(training, "run_updates", noted)
    return handed


def test_the_behavior_policy_is_the_one_that_rolled_out(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = handed_models(monkeypatch)
    decaying = "optimize.algorithm={name: nft, options: {decay: {rate: 0.1, maximum: 0.5}}}"
    context = prepare(make_config(decaying, "rollout.plan={name: final}"))
    for epoch in (1, 2):
        run_epoch(context, epoch)
    assert [models.on_policy for models in handed] == [True, False]
    folder = policy_folder(context.store, context.policy_ref(1))
    behavior, newest = (list(load_file(folder / f"{name}.safetensors").items()) for name in ("behavior", "policy"))
    named = [name for name, _ in handed[1].trainable.named_parameters()]
    for name, value in zip(named, handed[1].behavior, strict=True):
        assert torch.equal(value, dict(behavior)[name])
    assert any(not torch.equal(value, dict(newest)[name]) for name, value in behavior)


@pytest.mark.parametrize(("every", "expected"), [(0, []), (2, [2]), (3, [3])])
def test_checkpoints_are_written_every_so_many_updates_but_not_after_the_last(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(checkpoints, "commit_checkpoint", lambda store, ref, done, folder, ranks: saved.append(done))
    context = prepare(make_config("optimize.updates_per_epoch=4", f"execution.checkpoint_every={every}"))
    run_epoch(context, 1)
    assert saved == expected
    summary = context.store.require(context.policy_ref(1)).summary
    assert [entry["update"] for entry in summary["updates"]] == [1, 2, 3, 4]


@pytest.mark.slow_cases("all")
@pytest.mark.parametrize("plan", ["all", "branch"])
def test_the_first_update_uses_what_the_rollout_predicted_without_the_prompt(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    read: list[tuple[str, bool]] = []
    loss = GRPO.loss

    def noted(self: GRPO, batch: DiffusionBatch, models: DiffusionModels) -> RowLoss:
        # Measuring how far an epoch moved the policy needs no gradients.
        if torch.is_grad_enabled():
            read.append((root, getattr(batch, "unconditional", None) is not None))
        return loss(self, batch, models)

    monkeypatch.setattr(GRPO, "loss", noted)
    guided = ("model.guidance_scale=4.5", "optimize.guidance_gradient=conditional", f"rollout.plan={{name: {plan}}}")
    weights = []
    for stored in (False, True):
        root = str(tmp_path / str(stored))
        context = prepare(make_config(f"store.root={root}", f"rollout.unconditional={stored}", *guided))
        for epoch in (1, 2):
            run_epoch(context, epoch)
        weights.append(load_file(policy_folder(context.store, context.policy_ref(2)) / "policy.safetensors"))
    plain, known = ([used for where, used in read if where == str(tmp_path / name)] for name in ("False", "True"))
    assert not any(plain)
    # Two epochs of two updates each, equally many micro-batches in every one.
    quarter = len(known) // 4
    assert known == 2 * [*[True] * quarter, *[False] * quarter]
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 2e-6
    assert sum(float(value.abs().sum()) for value in weights[1].values()) > 0


@pytest.mark.campaign_cases("adamw8bit")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_trainer_kept_in_memory_goes_on_as_one_that_was_read(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    read: list[str] = []
    monkeypatch.setattr(training, "read_state", lambda state, folder: (read.append(root), read_state(state, folder)))
    files: list[list[bytes]] = []
    for again in (False, True):
        root = str(tmp_path / str(again))
        settings = (
            f"store.root={root}",
            "run.epochs=3",
            "optimize.ema={decay: 0.9}",
            f"optimize.optimizer={optimizer}",
        )
        context = prepare(make_config(*settings))
        for epoch in (1, 2, 3):
            context = prepare(make_config(*settings)) if again else context
            run_epoch(context, epoch)
        folder = policy_folder(context.store, context.policy_ref(3))
        files.append([path.read_bytes() for path in sorted(folder.glob("*.safetensors"))])
        assert len(files[-1]) == 3
    assert read == 2 * [str(tmp_path / "True")]
    assert files[0] == files[1]


def test_a_trainer_that_failed_is_not_gone_on_with(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    context = prepare(make_config())
    run_epoch(context, 1)
    collect(context, 2)
    calls: list[int] = []

    def fails(*arguments: Any, **options: Any) -> None:
        run_updates(*arguments, **options)
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the disk is gone")

    monkeypatch.setattr(training, "run_updates", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        StageRun(optimize(context, 2)).execute()
    StageRun(optimize(context, 2)).execute()
    found = context.store.require(context.policy_ref(2)).digest
    fresh = prepare(make_config("store.root=" + str(context.store.root.uri) + "-fresh"))
    run_epoch(fresh, 1)
    run_epoch(fresh, 2)
    assert found == fresh.store.require(fresh.policy_ref(2)).digest


def test_predictions_are_not_used_again_after_a_restart_within_an_epoch(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for stopped in (False, True):
        settings = (
            f"store.root={tmp_path / str(stopped)}",
            *("model.guidance_scale=4.5", "optimize.guidance_gradient=conditional", "rollout.unconditional=true"),
            *("optimize.updates_per_epoch=3", "execution.checkpoint_every=1", "optimize.learning_rate=1e-2"),
        )
        context = prepare(make_config(*settings))
        collect(context, 1)
        if stopped:
            with monkeypatch.context() as patched:
                patched.setattr(training, "run_updates", stopping_after(2))
                with pytest.raises(OSError, match="the disk is gone"):
                    StageRun(optimize(context, 1)).execute()
            context = prepare(make_config(*settings))
        StageRun(optimize(context, 1)).execute()
        digests.append(context.store.require(context.policy_ref(1)).digest)
    assert digests[0] == digests[1]


def stopping_after(updates: int) -> Callable[..., None]:
    """Return a training loop that breaks off when some updates are done, and saved."""

    def run(*arguments: Any, after_update: Callable[[int], None], **options: Any) -> None:
        def after(done: int) -> None:
            after_update(done)
            if done == updates:
                raise OSError("the disk is gone")

        run_updates(*arguments, after_update=after, **options)

    return run


def test_a_transformer_that_no_trained_step_reaches_is_said_once(tmp_path: Path) -> None:
    sizes = ["rollout.prompts_per_epoch=1", "rollout.group_size=2", "model.guidance_scale=1"]
    first_step = "rollout.plan={name: subset, options: {candidates: [0]}}"
    context = prepare(load_config("tiny_wan22", [f"store.root={tmp_path}", first_step, *sizes]))
    said: list[str] = []
    context.reporter.message = said.append  # type: ignore[method-assign]
    for epoch in (1, 2):
        run_epoch(context, epoch)
        for update in updates_of(context, epoch):
            assert update["grad_norm_transformer"] == pytest.approx(update["grad_norm"])
            assert update["grad_norm_transformer_2"] == 0
    assert [text for text in said if "got no gradient" in text] == [
        "epoch 1: transformer_2 of the model got no gradient and stayed as before, as no trained step or noise level "
        "was in its range. To train it too, train steps or levels of that range (rollout.plan or "
        "optimize.algorithm.options.times), or more rows per epoch."
    ]
