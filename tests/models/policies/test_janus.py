"""Janus: drawn images, and the log-probs of both branches of guidance, are those of transformers' own calls."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowmill.configs.errors import ConfigError, EngineError
from flowmill.models.engines.local import LocalEngine
from flowmill.models.maths.generation import Completion, TokenSampling, generate, reading_once
from flowmill.models.policies.janus import LEAST_SCALE, Janus, JanusSettings, TrainableJanus
from flowmill.models.policies.parts import Part
from flowmill.models.weights.lora import LoraSpec, within
from flowmill.tasks.modalities.tokens.gap import check_gap
from tests.support.unified_models import write_unified_model

#: Prompts of two lengths: begin, characters, begin of image.
PROMPTS = [[1, 16, 10, 8, 16, 3], [1, 16, 10, 8, 16, 3], [1, 7, 3], [1, 16, 7, 13, 16, 3]]
TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("unified")
    write_unified_model(made)
    return made


def loaded(folder: Path, scale: float, **settings: Any) -> Janus:
    return Janus.load(folder, JanusSettings(guidance_scale=scale, **settings), frozenset({Part.DENOISER}), {})


def drawn(policy: Janus, *, greedy: bool, distinct: int = 3) -> list[Completion]:
    uniforms = torch.rand(len(PROMPTS), TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return generate(
        reading_once(policy.next_logits, distinct),
        PROMPTS,
        TokenSampling(max_new=TOKENS, temperature=1.0, eos=policy.eos),
        width=9,
        uniforms=None if greedy else lambda position: uniforms[:, position],
        device=torch.device("cpu"),
    )


def rows_of(found: list[Completion]) -> torch.Tensor:
    rows = torch.zeros(len(PROMPTS), 32, dtype=torch.int64)
    for number, (prompt, each) in enumerate(zip(PROMPTS, found, strict=True)):
        rows[number, : len(prompt) + TOKENS] = torch.tensor([*prompt, *each.ids])
    return rows


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_greedy_images_are_those_of_generate(scale: float, folder: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    policy, plain = loaded(folder, scale), AutoModelForImageTextToText.from_pretrained(folder)
    found = drawn(policy, greedy=True)
    assert found[0].ids == found[1].ids
    for prompt, each in list(zip(PROMPTS, found, strict=True))[1:]:
        given = torch.tensor([prompt])
        called = {"generation_mode": "image", "guidance_scale": max(scale, LEAST_SCALE), "do_sample": False}
        ids = plain.generate(given, attention_mask=torch.ones_like(given), **called)
        assert each.finish == "length"
        assert [token - policy.texts for token in each.ids] == ids[0].tolist()
        pixels = plain.decode_image_tokens(ids).detach().permute(0, 3, 1, 2).numpy()
        processor = AutoProcessor.from_pretrained(folder)
        (image,) = processor.postprocess(list(pixels), return_tensors="PIL.Image.Image")["pixel_values"]
        assert np.array_equal(policy.decode(torch.tensor([each.ids]))[0].numpy(), np.asarray(image))


def test_log_probs_are_of_the_guided_distribution_that_was_drawn_from(folder: Path) -> None:
    policy = loaded(folder, 3.0)
    found = drawn(policy, greedy=False)
    again = drawn(policy, greedy=False, distinct=4)
    assert [each.ids for each in again] == [each.ids for each in found]
    rows, trainable = rows_of(found), policy.trainable(None, seed=0)
    with torch.no_grad():
        log_probs, entropy = trainable.log_probs(rows, 1.0)
        alone = torch.cat([trainable.log_probs(row[None], 1.0)[0] for row in rows])
    assert torch.allclose(alone, log_probs, atol=1e-5)
    for number, (prompt, each) in enumerate(zip(PROMPTS, found, strict=True)):
        own = log_probs[number, len(prompt) : len(prompt) + TOKENS]
        assert float((own - torch.tensor(each.log_probs)).abs().max()) < 1e-5
        codes = torch.tensor([each.ids]) - policy.texts
        followed, blank = (_branch(policy.model, ids, codes) for ids in (prompt, [1, *[0] * (len(prompt) - 2), 3]))
        expected = torch.log_softmax(blank + 3.0 * (followed - blank), -1)
        assert torch.allclose(own, expected.gather(-1, codes[0][:, None])[:, 0], atol=1e-5)
        spread = -(expected.exp() * expected).sum(-1)
        assert torch.allclose(entropy[number, len(prompt) : len(prompt) + TOKENS], spread, atol=1e-4)
        unguided = torch.log_softmax(followed, -1).gather(-1, codes[0][:, None])[:, 0]
        assert float((unguided - own).abs().max()) > 1e-2, "log-probs without guidance are of another distribution"


@torch.no_grad()
def _branch(model: Any, prompt: list[int], codes: torch.Tensor) -> torch.Tensor:
    """Return the (N, K) logits of an image after a prompt, by the model's parts."""
    words = model.get_input_embeddings()(torch.tensor([prompt]))
    given = torch.cat([words, model.prepare_embeddings_for_image_generation(codes[:, :-1])], 1)
    states = model.model.language_model(inputs_embeds=given).last_hidden_state
    logits: torch.Tensor = model.model.generation_head(states)[0, len(prompt) - 1 :]
    return logits


@pytest.mark.parametrize("targets", [None, ("q_proj", "fc1")])
def test_both_branches_are_trained_and_nothing_else(targets: tuple[str, ...] | None, folder: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = loaded(folder, 3.0, gradient_checkpointing=checkpointing)
        lora = None if targets is None else LoraSpec(rank=2, alpha=2, targets=targets, untrained=policy.untrained)
        trainable: TrainableJanus = policy.trainable(lora, seed=0)
        rows = rows_of(drawn(policy, greedy=True))
        log_probs, _ = trainable.log_probs(rows, 1.0)
        log_probs[:, 6:19].sum().backward()
        found = {name: parameter.grad for name, parameter in trainable.named_parameters()}
        assert all(gradient is not None for gradient in found.values())
        assert not [name for name in found if within(name, policy.untrained)]
        assert policy.blocks == ("model.language_model.layers",)
        gradients.append(found)
        if lora is not None:
            assert torch.allclose(trainable.reference_log_probs(rows, 1.0), log_probs, atol=1e-6)
    first, second = gradients
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_guidance_may_round_as_much_more_as_its_scale(folder: Path) -> None:
    drawn_ones = [Completion(ids=[30], log_probs=[-1.0])]
    for scale, refused in ((1.0, True), (5.0, False)):
        policy = loaded(folder, scale, dtype=torch.bfloat16)
        with pytest.raises(EngineError) if refused else nullcontext():
            check_gap(LocalEngine(), policy, [3], drawn_ones, [torch.tensor([-1.5])])


def test_a_folder_without_the_tokens_of_images_is_refused(tmp_path: Path) -> None:
    write_unified_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 1, "pad_token_id": 0}')
    with pytest.raises(ConfigError, match=r"without bos_token_id, pad_token_id or generation_kwargs\.boi_token_id"):
        loaded(tmp_path, 1.0)
