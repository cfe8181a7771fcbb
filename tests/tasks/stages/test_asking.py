"""Rewards that are asked while training: what of them a policy depends on, what resumes, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import flowmill.tasks.training.epoch as training
from flowmill.configs.errors import RewardError
from flowmill.configs.schema import RunConfig
from flowmill.models.policies.decoding import recompute_decoder
from flowmill.models.policies.parts import Part
from flowmill.models.rewards.base import Needs
from flowmill.tasks.algorithms.diffusion import Question, StateBatch, Subjects
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.prompts import SOURCE
from flowmill.tasks.inputs.weight_sources import Weights
from flowmill.tasks.modalities.diffusion.trained_rewards import TrainingRewards, rows_at_once
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.diffusion import DiffusionSpec
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import Make, collect, make_stage, prepare, run_stage, session_of, training_data, updates_of
from tests.tasks.stages.test_stages import weights
from tests.tasks.training.test_training_stage import stopping_after

HERE = "tests.tasks.stages.test_asking"
DIGITS = (
    "optimize.algorithm=refl",
    "rollout.plan={name: late, options: {count: 2, low: 1}}",
    "rewards=[digits_network]",
)


class Ink:
    """Dark images are good."""

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return 1 - media.reshape(len(media), -1).mean(1, dtype=np.float32) / 255

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
        return 1 - media.flatten(1).mean(1)


class Cliff(Ink):
    """Its score is a number, its slope is none."""

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
        return torch.sqrt((media * 0).flatten(1).mean(1))


class OfLatents:
    """Large latents are good, as many times as the prompt has letters."""

    needs = Needs(media="latents")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Any) -> np.ndarray:
        return (media**2).reshape(len(media), -1).mean(1)

    def differentiable(self, media: Tensor, prompts: Sequence[str], metadata: Any) -> Tensor:
        lengths = torch.tensor([float(len(prompt)) for prompt in prompts])
        return (media**2).flatten(1).mean(1) * lengths


def digest_of(context: RunContext) -> str | None:
    return context.store.require(context.policy_ref(1)).digest


def held(config: RunConfig) -> tuple[TrainingRewards, Any]:
    context = prepare(config)
    host = session_of(context).host
    host.assemble(context.policy_ref(0), Weights.TRAINED)
    return TrainingRewards(config, host), host


def reported(prompts: Sequence[str], sources: Sequence[str] = ()) -> Subjects:
    metadata = [{SOURCE: name} for name in sources] or [{}] * len(prompts)
    return Subjects(
        prompts=tuple(prompts), metadata=tuple(metadata), samples=tuple(prompts), draws=tuple(range(len(prompts)))
    )


def test_what_is_said_of_latents_and_their_slope_are_those_of_decoder_and_reward(make_config: Make) -> None:
    config = make_config(*DIGITS, "execution.decode_batch_size=2")
    asked, host = held(config)
    assert rows_at_once(config) == 2
    prompts, generator = ['"07"', '"42"', '"42"'], torch.Generator().manual_seed(3)
    latents = torch.randn(3, *host.decoding().initial_latents([generator]).shape[1:], generator=generator)
    latents.requires_grad_()
    questions = [
        Question(prompts=prompts, factor=torch.tensor([2.0, 1.0, 1.0])),
        Question(prompts=['"11"'] * 3, factor=torch.tensor([-1.0, 0.0, -0.5])),
    ]
    found = asked(latents, reported(prompts), questions)
    reward, policy = host.rewards.of(config.rewards[0]), host.decoding()
    images = policy.decode_smoothly(latents)
    parts = [each.factor * reward.differentiable(images, each.prompts, [{}] * 3) for each in questions]
    expected = parts[0] + parts[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # Whatever a loss makes of it: its slope is that of the whole.
    (slope,) = torch.autograd.grad((found**2).sum(), latents, retain_graph=True)
    (whole,) = torch.autograd.grad((expected**2).sum(), latents)
    torch.testing.assert_close(slope, whole, rtol=1e-3, atol=1e-5)
    (of_one,) = torch.autograd.grad(found[0], latents, retain_graph=True)
    # A decoder whose blocks are computed again leads back the same way.
    recompute_decoder(policy.pipeline.vae)
    assert policy.pipeline.vae.is_gradient_checkpointing
    (again,) = torch.autograd.grad(asked(latents, reported(prompts), questions)[0], latents)
    assert torch.equal(again, of_one)
    assert bool(of_one[0].any())
    assert not bool(of_one[1:].any())


def test_rewards_are_weighed_and_say_nothing_of_other_sources(make_config: Make) -> None:
    rewards = f'rewards=[{{name: "{HERE}:OfLatents", weight: 0.5}}, {{name: "{HERE}:OfLatents", label: b, weight: -2}}]'
    config = make_config(*DIGITS[:2], rewards, "rollout.media={format: none, latents: true}")
    check_config(config)
    first, second = config.rewards
    config = config.model_copy(update={"rewards": (first, second.model_copy(update={"sources": ("one",)}))})
    asked, host = held(config)
    latents = torch.ones(3, 2, 2, requires_grad=True)
    own = reported(["a", "bb", "ccc"], ["one", "two", "two"])
    found = asked(latents, own, [Question(prompts=own.prompts, factor=torch.ones(3))])
    torch.testing.assert_close(found, torch.tensor([0.5 - 2, 0.5 * 2, 0.5 * 3]))
    (slope,) = torch.autograd.grad(found.sum(), latents)
    torch.testing.assert_close(slope[:, 0, 0], 2 / 4 * torch.tensor([0.5 - 2, 1.0, 1.5]))
    assert host.loads["vae"] == 0
    none = config.model_copy(update={"rewards": (config.rewards[1],)})
    quiet = TrainingRewards(none, host)(
        latents, reported(["a"] * 3, ["two"] * 3), [Question(prompts=["a"] * 3, factor=found)]
    )
    assert not quiet.any()


def test_a_batch_is_states_of_rollouts_with_what_rewards_are_told(make_config: Make) -> None:
    context = prepare(make_config(*DIGITS, "optimize.algorithm.options.steps=2"))
    collect(context, 1)
    assert Part.VAE in make_stage(context, "optimize", 1).parts
    data, host = training_data(context), session_of(context).host
    host.assemble(context.policy_ref(0), Weights.TRAINED)
    samples = data.samples(host)
    steps = context.config.rollout.steps
    rows = data.plan(samples)[0]
    kept = [samples.reader.states[sample] for sample, _ in rows.rows]
    assert all(states[position] + 2 <= steps for states, (_, position) in zip(kept, rows.rows, strict=True))
    assert samples.positions().tolist() == [
        int((samples.reader.states[sample] <= steps - 2).sum()) for sample in range(len(samples.reader))
    ]
    batch = cast(StateBatch, samples.batch(rows.slice(0, 2), 3))
    (sample, position), about = batch.keys[0], batch.subjects
    assert about is not None
    state, levels = int(samples.reader.states[sample][position]), samples.reader.sigmas[sample]
    np.testing.assert_array_equal(batch.latents[0], samples.reader.array("latents", sample)[position])
    np.testing.assert_allclose(batch.levels[0], levels[state : state + 2])
    assert int(batch.step[0]) == state
    prompt = context.prompts_by_id[samples.reader.prompt_ids[samples.reader.prompt_rows[sample]]]
    assert about.prompts[0] == prompt.text
    assert about.samples[0] == samples.reader.sample_ids[sample].as_py()
    assert len(set(about.draws[:2])) == 2
    assert about.draws[2] == about.draws[1]
    assert cast(StateBatch, samples.batch(rows.slice(0, 1), 1)).subjects == replace(
        about, **{name: getattr(about, name)[:1] for name in ("prompts", "metadata", "samples", "draws")}
    )


@pytest.mark.slow
def test_training_goes_on_after_a_kill_and_does_not_depend_on_micro_batches(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, ends = [], []
    for name, size in (("whole", 4), ("stopped", 4), ("small", 1)):
        settings = (
            *DIGITS,
            f"store.root={tmp_path / name}",
            f"execution.micro_batch_size={size}",
            "optimize.algorithm.options={steps: 2, truncate: true, margin: 1}",
            "optimize.updates_per_epoch=3",
            "execution.checkpoint_every=1",
            "rollout.prompts_per_epoch=1",
        )
        context = prepare(make_config(*settings))
        collect(context, 1)
        if name == "stopped":
            with monkeypatch.context() as patched:
                patched.setattr(training, "run_updates", stopping_after(2))
                with pytest.raises(OSError, match="the disk is gone"):
                    run_stage(context, "optimize", 1)
            context = prepare(make_config(*settings))
        run_stage(context, "optimize", 1)
        digests.append(digest_of(context))
        ends.append(weights(context))
        updates = updates_of(context, 1)
        assert all(update["grad_norm"] > 0 and update["predicted_reward"] < 0 for update in updates)
    assert digests[0] == digests[1]
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[2][name], value, rtol=1e-3, atol=1e-5)


def test_a_policy_depends_on_what_was_asked_and_not_on_how(make_config: Make) -> None:
    identity = DiffusionSpec()
    asked = identity.training_options(RunPlan(make_config(*DIGITS)))
    for same, overrides in (
        (True, ("rewards=[{name: digits_network, batch_size: 3, label: mine, device: cpu}]",)),
        (True, ("execution.decode_batch_size=1", "model.guidance_scale=0.5")),
        (False, ("rewards=[{name: digits_network, weight: 0.5}]",)),
        (False, (f'rewards=[{{name: "{HERE}:Ink"}}]',)),
        (False, ("model.vae_tiling=true",)),
    ):
        other = identity.training_options(RunPlan(make_config(*DIGITS, *overrides)))
        assert (other == asked) is same, overrides
        assert identity.rollout_options(RunPlan(make_config(*DIGITS))).keys() == {"rollout", "model"}
    # What asks no rewards while training is what it was.
    assert identity.training_options(RunPlan(make_config())).keys() == {"sampler"}


def test_a_slope_that_is_no_number_is_told_with_its_sample(make_config: Make) -> None:
    context = prepare(make_config(*DIGITS[:2], f'rewards=[{{name: "{HERE}:Cliff"}}]'))
    collect(context, 1)
    with pytest.raises(RewardError, match=r"gradient of reward '.*Cliff' is not finite for prompt .*sample "):
        run_stage(context, "optimize", 1)
