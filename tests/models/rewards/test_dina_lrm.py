"""DiNa-LRM reads the states that the pipeline's own transformer has, and its head is its formula."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.models.rewards.dina_lrm import RewardHead
from flowmill.models.rewards.factory import make_reward
from tests.support.published_rewards import write_dina


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> dict[str, Any]:
    found = write_dina(tmp_path_factory.mktemp("dina"), tiny_base)
    return {**found, "taps": (1,), "dtype": "float32", "max_sequence_length": 1}


LATENTS = np.random.default_rng(0).standard_normal((3, 4, 8, 8), np.float32)
PROMPTS = ['"11"', '"22"', '"33"']


def test_the_states_are_those_that_the_transformer_itself_passes_through(options: dict[str, Any]) -> None:
    from diffusers import SD3Transformer2DModel
    from peft import PeftModel

    reward = make_reward("dina_lrm", options)
    whole = SD3Transformer2DModel.from_pretrained(Path(options["model"]) / "transformer")
    whole.transformer_blocks = whole.transformer_blocks[:1]
    adapted = PeftModel.from_pretrained(whole, options["adapter"])
    seen: list[Tensor] = []
    whole.transformer_blocks[0].register_forward_hook(lambda module, args, output: seen.extend(output))
    sigma, time = reward._sigma, reward._timestep
    assert sigma == pytest.approx(0.4, abs=2e-3)
    assert time == pytest.approx(1000 * sigma)
    noise = torch.randn((4, 8, 8), generator=torch.Generator().manual_seed(0))
    encoded = reward._policy.encode(PROMPTS)
    with torch.no_grad():
        adapted(
            hidden_states=(1 - sigma) * torch.from_numpy(LATENTS) + sigma * noise,
            encoder_hidden_states=encoded["prompt_embeds"],
            pooled_projections=encoded["pooled"],
            timestep=torch.full((3,), time),
        )
        text, image = seen
        embedded = whole.time_text_embed(torch.full((3,), time), encoded["pooled"])
        expected = (reward._head([image], [text], embedded) + 10) / 10
    np.testing.assert_allclose(reward.score(LATENTS, PROMPTS, [{}] * 3).values, expected.numpy(), atol=1e-6)


def test_the_head_is_its_formula() -> None:
    """Query by query and token by token, in float64."""
    torch.manual_seed(0)
    head = RewardHead(width=16, taps=2).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images, texts = ([torch.randn(2, n, 16).double() for _ in range(2)] for n in (5, 3))
    time = torch.randn(2, 16).double()

    def narrowed(layers: Any, states: list[Tensor], row: int) -> Tensor:
        parts = []
        for layer, each in zip(layers, states, strict=True):
            gamma, beta = layer.cond_mlp(time[row]).chunk(2)
            parts.append(layer.proj(each[row] * (1 + gamma) + beta + layer.layer_embed[0, 0]))
        return torch.cat(parts, -1)

    def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = []
        for part in range(8):
            own = slice(2 * part, 2 * part + 2)
            weights = torch.softmax(torch.stack([query[own] @ key[own] / math.sqrt(2) for key in keys]), 0)
            found.append(sum(w * v[own] for w, v in zip(weights, values, strict=True)))
        return torch.cat(found)

    expected = []
    for row in range(2):
        image = head.agg_visual(narrowed(head.layer_adapters_visual, images, row))
        text = head.agg_text(narrowed(head.layer_adapters_text, texts, row))
        scores = []
        for start in head.query_tokens[0]:
            first, second = head.attn1, head.attn2
            shown, said = first.norm_v(image), first.norm_t(text)
            asked = first.to_q(first.norm_q(start))
            found = attended(asked, first.to_k_vis(shown), first.to_v_vis(shown) * first.gate_vis(shown).sigmoid())
            found = found + attended(
                asked, first.to_k_text(said), first.to_v_text(said) * first.gate_text(said).sigmoid()
            )
            query = start + first.to_out(found)
            shown = second.norm_v(image)
            found = attended(second.to_q(second.norm_q(query)), second.to_k_vis(shown), second.to_v_vis(shown))
            query = query + second.to_out(found)
            scores.append(head.head(query + head.ff(head.norm_ff(query))))
        expected.append(torch.stack(scores).mean())
    torch.testing.assert_close(head(images, texts, time), torch.stack(expected), rtol=1e-10, atol=1e-10)


def test_a_gradient_reaches_the_latents(options: dict[str, Any]) -> None:
    reward = make_reward("dina_lrm", options)
    latents = torch.from_numpy(LATENTS).requires_grad_()
    (gradient,) = torch.autograd.grad(reward.differentiable(latents, PROMPTS, [{}] * 3).sum(), latents)
    assert bool(gradient.abs().sum((1, 2, 3)).gt(0).all())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"taps": (9,)}, r"'taps' names block 9, but .* has 2"),
        ({"taps": (2,)}, "the last of .* no states of the text"),
        ({"taps": (2, 1)}, "ascending"),
        ({"noise": 1.0}, "noise is 1.0"),
        ({"head": "nowhere.safetensors"}, "option 'head': 'nowhere.safetensors' cannot be used"),
        ({"adapter": "nowhere"}, "option 'adapter': 'nowhere/adapter_model.safetensors' cannot be used"),
    ],
)
def test_parts_that_do_not_fit_are_named(options: dict[str, Any], changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_reward("dina_lrm", {**options, **changed})


def test_latents_and_adapters_of_other_models_are_named(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"latents have shape \(16, 8, 8\), but .* has \(4, h, w\)"):
        make_reward("dina_lrm", options).differentiable(torch.zeros(1, 16, 8, 8), ['"11"'], [{}])
    from safetensors.torch import load_file, save_file

    for name, change in (("more", lambda key: f"x.{key}"), ("fewer", None)):
        folder = tmp_path / name
        folder.mkdir()
        given = Path(options["adapter"])
        (folder / "adapter_config.json").write_bytes((given / "adapter_config.json").read_bytes())
        stored = load_file(given / "adapter_model.safetensors")
        first = next(iter(stored))
        found = {change(key): value for key, value in stored.items()} if change else stored
        if not change:
            del found[first]
        save_file(found, folder / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=r"tensors do not fit the pipeline"):
            make_reward("dina_lrm", {**options, "adapter": str(folder)})
