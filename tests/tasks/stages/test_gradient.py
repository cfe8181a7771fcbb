"""Gradients of rewards as a stage: what is stored, what it depends on, what resumes, and who trains on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError, CorruptError, RewardError
from flowmill.configs.rewards import RewardSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.base import Batch, Needs
from flowmill.storage.layout import ArtifactRef, shard_folder
from flowmill.storage.maintenance.verify import find_problems
from flowmill.storage.trajectories.gradients import PAYLOADS, StoredGradients
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.metrics.describe import describe_run
from flowmill.tasks.modalities.diffusion.reward_gradients import follow
from flowmill.tasks.modalities.modality import RewardGradientRequest
from flowmill.tasks.reports.trace import trace_sample
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.stage_selection import named_stages
from flowmill.tasks.runtime.host import ModelHost
from flowmill.tasks.specs.graph import Node
from tests.support.inside import (
    Make,
    make_stage,
    prepare,
    run_epoch,
    run_stage,
    session_of,
    stage_run,
    stored_shards,
    training_data,
)

HERE = "tests.tasks.stages.test_gradient"
PLAN = ("optimize.algorithm=reward_gradient", "rollout.plan={name: final}")
DIGITS = (*PLAN, "rewards=[digits_network]")
TWO = (*PLAN, f'rewards=[digits_network, {{name: "{HERE}:Ink", weight: 0.5}}]')


class Ink:
    """Dark images are good."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return 1 - media.reshape(len(media), -1).mean(1, dtype=np.float32) / 255

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
        return 1 - media.flatten(1).mean(1)


class Groupwise(Ink):
    """It says it compares."""

    needs = Needs(groupwise=True)


class OfLatents:
    """Large latents are good."""

    needs = Needs(media="latents")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> np.ndarray:
        return (media**2).reshape(len(media), -1).mean(1)

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
        return (media**2).flatten(1).mean(1)


def scored(context: RunContext) -> None:
    """Make everything up to the gradients of the first epoch."""
    run_stage(context, "rollout", 1)
    for section in context.config.scored:
        run_stage(context, "score", 1, section.slot)


def gradient(context: RunContext, slot: str = "digits_network", **options: Any) -> ArtifactRef:
    run = stage_run(context, "gradient", 1, slot, **options)
    run.execute()
    return run.ref


def samples(context: RunContext) -> list[tuple[str, str, np.ndarray]]:
    """Return id, prompt and final latents of the samples of the first epoch."""
    found = []
    for shard in stored_shards(context, 1, "rollout"):
        rows = zip(shard.table["sample_id"].to_pylist(), shard.table["prompt"].to_pylist(), strict=True)
        found += [(sample, prompt, shard.final_latents(row)) for row, (sample, prompt) in enumerate(rows)]
    return found


def test_what_is_stored_is_how_the_reward_changes_with_the_latents(make_config: Make) -> None:
    context = prepare(make_config(*DIGITS))
    scored(context)
    ref = gradient(context)
    stored, host = StoredGradients(context.store, [ref]), session_of(context).host
    policy, reward = cast(Any, host.decoding()), cast(Any, host.rewards.of(context.config.rewards[0]))
    rows = {row["sample_id"]: row for row in read_rows(context.store, ref).to_pylist()}
    for sample, prompt, latents in samples(context)[:3]:
        found = stored.of(sample)
        assert found is not None
        assert found.shape == latents.shape
        assert float(np.sqrt((found**2).mean())) == pytest.approx(stored.rms(sample), rel=1e-3)
        step = 0.02 * found / np.linalg.norm(found)
        with torch.no_grad():
            moved = torch.from_numpy(np.stack([latents + step, latents - step, latents]))
            images = policy.decode_smoothly(policy.clean_latents(moved))
            up, down, here = reward.differentiable(images, [prompt] * 3, [{}] * 3).tolist()
        assert rows[sample]["value"] == pytest.approx(here, abs=1e-4)
        assert (up - down) / 0.04 == pytest.approx(float(np.linalg.norm(found)), rel=0.05)


def test_it_resumes_shard_by_shard_and_does_not_depend_on_the_cuts(make_config: Make, tmp_path: Path) -> None:
    contents, gradients = [], []
    for name, groups in (("one", 1), ("all", 64)):
        config = make_config(*DIGITS, f"store.root={tmp_path / name}", f"rollout.groups_per_shard={groups}")
        context = prepare(config)
        scored(context)
        run = stage_run(context, "gradient", 1, "digits_network")
        shards = run.pending()
        if name == "one":
            assert len(shards) > 1
            run.run_shards(shards[:1])
            run = stage_run(prepare(config), "gradient", 1, "digits_network")
            assert [shard.name for shard in run.pending()] == [shard.name for shard in shards[1:]]
        run.execute()
        manifest = context.store.require(run.ref)
        contents.append(manifest.content)
        stored = StoredGradients(context.store, [run.ref])
        gradients.append({sample: stored.of(sample) for sample, _, _ in samples(context)})
        assert stage_run(context, "gradient", 1, "digits_network").pending() == []
        assert set(manifest.summary) == {"value", "rms"}
    assert contents[0] == contents[1] != ""
    for sample, found in gradients[0].items():
        np.testing.assert_array_equal(found, gradients[1][sample])
    assert find_problems(context.store, deep=True) == []
    again = gradient(context, force=True)
    assert context.store.require(again).content == contents[0]


