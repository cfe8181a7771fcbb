"""Vision-language models: drawn log-probs are those of transformers' own forward of each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pictures import load_processor, pictures_of
from flowmill.models.policies.vision_lm import VisionLM
from flowmill.models.weights.lora import LoraSpec
from tests.support.vision_classes import CLASSES
from tests.support.vision_gaps import CHOICES, NEW, drawn, gaps_of, loaded, prompts_of, replayed, rounding_of, theirs


@pytest.fixture(autouse=True)
def _without_num2words(monkeypatch: pytest.MonkeyPatch) -> None:
    # SmolVLM's processor asks for a package that only counts the frames of clips in words.
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)


@pytest.mark.parametrize("kind", CLASSES)
def test_drawn_and_replayed_log_probs_are_those_of_the_class(kind: str, tmp_path: Path) -> None:
    policy = loaded(tmp_path / kind, kind)
    prompts = prompts_of(policy)
    found = drawn(policy, prompts)
    rows = replayed(prompts, found)
    with torch.no_grad():
        alone = torch.cat([policy.forward(rows[row : row + 1]).logits for row in range(len(rows))])
        assert torch.equal(alone, policy.forward(rows).logits), "a row depends on no other, whatever images it has"
    gaps = gaps_of(policy, prompts, found)
    assert max(gaps.sampler, gaps.replay) < 1e-5
    assert found[0].log_probs != found[1].log_probs, "equal texts with other images of the same size differ"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_in_half_precision_a_replay_differs_from_the_class_by_no_more_than_rounding(kind: str, tmp_path: Path) -> None:
    policy = loaded(tmp_path / kind, kind, dtype=torch.bfloat16)
    prompts = prompts_of(policy)
    found = drawn(policy, prompts)
    gaps = gaps_of(policy, prompts, found)
    rounding = rounding_of(policy, loaded(tmp_path / kind, kind), prompts, found)
    assert max(gaps.sampler, gaps.replay) <= rounding


@pytest.mark.parametrize("kind", CLASSES)
def test_the_loop_is_greedy_generate_token_for_token(kind: str, tmp_path: Path) -> None:
    policy = loaded(tmp_path / kind, kind)
    for numbers, prompt in list(zip(CHOICES, prompts_of(policy), strict=True))[2:4]:
        (ours,) = drawn(policy, [prompt], uniforms=None)
        how = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        given = theirs(policy, numbers, prompt)
        ids = policy.model.generate(**given, **how, suppress_tokens=policy._never.tolist())
        assert ids[0, len(prompt) :].tolist() == ours.ids


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all"])
def test_what_sees_is_frozen_and_the_base_weights_are_found_in_the_files(kind: str, lora: bool, tmp_path: Path) -> None:
    policy = loaded(tmp_path / kind, kind)
    spec = LoraSpec(rank=2, alpha=4, targets=policy.lora_targets, untrained=policy.untrained) if lora else None
    trainable = policy.trainable(spec, seed=0)
    inside = [name for name, _ in trainable.named_parameters()]
    assert all("language_model." in name or "text_model." in name or "lm_head" in name for name in inside)
    whole = len(list(policy.model.get_decoder().parameters())) + (kind != "gemma3")
    assert len(inside) == (2 * 7 * 2 if lora else whole)
    before = trainable.state()
    for parameter in trainable.parameters():
        parameter.data.add_(1.0)
    if not lora:
        trainable.read(None)
        assert all(torch.equal(value, before[name]) for name, value in trainable.state().items())
    prompt = prompts_of(policy)[0]
    trainable.log_probs(torch.tensor([[*prompt, 7, 8]]), 1.0)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in trainable.parameters())


def test_what_sees_can_be_trained(tmp_path: Path) -> None:
    loaded(tmp_path / "vlm", "qwen2_vl")
    policy = VisionLM.load(tmp_path / "vlm", PolicySettings(), frozenset({Part.DENOISER}), {"train_vision": True})
    targets = ("q_proj", "qkv")
    trainable = policy.trainable(LoraSpec(rank=2, alpha=4, targets=targets, untrained=policy.untrained), seed=0)
    prompt = torch.tensor([prompts_of(policy)[2]])
    before = trainable.log_probs(prompt, 1.0)[0].detach()
    for name, parameter in trainable.named_parameters():
        if "qkv.lora_B" in name:
            parameter.data.fill_(0.1)
    trainable.changed()
    # Features are computed before the whole model is called, and merged weights must be new there too.
    after = trainable.log_probs(prompt, 1.0)[0]
    assert not torch.equal(after, before)
    with trainable.reference_adapters():
        assert torch.equal(trainable.log_probs(prompt, 1.0)[0], before)
    after.sum().backward()
    assert all(p.grad is not None for name, p in trainable.named_parameters() if "visual" in name)


@pytest.mark.parametrize(("own", "lora"), [(True, False), (True, True), (False, False)], ids=["own", "lora", "policy"])
def test_a_critic_sees_the_images(own: bool, lora: bool, tmp_path: Path) -> None:
    policy = loaded(tmp_path / "vlm", "qwen2_vl")
    spec = LoraSpec(rank=2, alpha=4, targets=policy.lora_targets, untrained=policy.untrained) if lora else None
    critic = VisionLM.load_critic(tmp_path / "vlm", PolicySettings(), own=own, lora=spec, seed=0, log_probs=own)
    assert any(".lora_" in name for name, _ in critic.named_parameters()) == lora
    assert not any("visual" in name for name, _ in critic.named_parameters())
    critic.policy.model.head.weight.data.fill_(0.1)
    first, other = (torch.tensor([prompt]) for prompt in prompts_of(policy)[:2])
    hidden = [None if own else policy.forward(ids, hidden=True).hidden_states[-1] for ids in (first, other)]
    log_probs = torch.zeros(first.shape) if own else None
    found = [critic.values(ids, each, None, log_probs) for ids, each in zip((first, other), hidden, strict=True)]
    assert not torch.equal(*found), "the same text about another image"
    if own:
        critic.policy.model.surprise.weight.data.fill_(1.0)
        unlikely = torch.zeros(first.shape).index_fill_(1, torch.tensor([first.shape[1] - 2]), -1.0)
        assert not torch.equal(critic.values(first, log_probs=unlikely), found[0]), "the same text, drawn less often"


def test_tokens_of_images_are_never_drawn(tmp_path: Path) -> None:
    policy = loaded(tmp_path / "vlm", "qwen2_vl")
    (prompt,) = prompts_of(policy)[:1]
    given = (torch.tensor([each]) for each in (prompt, [1] * len(prompt), list(range(len(prompt)))))
    logits, _ = policy.next_logits(*given, None)
    config = policy.model.config
    assert torch.softmax(logits, -1)[0, [config.image_token_id, config.video_token_id]].tolist() == [0.0, 0.0]


def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    loaded(tmp_path / "vlm", "qwen2_vl")
    (tmp_path / "vlm" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="a processor without a chat template"):
        load_processor(tmp_path / "vlm")
    (tmp_path / "vlm" / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="the processor of"):
        load_processor(tmp_path / "vlm")


def test_an_image_that_the_processor_cannot_read_is_refused(tmp_path: Path) -> None:
    loaded(tmp_path / "vlm", "qwen2_vl")
    pictures = pictures_of(tmp_path / "vlm")
    number = pictures.number("long", lambda: np.zeros((2, 999, 3), np.uint8))
    with pytest.raises(ConfigError, match=r"an image of 999 x 2 pixels cannot be read .* aspect ratio"):
        pictures.picture(number)
