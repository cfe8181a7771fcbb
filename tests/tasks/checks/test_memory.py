"""What a run needs of a GPU is told from the config alone; nothing is downloaded."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2 import LTX2Vocoder
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.model_families import families
from flowmill.configs.registry import resolve
from flowmill.configs.schema import RunConfig
from flowmill.models.library_loading import diffusers_class
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.memory import denoisers
from flowmill.models.memory.architectures import (
    architecture_of,
    decoder_parameters,
    meta_denoiser,
    parameters,
    stored_numbers,
)
from flowmill.models.memory.denoisers import DenoiserMemory, measured_denoiser, sample, train
from flowmill.models.memory.published import pipelines
from flowmill.models.memory.tracing import PeakMemory, Traced
from flowmill.models.policies import POLICIES
from flowmill.models.policies.diffusion import DiffusionSettings, TrainableDenoiser
from flowmill.models.policies.parts import Part
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.models.rewards.sizes import Takes, transformer_takes
from flowmill.models.weights.lora import stack_note
from flowmill.tasks.checks.memory import estimate_memory, memory_advice
from flowmill.tasks.inputs.components import lora_spec
from flowmill.tasks.inputs.prompts import uses_guidance
from flowmill.tasks.inputs.row_tokens import image_tokens
from flowmill.tasks.modalities.memory import Memory
from flowmill.tasks.specs.plan import RunPlan
from pages.gpu_page import (
    LANGUAGE,
    PAGE,
    PRESETS,
    QUANTIZED,
    TRAFFIC,
    language_row,
    memory_of,
    memory_row,
    quantized_row,
    traffic_row,
)
from tests.conftest import ROOT, FlowmillCommand
from tests.support.families import family_params

# What one test has traced is traced no more.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("memory")]

#: Billions of parameters the models' authors state for all denoisers together.
STATED = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": 0.86,
    "stabilityai/stable-diffusion-xl-base-1.0": 2.6,
    "stabilityai/stable-diffusion-3.5-medium": 2.2,
    "stabilityai/stable-diffusion-3.5-large": 8.1,
    "black-forest-labs/FLUX.1-dev": 11.9,
    "black-forest-labs/FLUX.1-Kontext-dev": 11.9,
    "black-forest-labs/FLUX.2-dev": 32.2,
    "black-forest-labs/FLUX.2-klein-4B": 3.9,
    "black-forest-labs/FLUX.2-klein-9B": 9.1,
    "black-forest-labs/flux-3-image-klein-base": 5.6,
    "Qwen/Qwen-Image-2.1": 7.1,
    "Qwen/Qwen-Image": 20.4,
    "Qwen/Qwen-Image-Edit": 20.4,
    "Qwen/Qwen-Image-Edit-2509": 20.4,
    "Qwen/Qwen-Image-Edit-2511": 20.4,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.4,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 28.6,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 5.0,
    "Tongyi-MAI/Z-Image-Turbo": 6.15,
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": 0.59,
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": 1.6,
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": 1.6,
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": 4.72,
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": 2.06,
    "zai-org/CogVideoX-2b": 1.69,
    "zai-org/CogVideoX-5b": 5.57,
    "Lightricks/LTX-2": 19.0,
    # 61.7 GiB of bfloat16, as its pipeline says.
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": 8.3,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": 8.3,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": 8.3,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v": 8.3,
}


@dataclass(frozen=True)
class Batches:
    """Bytes of batches, of any size."""

    training: Traced
    following: int = 0

    def stands_for(self, patch: pytest.MonkeyPatch) -> None:
        nothing = {"sampling": lambda *rows: 0, "decoding": lambda *rows: 0, "stored": lambda self: 0}
        own = {"training": lambda *rows: self.training, "following": lambda *rows: self.following}
        for name, method in {**nothing, **own, "__init__": lambda *given, **named: None}.items():
            patch.setattr(DenoiserMemory, name, method)
        patch.setattr(denoisers, "_MODELS", {})


NONE = Batches(training=Traced(0, 0))
FULL = [ROOT / "configs" / f"{name}.yaml" for name in PRESETS]


#: An image model and a video model of two denoisers; the others are left to a campaign.
_TRACED_FIRST = ("sd35_medium", "wan22_a14b")


def marks_of(preset: Path) -> tuple[pytest.MarkDecorator, ...]:
    return () if preset.stem in _TRACED_FIRST else (pytest.mark.campaign,)


def estimate(preset: str, *overrides: str, row: Batches | None = None) -> Memory:
    """Return the memory of a preset; ``row`` stands for batches instead of tracing them."""
    with pytest.MonkeyPatch.context() as patch:
        if row is not None:
            row.stands_for(patch)
        return memory_of(load_config(ROOT / "configs" / f"{preset}.yaml", overrides))


def test_weights_that_are_cast_for_a_forward_count_once_for_all_rows() -> None:
    config = load_config(ROOT / "configs" / "sd35_medium.yaml", ["model.lora=null"])
    traced = traces(config)
    # The casts of 2.2 billion weights to bfloat16, and what a row adds to them.
    assert 4.5e9 < traced.sampling(1) < traced.sampling(4) < 5.2e9


@pytest.mark.parametrize("name", sorted(pipelines()))
def test_published_models_have_their_stated_size(name: str) -> None:
    architecture = pipelines()[name]
    denoiser = meta_denoiser(architecture)
    assert parameters(denoiser) * architecture.denoisers / 1e9 == pytest.approx(STATED[name], rel=0.02)
    assert stack_note(denoiser) is None, "it has no routed experts, which would get no adapters"


@pytest.mark.campaign_cases("wan22_a14b")
@pytest.mark.parametrize("preset", [pytest.param(each, id=each.stem, marks=marks_of(each)) for each in FULL])
def test_full_size_presets_are_estimated_as_the_page_says(preset: Path) -> None:
    config = load_config(preset)
    memory = memory_of(config)
    if config.model.lora is None:
        assert memory.trained == memory.parameters
    else:
        assert 0 < memory.trained < 0.1 * memory.parameters
        assert memory.phases["optimize"] > memory.details["sampling_weights"] >= 2 * memory.parameters
    assert memory_advice(memory, 10**13) == []
    page = PAGE.read_text()
    assert memory_row(preset.stem) in page, "run python -m pages.gpu_page"
    assert preset.stem not in TRAFFIC or traffic_row(preset.stem) in page


@pytest.mark.parametrize(
    "preset", [pytest.param(each, marks=() if each == "qwen_05b_ppo" else pytest.mark.campaign) for each in LANGUAGE]
)
def test_language_models_are_estimated_as_the_page_says(preset: str) -> None:
    assert language_row(preset) in PAGE.read_text(), "run python -m pages.gpu_page"


@pytest.mark.campaign
def test_ranks_exchange_what_the_page_says() -> None:
    command = [sys.executable, "-m", "tools.benchmarks.traffic"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    lines = said.stdout.splitlines()
    assert len(lines) == 13
    assert all(line.endswith("ratio 1.000") for line in lines), said.stdout


def test_a_local_folder_is_counted_exactly(tmp_path: Path) -> None:
    for family in ("sd15", "flux1", "wan22"):
        folder = tmp_path / family
        build_tiny(family).save_pretrained(folder)
        architecture = architecture_of(str(folder))
        assert architecture is not None
        cls = resolve(POLICIES, family, label="policy")
        settings = DiffusionSettings(height=32, width=32, frames=5 if family == "wan22" else 1)
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


@pytest.mark.parametrize("family", families(lambda spec: spec.starts_from == "image" and spec.clips is None))
def test_a_row_has_the_tokens_that_the_denoiser_reads(tmp_path: Path, family: str) -> None:
    build_tiny(family).save_pretrained(tmp_path)
    given = ["model.build=null", f"model.path={tmp_path}", "model.height=64", "model.width=128"]
    plan, architecture = RunPlan(load_config(f"tiny_{family}", given)), architecture_of(str(tmp_path))
    assert architecture is not None
    settings = plan.family.settings_for(plan.config, dtype=torch.float32, device=torch.device("cpu"), empty=False)
    policy = plan.family.load(tmp_path, settings, frozenset(Part), plan.config.model.options)
    seen: list[int] = []
    policy.pipeline.transformer.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(inputs["hidden_states"].shape[1]), with_kwargs=True
    )
    images = [[np.zeros((64, 64, 3), np.uint8)] * (plan.most_images or 0)]
    latents = policy.initial_latents([torch.Generator()])
    policy.velocity(latents, torch.tensor([0.5]), Conditioning(policy.encode(["a cat"], images)))
    assert seen == [image_tokens(plan, architecture)]


@pytest.mark.parametrize("family", family_params(("ltx2", "sd3", "wan22", "hunyuan_video15_i2v")))
def test_the_weights_of_every_component_of_a_folder_are_counted(tmp_path: Path, family: str) -> None:
    build_tiny(family).save_pretrained(tmp_path)
    architecture = architecture_of(str(tmp_path))
    assert architecture is not None
    counted = decoder_parameters(architecture) + architecture.text_parameters
    counted += parameters(meta_denoiser(architecture)) * architecture.denoisers
    stored = [stored_numbers(folder) for folder in tmp_path.iterdir() if folder.is_dir()]
    # Files also have positions that are computed, and a few statistics of latents.
    weights = sum(number for each in stored for name, number in each.items() if name != "pos_embed.pos_embed")
    assert counted == pytest.approx(weights, rel=1e-3)


def test_the_published_ltx2_has_the_connectors_and_the_sound_of_its_classes() -> None:
    architecture = pipelines()["Lightricks/LTX-2"]
    with torch.device("meta"):
        connectors, *sound = (made() for made in (LTX2TextConnectors, AutoencoderKLLTX2Audio, LTX2Vocoder))
    # The rest is Gemma-3-12B, as the tables of its authors say.
    assert architecture.text_parameters - parameters(connectors) == pytest.approx(12_187e6, rel=1e-4)
    assert architecture.sound_parameters == pytest.approx(sum(map(parameters, sound)), rel=2e-3)


def test_quantized_weights_are_counted() -> None:
    plain, both = estimate("flux1_dev", row=NONE), "model.quantize={name: int8, text_encoders: nf4}"
    small = estimate("flux1_dev", both, row=NONE)
    adapters = 4 * plain.trained
    halved = (plain.details["sampling_weights"] - adapters) / 2
    assert small.details["sampling_weights"] - adapters == pytest.approx(halved, rel=0.04)
    assert small.details["sampling_weights"] - adapters > halved + 6 * 3072 * 5 * 3072, "and a layer is dequantized"
    assert small.details["text"] == pytest.approx(2 * 132e6 + (4885 - 132) * 1e6 * 4.5 / 8, rel=0.001)


@pytest.mark.campaign_cases("sd35_medium")
@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name == "sd35_medium" else pytest.mark.campaign) for name in QUANTIZED]
)
def test_presets_with_quantized_weights_take_what_the_page_says(preset: str) -> None:
    assert quantized_row(preset) in PAGE.read_text()


#: Evaluations as large as rollouts; larger ones need more than what is traced here.
_EVALUATED = ("evaluate.height=null", "evaluate.width=null", "evaluate.frames=null")
#: Models whose blocks are of one kind and of several, with text beside the image and across it; one keeps everything.
TRACED = {
    "sd35_medium": (),
    "flux1_dev": (),
    "flux2_klein": ("model.gradient_checkpointing=false", *_EVALUATED),
    "qwen_image": (),
    "wan22_a14b": ("model.frames=17", *_EVALUATED),
}
#: More blocks of each kind than are measured, few enough to trace all of them.
SHORTER = {"num_layers": 7, "num_single_layers": 6, "dual_attention_layers": (0, 1, 2)}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name == "sd35_medium" else pytest.mark.campaign) for name in TRACED]
)
def test_a_few_blocks_tell_what_all_of_them_take(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "configs" / f"{preset}.yaml", TRACED[preset])
    whole = pipelines()[str(config.model.path)]
    known = inspect.signature(diffusers_class(whole.denoiser)).parameters
    shorter = {name: value for name, value in SHORTER.items() if name in known}
    monkeypatch.setitem(pipelines(), config.model.path, replace(whole, config={**whole.config, **shorter}))
    traced, memory = traces(config), memory_of(config)
    everything = frozenset((name, place) for name, places in traced.tracer.groups for place in places)
    assert 6 < len(everything) < 14
    training = traced.tracer.of(everything, train, config.execution.micro_batch_size, gradient=True).peak
    sampling = traced.tracer.of(everything, sample, config.execution.rollout_batch_size).peak
    held, said = memory.phases["optimize"] - memory.lines["activations"]["optimize"], memory.details
    assert said["optimize_activations"] == pytest.approx(training, rel=0.3)
    assert memory.phases["optimize"] == pytest.approx(held + max(training, said["step"]), rel=0.05)
    assert memory.phases["rollout"] == pytest.approx(said["sampling_weights"] + said["decoder"] + sampling, rel=0.01)


def traces(config: RunConfig) -> DenoiserMemory:
    architecture = architecture_of(str(config.model.path))
    assert architecture is not None
    spec = lora_spec(config, resolve(POLICIES, config.model.policy, label="policy"))
    return measured_denoiser(config, architecture, spec, guided=uses_guidance(config))


@pytest.mark.campaign_cases(
    "sana",
    "sana_video",
    "hunyuan_video15",
    "flux3",
    "qwen_image21",
    "ltx2",
    "cogvideox",
    "qwen_image",
    "wan22_ti2v",
    "wan21",
    "sdxl",
)
@pytest.mark.parametrize(
    "family",
    [
        *("sd3", "flux1", "qwen_image", "wan21", "wan22_ti2v", "sd15", "sdxl", "sana", "sana_video"),
        *("hunyuan_video15", "flux3", "qwen_image21", "ltx2", "cogvideox"),
    ],
)
def test_tensors_without_content_take_what_real_ones_do(tmp_path: Path, family: str) -> None:
    build_tiny(family).save_pretrained(tmp_path)
    extra = ["model.build=null", f"model.path={tmp_path}", "model.lora={rank: 2, alpha: 4}"]
    if family.startswith("qwen_image"):
        # Its table of rotary embeddings counts as moved to the device in every forward: half a megabyte.
        extra += ["model.height=384", "model.width=384"]
    config = load_config(ROOT / "configs" / f"tiny_{family}.yaml", extra)
    traced = traces(config)
    model = config.model
    settings = DiffusionSettings(
        height=model.height,
        width=model.width,
        frames=model.frames,
        guidance_scale=model.guidance_scale,
        train_negative=config.optimize.guidance_gradient == "both",
    )
    policy = resolve(POLICIES, family, label="policy").load(tmp_path, settings, frozenset(Part), model.options)
    trainable = TrainableDenoiser(policy, lora_spec(config, type(policy)), seed=0)
    for parameter in trainable.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert trainable.merged is not None
    trainable.merged.refresh()
    with torch.no_grad():
        # Of pipelines that cut no text off these are as long as they may be.
        texts = {"qwen_image21": " red" * 54}
        rows = policy.encode([texts.get(family, "as many words as there is room for " * 100)] * 2)
    assert set(rows.get("text_length", torch.tensor([0])).tolist()) <= {0, rows["prompt_embeds"].shape[1]}
    with PeakMemory() as memory:
        given = Conditioning({k: v.clone() for k, v in rows.items()}, {k: v.clone() for k, v in rows.items()})
        if not uses_guidance(config):
            given = Conditioning(given.positive)
        latents = policy.initial_latents([torch.Generator().manual_seed(seed) for seed in range(2)])
        velocity, before = policy.velocity(latents, torch.full((2,), 0.5), given), memory.now
        velocity.square().mean().backward()
    assert traced.training(2).peak == pytest.approx(memory.peak, rel=0.1)
    assert traced.training(2).retained == pytest.approx(before, rel=0.12)
    with PeakMemory() as memory:
        policy.decode(latents)
    # These tiny decoders hold less than the frames do while they are rounded, of which there is a copy more.
    further = 2 * 4 * 3 * model.frames * model.height * model.width if family == "ltx2" else 0
    assert traced.decoding(2) == pytest.approx(memory.peak - further, rel=0.1)
    with PeakMemory() as memory:
        start = torch.zeros_like(latents).requires_grad_()
        torch.autograd.grad(policy.decode_smoothly(start).square().mean(), start)
    # What is done to frames behind the decoder differs by family.
    assert traced.following(2) == pytest.approx(memory.peak, rel=0.15)


@pytest.mark.campaign
def test_adapters_may_be_on_some_kinds_of_blocks_alone() -> None:
    memory = estimate("flux1_dev", "model.lora={rank: 32, alpha: 64, targets: [attn.add_q_proj]}")
    assert memory.trained == 19 * 32 * (3072 + 3072)
    assert memory.details["optimize_activations"] > 0


def test_adapters_on_layers_that_a_published_model_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere', of targets .* matches no layer of 'FluxTransformer2DModel'"):
        estimate("flux1_dev", "model.lora={targets: [attn.add_q_proj, nowhere]}")


def test_sums_of_weights_and_adapters_count_where_they_are_made() -> None:
    def weights(*overrides: str) -> int:
        return int(estimate("flux1_dev", "model.dtype=float32", *overrides, row=NONE).details["training_weights"])

    targets = "targets: [attn.add_q_proj, attn.add_k_proj]"
    one, two = (
        weights(f"model.lora={{rank: 1, alpha: 1, {some}}}") for some in ("targets: [attn.add_q_proj]", targets)
    )
    # 19 blocks, each with a matrix of 3072 x 3072 and an adapter of rank 1, float32.
    assert two - one == 4 * 19 * (3072 * 3072 + 2 * 3072)
    half = weights(f"model.lora={{rank: 1, alpha: 1, {targets}}}", "model.dtype=bfloat16")
    assert half == two // 2 - 4 * 19 * 3072 * 3072 + 4 * 19 * 2 * 3072


@pytest.mark.campaign
def test_ranks_that_share_the_weights_hold_less() -> None:
    ranks = "execution.processes=8"

    def details(*overrides: str) -> Mapping[str, int]:
        return estimate("flux1_dev", *overrides, row=ROW).details

    one, ddp = details(), details(ranks)
    fsdp = details(ranks, "execution.strategy=fsdp")
    offloaded = details(ranks, "execution.strategy=fsdp", "execution.offload=true")
    assert ddp["training_weights"] == one["training_weights"]
    assert ddp["step"] == one["step"] + 4 * estimate("flux1_dev", row=ROW).trained, (
        "gradients are exchanged as one buffer"
    )
    blocks = fsdp["training_weights"] - one["training_weights"] // 8
    assert 0.02 < blocks / one["training_weights"] < 0.1, "two blocks are whole at a time"
    assert fsdp["training_state"] == one["training_state"] // 8
    assert (offloaded["training_weights"], offloaded["training_state"]) == (blocks, 0)
    assert one["sampling_weights"] < fsdp["sampling_weights"] < 1.2 * one["sampling_weights"]
    assert offloaded["sampling_weights"] == one["sampling_weights"]
    spread = details(ranks, "execution.strategy=fsdp", "execution.sampling=spread")
    assert spread["sampling_weights"] == fsdp["training_weights"]
    groups = details(ranks, "execution.strategy=fsdp", "execution.fsdp_size=4")
    assert groups["training_weights"] - blocks == one["training_weights"] // 4, "each group of four holds all"
    assert groups["training_state"] == one["training_state"] // 4
    split = details(ranks, "execution.context_parallel=2")
    assert split["optimize_activations"] == one["optimize_activations"] // 2


def test_text_encoders_are_counted_where_they_live() -> None:
    memory = estimate("sd35_medium")
    assert memory.phases["encode"] == pytest.approx(11.2e9, rel=0.02), "CLIP-L, CLIP-G and T5-XXL in bfloat16"
    larger = "an autoencoder at full resolution takes more than the denoiser's forward"
    assert memory.phases["decode"] > memory.phases["rollout"], larger


def test_an_unknown_model_has_no_estimate(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "flux1_dev.yaml", ["model.path=someone/else"])
    assert estimate_memory(RunPlan(config), reference=False) is None


@pytest.mark.campaign
def test_check_says_whether_it_fits(flowmill: FlowmillCommand) -> None:
    checked = flowmill("check", "configs/qwen_image.yaml", "--gpu-memory", "50.5")
    assert checked.returncode == 0, checked.stderr
    assert "20.43 billion parameters" in checked.stdout
    assert "does not fit 50.5 GB; optimize: " in checked.stdout
    assert "Lower execution.micro_batch_size" in checked.stdout
    assert "fits 80 GB per GPU." in flowmill("check", "configs/qwen_image.yaml", "--gpu-memory", "80").stdout


@pytest.mark.campaign
def test_a_backward_pass_through_both_halves_of_guidance_keeps_both() -> None:
    gradients = ("conditional", "both")
    one, two = (estimate("sd35_medium", f"optimize.guidance_gradient={gradient}").details for gradient in gradients)
    assert two["optimize_activations"] == pytest.approx(2 * one["optimize_activations"], rel=0.1)
    assert two["rollout_activations"] == one["rollout_activations"]
    assert two["training_weights"] == one["training_weights"]


JUDGED = ("rewards=[{name: pickscore, weight: 1.0}, {name: pickscore, label: again, weight: 0.5}]",)


@pytest.mark.campaign
def test_models_of_rewards_have_a_phase_of_their_own() -> None:
    def memory(*overrides: str) -> Memory:
        return estimate("flux1_dev", *overrides, row=NONE)

    one, eight = memory(*JUDGED), memory(*JUDGED, "execution.processes=8")
    assert list(one.phases) == ["encode", "rollout", "decode", "score", "optimize"]
    assert one.lines["models of rewards"] == {"score": 4 * 986_109_441}, "one model under two labels"
    assert one.lines["policy, while it samples the next"]["score"] == max(one.phases["rollout"], one.phases["decode"])
    assert eight.lines["policy, at rest"]["score"] == eight.between
    (line,) = (each for each in memory_advice(one, one.phases["score"] - 1) if each.startswith("score"))
    assert line.startswith(f"score: {one.phases['score'] / 1e9:.1f} GB. Lower rewards[].batch_size")
    server = "rewards=[{name: pickscore, server: {url: 'http://127.0.0.1:8600'}}]"
    assert "score" not in memory(server, "evaluate.judges=[]").phases
    assert "score" in memory("rewards=[{name: jpeg_compressibility}]", "evaluate.judges=[{name: hpsv3}]").phases
    unknown = memory("rewards=[{name: clip_score, options: {model: someone/else}}]", "evaluate.judges=[]")
    assert "the model of reward 'clip_score' is not counted" in unknown.notes[-1]


ROW = Batches(training=Traced(4 * 10**9, 24 * 10**8), following=8 * 10**9)
CLIMB = ("rollout.plan=final", "execution.decode_batch_size=2", "rewards=[{name: pickscore, batch_size: 3}]")
PICKSCORE = transformer_takes("yuvalkirstain/PickScore_v1", "float32")
assert isinstance(PICKSCORE, Takes)


def test_rewards_that_are_followed_back_count_where_that_is_done() -> None:
    def memory(*overrides: str) -> Memory:
        return estimate("flux1_dev", *CLIMB, "evaluate.judges=[]", *overrides, row=ROW)

    assert PICKSCORE.followed is not None
    grpo = memory("rollout.plan=all")
    stored = memory("optimize.algorithm=reward_gradient")
    assert list(stored.phases) == ["encode", "rollout", "decode", "score", "gradient", "optimize"]
    at_once = 2 * (4 * 10**9 + PICKSCORE.followed)
    assert stored.phases["gradient"] == stored.between + PICKSCORE.weights + at_once
    assert stored.phases["optimize"] == grpo.phases["optimize"]
    assert stored.lines["models of rewards"] == dict.fromkeys(("score", "gradient"), PICKSCORE.weights)
    several = memory(
        "optimize.algorithm={name: refl, options: {steps: 3}}", "rollout.plan={name: late, options: {low: 2}}"
    )
    held = several.lines["weights"]["optimize"] + several.lines["gradients, moments, averages"]["optimize"]
    held += several.lines["autoencoder"]["optimize"] + PICKSCORE.weights
    # Four rows: what three forwards keep while decoder and rewards work on two, or the backward pass after.
    assert several.phases["optimize"] == held + max(4 * 3 * 6 * 10**8 + at_once, 4 * (10**9 + 2 * 6 * 10**8))
    assert "gradient" not in several.phases
    assert several.lines["autoencoder"]["optimize"] == several.lines["autoencoder"]["decode"] > 0
    words = "options: {step: 0.1, times: {high: 0.8}, positive: [a], negative: [b]}"
    relative, plain = (
        memory(f"optimize.algorithm={{name: direct_align, {each}}}") for each in (words, "options: {step: 0.1}")
    )
    assert relative.phases["optimize"] - plain.phases["optimize"] == 2 * PICKSCORE.followed


def test_a_gradient_that_is_not_counted_is_a_note() -> None:
    unknown = ("rewards=[{name: dina_lrm, options: {head: x}}]", "optimize.algorithm=reward_gradient")
    found = estimate("sd35_medium", *CLIMB, *unknown, row=ROW)
    assert "activations of the gradient of reward 'dina_lrm'" in found.notes[0]


def test_what_encoding_takes_grows_with_its_batch() -> None:
    def memory(*overrides: str) -> Memory:
        return estimate("flux1_dev", *overrides, row=NONE)

    few, many = memory("execution.encode_batch_size=1"), memory("execution.encode_batch_size=5")
    assert many.details["encode_activations"] == 5 * few.details["encode_activations"]
    assert few.phases["encode"] - few.details["encode_activations"] == few.details["text"]


def test_host_memory_is_counted() -> None:
    ranks = ("execution.processes=8", "execution.strategy=fsdp")

    def memory(*overrides: str) -> Mapping[str, int]:
        return estimate("flux1_dev", *JUDGED, *overrides, row=NONE).host

    one, offloaded = memory(), memory(*ranks, "execution.offload=true")
    assert one["models while they are read"] == pytest.approx(24.1e9, rel=0.01)
    assert one["models of rewards"] == 4 * 986_109_441
    assert {"offloaded", "offloaded, pinned"} & one.keys() == set()
    assert offloaded["models while they are read"] == pytest.approx(9.8e9, rel=0.01), "of text encoders, on each rank"
    assert offloaded["offloaded, pinned"] > 24e9 / 8


def test_parameters_and_moments_are_counted_where_they_lie() -> None:
    whole = ("model.lora=null", "execution.processes=8", "execution.strategy=fsdp")

    def memory(offload: str) -> Memory:
        return estimate("flux1_dev", *whole, f"execution.offload={offload}", row=NONE)

    off, on, parameters, optimizer = map(memory, ("false", "true", "parameters", "optimizer"))
    share = 4 * off.trained // 8

    def held(found: Memory) -> tuple[int, int, int, int]:
        host = (found.host.get(label, 0) for label in ("offloaded, pinned", "offloaded"))
        return found.details["training_weights"], found.details["training_state"], *host

    blocks = held(on)[0]
    assert held(off) == (blocks + share, 4 * share, 0, 0), "a gradient, an average and two moments"
    assert held(on) == (blocks, 0, 2 * share, 3 * share), "weights and gradients are pinned"
    assert held(parameters) == (blocks, 2 * share, 2 * share, share)
    assert held(optimizer) == (blocks + share, 2 * share, 2 * share, 0)
    steps = [found.details["step"] for found in (off, on, parameters, optimizer)]
    assert steps == [share, 0, 12 << 27, 12 << 27], "as many numbers as are stepped at a time, and what adds to them"