def test_other_learning_rates_take_the_stored_gradients_and_need_no_decoder(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(make_config(*DIGITS, "run.name=first"))
    run_epoch(first, 1)

    def refused(*_: Any) -> None:
        raise AssertionError("a decoder or a reward was asked for")

    rates = [first]
    with monkeypatch.context() as patched:
        for name in ("decode", "decode_smoothly", "decoded"):
            patched.setattr(f"flowmill.models.policies.sd3.SD3.{name}", refused)
        for name in ("score", "differentiable", "__post_init__"):
            patched.setattr(f"flowmill.models.rewards.digits_network.DigitsNetwork.{name}", refused)
        for number, rate in enumerate((1e-4, 1e-2)):
            context = prepare(make_config(*DIGITS, f"run.name=other{number}", f"optimize.learning_rate={rate}"))
            run_epoch(context, 1)
            rates.append(context)
    nodes = [node for node in first.plan.nodes() if node.epoch == 1 and node.stage in ("rollout", "gradient")]
    assert [node.stage for node in nodes] == ["rollout", "gradient"]
    for node in nodes:
        assert len({context.chain.require(*node).artifact for context in rates}) == 1, node
    policies = {context.chain.require(1, "optimize").artifact for context in rates}
    assert len(policies) == 3
    taken = str(first.chain.require(1, "gradient", "digits_network").ref)
    for name in policies:
        assert taken in first.store.require(ArtifactRef.parse(name)).inputs
    ref, (sample, _, _) = first.chain.require(1, "rollout").ref, samples(first)[0]
    traced = trace_sample(first.store, ref, sample, [first])["runs"]["first"]
    gradients = StoredGradients(first.store, [ArtifactRef.parse(taken)])
    assert traced["gradients"]["digits_network"]["rms"] == gradients.rms(sample) > 0
    assert {update["policy"] for update in traced["updates"]} == {first.chain.require(1, "optimize").artifact}
    made = [stage["stage"] for stage in describe_run(rates[1])["stages"] if stage["epoch"] == 1]
    assert "gradient" in made


def test_gradients_of_several_rewards_are_summed_by_weight(make_config: Make) -> None:
    context = prepare(make_config(*TWO, "run.name=two"))
    scored(context)
    ink = context.config.rewards[1].slot
    refs = [gradient(context), gradient(context, ink)]
    run_stage(context, "advantage", 1)
    data, host = training_data(context), session_of(context).host
    host.assemble(context.policy_ref(0), Weights.TRAINED)
    found = data.samples(host)
    units = data.plan(found)[0].slice(0, 2)
    batch = cast(Any, found.batch(units, 2))
    stored = [StoredGradients(context.store, [ref]) for ref in refs]
    for row, (sample, _) in enumerate(batch.keys):
        name = found.reader.sample_ids[sample].as_py()
        one, other = (each.of(name) for each in stored)
        assert one is not None
        assert other is not None
        np.testing.assert_allclose(batch.gradients[row].numpy(), one + 0.5 * other, rtol=1e-5, atol=1e-9)
    # The weight is of training: another makes another policy, of the same gradients.
    heavy = prepare(make_config(*TWO[:2], TWO[2].replace("0.5", "0.25"), "run.name=heavy"))
    for slot in ("digits_network", ink):
        node = Node(1, "gradient", slot)
        assert heavy.chain.ref(node) == context.chain.ref(node)
    assert heavy.chain.ref(Node(1, "optimize")) != context.chain.ref(Node(1, "optimize"))
    assert [node.slot for node in named_stages(context, Node(1, "gradient"))] == ["digits_network", ink]


def test_samples_of_other_sources_have_no_gradient_and_are_left_out(make_config: Make, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("".join(f'"{number}{len(name)}"\n' for number in range(2)))
    sources = ", ".join(f"{{name: {name}, train: {tmp_path / name}.txt}}" for name in ("one", "two"))
    rewards = f'rewards=[{{name: digits_network, sources: [one]}}, {{name: "{HERE}:Ink", weight: 0, sources: [two]}}]'
    prompts = (f"prompts={{sources: [{sources}]}}", "rollout.prompts_per_epoch=2")
    context = prepare(make_config(*PLAN, *prompts, rewards))
    scored(context)
    ref = gradient(context)
    gradient(context, context.config.rewards[1].slot)
    rows = read_rows(context.store, ref).to_pylist()
    asked = [row for row in rows if row["value"] is not None]
    assert 0 < len(asked) < len(rows)
    for row in rows:
        assert (row["offset"] >= 0) == (row["value"] is not None) == (row["rms"] > 0)
    run_stage(context, "advantage", 1)
    data = training_data(context)
    trained = {int(sample) for sample, _ in data.samples().units(data.algorithm.requires).rows}
    assert len(trained) == len(asked)


def test_a_reward_of_latents_needs_no_decoder(make_config: Make) -> None:
    media = ("rollout.media={format: none, latents: true}", f'rewards=[{{name: "{HERE}:OfLatents"}}]')
    config = make_config(*PLAN, *media)
    check_config(config)
    context = prepare(config)
    scored(context)
    stage = make_stage(context, "gradient", 1, config.rewards[0].slot)
    assert stage.parts == frozenset()
    stored = StoredGradients(context.store, [gradient(context, config.rewards[0].slot)])
    for sample, _, latents in samples(context):
        np.testing.assert_allclose(stored.of(sample), 2 * latents / latents.size, rtol=2e-3, atol=1e-6)
    assert session_of(context).host.loads["vae"] == 0


def test_damage_is_found_and_named(make_config: Make) -> None:
    context = prepare(make_config(*DIGITS))
    scored(context)
    ref = gradient(context)
    record = context.store.shards(ref)[0]
    file = Path(context.config.store.root) / shard_folder(ref, record.shard, record.digest) / PAYLOADS
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[3] ^= 255
    file.write_bytes(data)
    problems = find_problems(context.store, deep=True)
    assert [(problem.ref, problem.kind) for problem in problems] == [(ref, "corrupt")]
    with pytest.raises(CorruptError, match=PAYLOADS):
        StoredGradients(context.store, [ref]).of(samples(context)[0][0])
    with pytest.raises(CorruptError, match="no gradient of sample missing"):
        StoredGradients(context.store, [ref]).rms("missing")


def test_runs_without_gradients_have_no_such_stage(make_config: Make) -> None:
    context = prepare(make_config())
    assert all(node.stage != "gradient" for node in context.plan.nodes())
    with pytest.raises(ConfigError, match=r"no stage 'gradient': its optimize\.algorithm"):
        make_stage(context, "gradient", 1, "digits_network")
    watched = prepare(make_config(*DIGITS, "monitors=[{name: digits, label: watched}]", "run.name=watched"))
    with pytest.raises(ConfigError, match="monitors are only watched"):
        make_stage(watched, "gradient", 1, "watched")


class Clips:
    """A host with a decoder whose clips have the frames x, 2 x and 3 x of latents x, and a reward."""

    def __init__(self, reward: Any) -> None:
        self.device = torch.device("cpu")
        self.rewards = SimpleNamespace(of=lambda section: reward, at_work=lambda made: nullcontext())

    def decoding(self) -> Any:
        return SimpleNamespace(
            clean_latents=lambda latents: latents,
            decode_smoothly=lambda latents: torch.stack([factor * latents for factor in (1.0, 2.0, 3.0)], 1),
        )


def followed(config: RunConfig, reward: Any, **options: Any) -> Any:
    section = RewardSection(name="mine", batch_size=2, **options)
    media = np.arange(1, 37, dtype=np.float32).reshape(3, 3, 2, 2)
    batch = Batch(media=media, prompts=["a", "b", "c"], metadata=[{}] * 3)
    return follow(RewardGradientRequest(config=config, host=cast(ModelHost, Clips(reward)), section=section), batch)


@pytest.mark.parametrize(("options", "factor"), [({}, 2.0), ({"frames": 2}, 2.0), ({"frames": "first"}, 1.0)])
def test_of_clips_the_frames_are_followed_that_are_scored(
    make_config: Make, options: dict[str, Any], factor: float
) -> None:
    found = followed(make_config(), Ink(), **options)
    np.testing.assert_allclose(found.gradients, np.full((3, 3, 2, 2), -factor / 12), rtol=1e-6)
    means = np.arange(1, 37, dtype=np.float32).reshape(3, 12).mean(1)
    np.testing.assert_allclose(found.values, 1 - factor * means, rtol=1e-6)


class Broken(Ink):
    """The test defines its gradient."""

    def __init__(self, differentiable: Callable[[Tensor], Any]) -> None:
        self._made = differentiable

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Any) -> Any:
        return self._made(media)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda media: media.mean(), r"returned a Tensor of shape \(\)"),
        (lambda media: media.flatten(1).mean(1).detach(), "depends on the samples"),
        (lambda media: [0.0] * len(media), "returned a list"),
        (lambda media: media.flatten(1).mean(1) / 0, "returned inf"),
        (lambda media: (media.flatten(1).mean(1) * 0).sqrt(), "is not finite for prompt 'a'"),
        (lambda media: media.no_such_method(), "failed for .*AttributeError"),
    ],
)
def test_what_is_no_gradient_is_an_error_that_names_the_sample(make_config: Make, made: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        followed(make_config(), Broken(made))
