"""Adapters of other trainers as a start: what the policy then computes is what the pipeline does that loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.diffusion import DiffusionPolicy, TrainableDenoiser
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.lora_start import StartAdapter
from tests.contracts.test_policies import (  # noqa: F401 - fixtures
    TWO,
    Load,
    conditioning,
    family,
    folder,
    load,
    loaded,
    noise,
    small_references,
    tiny_folders,
)
from tests.support.foreign_adapters import kohya, of_others, plain_peft, written


def begun(policy: DiffusionPolicy, path: Path, **said: int) -> TrainableDenoiser:
    """Return a policy that is to be trained from adapters of a file."""
    start: StartAdapter = type(policy).read_adapter(str(path))
    spec = start.spec(rank=said.get("rank"), alpha=said.get("alpha"), targets=None)
    trainable = TrainableDenoiser(policy, spec, seed=0)
    state = start.weights(trainable.shapes())
    with torch.no_grad():
        for name, parameter in trainable.named_parameters():
            parameter.copy_(state[name])
    if trainable.merged is not None:
        # Theirs computes adapters next to the weights.
        trainable.merged.remove()
    return trainable


def velocities(policy: DiffusionPolicy, low: bool) -> torch.Tensor:
    return policy.velocity(noise(policy), torch.full((4,), 0.3 if low else 0.9), conditioning(policy, False)).detach()


def test_what_plain_peft_wrote_computes_as_there(family: str, load: Load, tmp_path: Path) -> None:  # noqa: F811
    theirs = load()
    name, module = next(iter(theirs.denoisers.items()))
    plain_peft(module, tmp_path / "adapter", theirs.lora_targets)
    fresh = load()
    before = velocities(fresh, low=False)
    setattr(fresh.pipeline, name, PeftModel.from_pretrained(fresh.denoisers[name], tmp_path / "adapter"))
    expected = velocities(fresh, low=False)
    if family in TWO:
        with pytest.raises(ConfigError, match="has nothing for 'transformer_2"):
            begun(load(), tmp_path / "adapter")
        return
    policy = load()
    found = begun(policy, tmp_path / "adapter")
    assert (found.lora.rank, found.lora.alpha) == (2, 3)
    torch.testing.assert_close(velocities(policy, low=False), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, before, atol=1e-3)


@pytest.mark.parametrize("family", ["sd3", "wan22", "hunyuan_video15"])
def test_what_the_family_exports_can_be_gone_on_from(family: str, load: Load, tmp_path: Path) -> None:  # noqa: F811
    policy = load()
    trained = TrainableDenoiser(policy, LoraSpec(rank=2, alpha=8, targets=policy.lora_targets), seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(trained.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)
    assert trained.merged is not None
    trained.merged.remove()
    policy.save_lora(tmp_path)
    again = load()
    found = begun(again, tmp_path)
    assert found.lora.rank == found.lora.alpha == 2, "the scale is in the second matrix"
    for low in (False, True):
        torch.testing.assert_close(velocities(again, low), velocities(policy, low), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("sd15", "kohya"),
        ("sdxl", "kohya"),
        ("flux1", "kohya"),
        ("wan21", "diffusion_model"),
        ("qwen_image", "diffusion_model"),
        ("z_image", "diffusion_model"),
    ],
)
def test_other_trainers_names_mean_what_the_pipeline_s_loader_makes_of_them(
    family: str,  # noqa: F811
    form: str,
    load: Load,  # noqa: F811
    tmp_path: Path,
) -> None:
    theirs = load()
    ((name, module),) = theirs.denoisers.items()
    if name == "unet":
        tensors = kohya(module, "lora_unet_", theirs.lora_targets)
    else:
        tensors = of_others(family, module, underscores=form == "kohya")
    file = written(tensors, tmp_path / "other.safetensors")
    before = velocities(theirs, low=False)
    theirs.pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    expected = velocities(theirs, low=False)
    policy = load()
    begun(policy, file)
    assert torch.equal(velocities(policy, low=False), expected)
    assert not torch.allclose(expected, before, atol=1e-3)
