"""What language models need of a GPU is told from their config alone, role by role."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from flowmill.models.maths.generation import TokenSampling, generate
from flowmill.models.maths.row_tails import RowTails
from flowmill.models.memory import language_models as work_of
from flowmill.models.memory.language_architectures import language_config, meta_language_model
from flowmill.models.memory.language_models import LanguageModelMemory
from flowmill.models.memory.tracing import PeakMemory, forget_gradient
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.addition import character_tokenizer, tiny_model
from flowmill.models.weights.lora import LoraSpec
from flowmill.tasks.checks.memory import estimate_memory, memory_and_notes
from flowmill.tasks.modalities.memory import Memory
from flowmill.tasks.specs.plan import RunPlan
from tests.support.causal_classes import tiny_config
from tests.support.language_models import texts_config

pytestmark = pytest.mark.slow

#: Millions of parameters the models' authors state.
STATED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1544,
    "Qwen/Qwen2.5-7B-Instruct": 7616,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134.5,
}
LORA = LoraSpec(rank=2, alpha=4, targets=("q_proj", "down_proj"))
PPO = ("optimize.algorithm=ppo", "advantage.estimator.options={kl_coef: 0.05}")
ADAPTERS = "model.lora={rank: 2, alpha: 4}"


@pytest.mark.parametrize("name", STATED)
def test_published_models_have_their_stated_size(name: str) -> None:
    module = meta_language_model(language_config(name))
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(STATED[name], rel=0.001)


@pytest.mark.campaign_cases("dtype0-None-True")
@pytest.mark.parametrize(
    ("dtype", "lora", "own"), [(torch.float32, None, True), (torch.bfloat16, None, False), (torch.float32, LORA, True)]
)
def test_tensors_without_content_take_what_real_ones_do(
    tmp_path: Path, dtype: torch.dtype, lora: LoraSpec | None, own: bool
) -> None:
    tiny_model(0, layers=5).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    settings, rows, width = PolicySettings(dtype=dtype), 4, 64
    traced = LanguageModelMemory(language_config(str(tmp_path)), settings, lora, settings, own)
    loaded = CausalLM.load(tmp_path, settings, frozenset({Part.DENOISER}), {})
    policy = loaded.trainable(lora, seed=0)
    critic = CausalLM.load_critic(tmp_path, settings, own=own, lora=lora, seed=0)
    for trained in (policy, critic):
        for parameter in trained.parameters():
            parameter.register_post_accumulate_grad_hook(forget_gradient)
        if trained.merged is not None:
            trained.merged.refresh()
    tail, used = 31, partial(RowTails.of, firsts=[width - 31] * rows, lengths=[width] * rows)
    with PeakMemory() as memory, torch.no_grad():
        ids = torch.full((rows, width), 5)
        policy.log_probs(ids, 1.0, used(ids))
    assert traced.trace(work_of.score, rows, width, tail).peak == pytest.approx(memory.peak, rel=0.05)
    with PeakMemory() as memory:
        ids = torch.full((rows, width), 5)
        if critic.reads_policy:
            log_probs, _, hidden = policy.log_probs_and_hidden(ids, 1.0, used(ids))
        else:
            (log_probs, _), hidden = policy.log_probs(ids, 1.0, used(ids)), None
        (log_probs.square().mean() + critic.values(ids, hidden).square().mean()).backward()
    forecast = traced.trace(work_of.train, rows, width, tail, False, gradient=True).peak
    assert forecast == pytest.approx(memory.peak, rel=0.1)
    with PeakMemory() as memory:
        sampling = TokenSampling(max_new=33, temperature=1.0, eos=frozenset())
        generate(loaded.next_logits, [[1, 5]] * rows, sampling, width=32, uniforms=None, device=torch.device("cpu"))
    said = traced.trace(work_of.go_on, rows, 64)
    cache = 5 * 2 * rows * 64 * 96 * 4
    assert said.retained == pytest.approx(cache, rel=0.05), "autocast leaves keys and values in float32 here"
    assert said.peak == pytest.approx(memory.peak, rel=0.1)


def estimate(folder: Path, *overrides: str) -> Memory:
    found = estimate_memory(RunPlan(texts_config(folder, *overrides)), reference=False)
    assert found is not None
    return found


@pytest.mark.campaign
def test_every_role_has_a_line(tmp_path: Path) -> None:
    numbers = sum(p.numel() for p in tiny_model(0).parameters())
    grpo = estimate(tmp_path)
    assert list(grpo.phases) == ["rollout", "re-score", "optimize"]
    assert list(grpo.lines)[:2] == ["actor", "gradients, moments, averages"]
    assert grpo.lines["actor"] == dict.fromkeys(grpo.phases, 4 * numbers)
    assert grpo.lines["gradients, moments, averages"] == {"optimize": 3 * 4 * numbers}
    assert (grpo.parameters, grpo.trained, grpo.tokens) == (numbers, numbers, 12)
    ppo = estimate(tmp_path, *PPO)
    assert list(ppo.phases) == ["rollout", "re-score", "value", "optimize"]
    backbone = numbers - 16 * 96 + 97
    assert ppo.lines["critic: a copy of its own"] == dict.fromkeys(("value", "optimize"), 4 * backbone)
    assert ppo.lines["reference: a frozen copy"] == dict.fromkeys(ppo.phases, 4 * numbers)
    assert ppo.lines["gradients, moments, averages"] == {"optimize": 3 * 4 * (numbers + backbone)}
    tiny_model(0, layers=9).save_pretrained(tmp_path / "deep")
    deep = estimate(tmp_path, *PPO, f"critic.path={tmp_path / 'deep'}")
    # Six blocks more, of four projections of attention, three of the MLP, and two norms.
    assert deep.lines["critic: a model of its own"]["optimize"] == 4 * (backbone + 6 * 96 * (4 * 96 + 3 * 192 + 2))
    at_work = "logits and activations"
    assert deep.lines[at_work]["optimize"] > 1.5 * ppo.lines[at_work]["optimize"]
    head = estimate(tmp_path, *PPO, "critic.backbone=policy")
    assert head.lines["critic: a head on the actor"]["optimize"] == 4 * 97
    adapted = estimate(tmp_path, *PPO, ADAPTERS)
    assert adapted.lines["reference: the actor, adapters off"] == dict.fromkeys(adapted.phases, 0)
    assert "critic: a copy of its own, with adapters" in adapted.lines
    assert adapted.trained < 0.2 * numbers
    assert sum(adapted.as_dict()[phase] for phase in adapted.phases) == sum(adapted.phases.values())


@pytest.mark.campaign
def test_ranks_that_share_the_weights_hold_less(tmp_path: Path) -> None:
    ranks = ("execution.processes=4", "execution.strategy=fsdp")
    one, four = estimate(tmp_path, *PPO), estimate(tmp_path, *PPO, *ranks)
    state = "gradients, moments, averages"
    assert four.lines[state]["optimize"] == one.lines[state]["optimize"] // 4
    assert four.lines["actor"]["rollout"] == 1.25 * one.lines["actor"]["rollout"], "whole, and this rank's part"
    offloaded = estimate(tmp_path, *PPO, *ranks, "execution.offload=true")
    assert offloaded.lines[state]["optimize"] == 0
    assert offloaded.lines["actor"]["optimize"] < four.lines["actor"]["optimize"]
    moments = estimate(tmp_path, *PPO, "execution.offload=optimizer")
    rest = one.lines[state]["optimize"] - moments.lines[state]["optimize"]
    assert rest == moments.host["offloaded, pinned"] > 8 * one.trained, "of actor and critic"
    parameters = estimate(tmp_path, *PPO, *ranks, "execution.offload=parameters")
    assert parameters.lines["actor"] == offloaded.lines["actor"]
    assert parameters.lines[state]["optimize"] == rest // 4


def test_a_model_that_is_not_known_has_no_estimate(tmp_path: Path) -> None:
    config = texts_config(tmp_path, "model.path=someone/else")
    assert estimate_memory(RunPlan(config), reference=False) is None


def test_reward_models_are_named_and_prompts_without_a_tokenizer_are_bounded(tmp_path: Path) -> None:
    scored = "rewards=[{name: sequence_classification, options: {model: someone/judge}}]"
    (note,) = estimate(tmp_path, scored).notes
    assert "'sequence_classification' is not counted" in note
    published = ("model.path=Qwen/Qwen2.5-0.5B-Instruct", "rollout.tokens.max_prompt=9")
    memory = estimate(tmp_path, *published)
    assert memory.tokens == 16
    assert "up to 9 tokens" in memory.notes[0]


def test_a_class_that_needs_numbers_is_a_note_and_no_traceback(tmp_path: Path) -> None:
    config = texts_config(tmp_path)
    about = tiny_config("mixtral")
    about.save_pretrained(tmp_path / "lm")
    found, notes = memory_and_notes(RunPlan(config), reference=False)
    assert found is None
    assert notes == ["memory: not estimated, as layers of a 'mixtral' cannot be carried out without numbers."]
