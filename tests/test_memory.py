"""What a run needs of a GPU is told from the config alone; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.load import load_config
from models.architectures import PUBLISHED, architecture_of, lora_parameters, meta_denoiser, parameters
from models.policies import POLICIES
from models.policies.base import Part, PolicySettings
from models.quickstart.tiny import build_tiny
from tasks.execution.memory import advice, estimate_memory
from tests.conftest import ROOT, FlowmillCommand

#: Billions of parameters the models' authors state for all denoisers together.
STATED = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": 0.86,
    "stabilityai/stable-diffusion-3.5-medium": 2.2,
    "stabilityai/stable-diffusion-3.5-large": 8.1,
    "black-forest-labs/FLUX.1-dev": 11.9,
    "black-forest-labs/FLUX.1-Kontext-dev": 11.9,
    "black-forest-labs/FLUX.2-dev": 32.2,
    "black-forest-labs/FLUX.2-klein-4B": 3.9,
    "black-forest-labs/FLUX.2-klein-9B": 9.1,
    "Qwen/Qwen-Image": 20.4,
    "Qwen/Qwen-Image-Edit": 20.4,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.4,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 28.6,
    "Tongyi-MAI/Z-Image-Turbo": 6.15,
}
FULL = sorted(path for path in (ROOT / "configs").glob("*.yaml") if load_config(path).model.path is not None)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_models_have_their_stated_size(name: str) -> None:
    architecture = PUBLISHED[name]
    assert parameters(meta_denoiser(architecture)) * architecture.denoisers / 1e9 == pytest.approx(
        STATED[name], rel=0.02
    )


@pytest.mark.parametrize("preset", FULL, ids=lambda path: path.stem)
def test_full_size_presets_are_estimated(preset: Path) -> None:
    config = load_config(preset)
    memory = estimate_memory(config, reference=False)
    assert memory is not None
    assert 0 < memory.trained < 0.1 * memory.parameters
    assert memory.optimize > memory.weights >= 2 * memory.parameters
    assert advice(config, memory, limit=10**13) == []
    assert advice(config, memory, limit=10**9)


def test_a_local_folder_is_counted_exactly(tmp_path: Path) -> None:
    from configs.registry import resolve

    for family in ("sd15", "flux1", "wan22"):
        folder = tmp_path / family
        build_tiny(family).save_pretrained(folder)
        architecture = architecture_of(str(folder))
        assert architecture is not None
        cls = resolve(POLICIES, family, what="policy")
        settings = PolicySettings(height=32, width=32, frames=5 if family == "wan22" else 1)
        policy = cls.load(folder, settings, frozenset({Part.DENOISER}), {})
        real = sum(parameter.numel() for module in policy.denoisers.values() for parameter in module.parameters())
        assert parameters(meta_denoiser(architecture)) * architecture.denoisers == real


@pytest.mark.parametrize(
    ("family", "text_tokens", "image_tokens"),
    [("sd15", 0, False), ("sd3", 333, False), ("flux1", 512, False), ("flux1_kontext", 512, True), ("wan21", 0, False)],
)
def test_a_local_folder_has_the_tokens_of_its_family(
    tmp_path: Path, family: str, text_tokens: int, image_tokens: bool
) -> None:
    build_tiny(family).save_pretrained(tmp_path)
    architecture = architecture_of(str(tmp_path))
    assert architecture is not None
    assert (architecture.text_tokens, architecture.image_tokens) == (text_tokens, image_tokens)


def test_adapters_are_counted() -> None:
    module = torch.nn.ModuleDict({"to_q": torch.nn.Linear(6, 10), "other": torch.nn.Linear(6, 10)})
    assert lora_parameters(module, ("to_q",), rank=4) == 4 * (6 + 10)


def test_what_to_change_comes_in_an_order_that_helps() -> None:
    def first(limit: float, *overrides: str) -> list[str]:
        config = load_config(ROOT / "configs" / "flux1_dev.yaml", overrides)
        memory = estimate_memory(config, reference=False)
        assert memory is not None
        return advice(config, memory, limit=int(limit * 1e9))

    large = ["execution.micro_batch_size=64", "model.gradient_checkpointing=false"]
    assert first(200) == []
    assert first(80, *large)[0].startswith("optimize: set execution.micro_batch_size=")
    assert first(28, "model.gradient_checkpointing=false") == ["optimize: set model.gradient_checkpointing=true"]
    assert first(20)[0] == "rollout: the weights alone do not fit; take a larger GPU"


def test_an_unknown_model_has_no_estimate(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "flux1_dev.yaml", ["model.path=someone/else"])
    assert estimate_memory(config, reference=False) is None


@pytest.mark.slow
def test_check_says_whether_it_fits(flowmill: FlowmillCommand) -> None:
    checked = flowmill("check", "configs/qwen_image.yaml", "--gpu-memory", "51")
    assert checked.returncode == 0, checked.stderr
    assert "20.43 billion parameters" in checked.stdout
    assert "does not fit 51 GB; optimize: set execution.micro_batch_size=1" in checked.stdout
    assert "fits 80 GB per GPU." in flowmill("check", "configs/qwen_image.yaml", "--gpu-memory", "80").stdout


def test_a_backward_pass_through_both_halves_of_guidance_keeps_both() -> None:
    path = ROOT / "configs" / "sd35_medium.yaml"
    estimates = {}
    for gradient in ("conditional", "both"):
        estimates[gradient] = estimate_memory(
            load_config(path, [f"optimize.guidance_gradient={gradient}"]), reference=True
        )
    one, two = estimates["conditional"], estimates["both"]
    assert one is not None
    assert two is not None
    assert two.optimize_activations == 2 * one.optimize_activations
    assert two.rollout_activations == one.rollout_activations
    assert two.weights == one.weights
