"""What a run needs of a GPU is told from the config alone; nothing is downloaded."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from configs.load import load_config
from configs.registry import resolve
from configs.schema import RunConfig
from models.library_loading import diffusers_class
from models.maths.conditioning import Conditioning
from models.memory.activation_tracing import Footprints, PeakMemory, kinds
from models.memory.architectures import architecture_of, meta_denoiser, parameters
from models.memory.published import pipelines
from models.policies import POLICIES
from models.policies.diffusion import DiffusionSettings, TrainableDenoiser
from models.policies.parts import Part
from models.quickstart.tiny import build_tiny
from models.rewards.sizes import Takes, transformer_takes
from models.weights.lora import LoraSpec, lora_parameters
from pages.gpu_page import (
    LANGUAGE,
    PAGE,
    PRESETS,
    TRAFFIC,
    denoiser_of,
    language_row,
    memory_of,
    memory_row,
    traffic_row,
)
from tasks.checks.memory import RunMemory, estimate_memory
from tasks.inputs.components import lora_spec, make_algorithm
from tasks.inputs.prompts import uses_guidance
from tasks.modalities.diffusion.activations import Activations, footprints_of, measure_activations
from tasks.modalities.diffusion.memory import DenoiserMemory
from tests.conftest import ROOT, FlowmillCommand

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
    "MiniMaxAI/MiniMax-H3": 33.1,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": 8.3,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": 8.3,
}
FULL = [ROOT / "configs" / f"{name}.yaml" for name in PRESETS]


#: An image model and a video model of two denoisers; the others are left to a campaign.
_TRACED_FIRST = ("sd35_medium", "wan22_a14b")


def marks_of(preset: Path) -> tuple[pytest.MarkDecorator, ...]:
    return () if preset.stem in _TRACED_FIRST else (pytest.mark.campaign,)


@cache
def activations_of(preset: str, *overrides: str) -> Activations:
    config = load_config(ROOT / "configs" / f"{preset}.yaml", overrides)
    found = measure_activations(config, make_algorithm(config).requires)
    assert found is not None
    return found


@cache
def estimate(preset: str, *overrides: str) -> DenoiserMemory:
    # How the work is carried out changes how many rows there are, not what one takes.
    row = activations_of(preset, *(each for each in overrides if not each.startswith("execution.")))
    config = load_config(ROOT / "configs" / f"{preset}.yaml", overrides)
    return denoiser_of(config, row)


@pytest.mark.campaign
def test_how_the_work_is_carried_out_changes_nothing_of_a_row() -> None:
    ranks = ("execution.processes=8", "execution.strategy=fsdp", "execution.micro_batch_size=64")
    assert activations_of("sd35_medium", *ranks) == activations_of("sd35_medium")


@pytest.mark.parametrize("name", sorted(pipelines()))
def test_published_models_have_their_stated_size(name: str) -> None:
    architecture = pipelines()[name]
    assert parameters(meta_denoiser(architecture)) * architecture.denoisers / 1e9 == pytest.approx(
        STATED[name], rel=0.02
    )


@pytest.mark.parametrize("preset", [pytest.param(each, id=each.stem, marks=marks_of(each)) for each in FULL])
def test_full_size_presets_are_estimated_as_the_page_says(preset: Path) -> None:
    config, activations = load_config(preset), activations_of(preset.stem)
    memory = denoiser_of(config, activations)
    if config.model.lora is None:
        assert memory.trained == memory.parameters
    else:
        assert 0 < memory.trained < 0.1 * memory.parameters
        assert memory.optimize > memory.sampling_weights >= 2 * memory.parameters
    assert memory.advice(config, 10**13) == []
    assert memory.advice(config, 10**9)
    page = PAGE.read_text()
    assert memory_row(preset.stem, activations) in page, "run python -m pages.gpu_page"
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


def test_adapters_are_counted() -> None:
    module = torch.nn.ModuleDict({"to_q": torch.nn.Linear(6, 10), "other": torch.nn.Linear(6, 10)})
    assert lora_parameters(module, LoraSpec(rank=4, alpha=4, targets=("to_q",))) == 4 * (6 + 10)


@pytest.mark.campaign
def test_what_to_change_comes_in_an_order_that_helps() -> None:
    def first(limit: float, *overrides: str) -> list[str]:
        config = load_config(ROOT / "configs" / "flux1_dev.yaml", overrides)
        return estimate("flux1_dev", *overrides).advice(config, int(limit * 1e9))

    kept = "model.gradient_checkpointing=false"
    assert first(200) == []
    assert first(80, "execution.micro_batch_size=64", kept)[0].startswith("optimize: set execution.micro_batch_size=")
    assert first(34, kept, "model.height=1024", "model.width=1024", "execution.decode_batch_size=1") == [
        "optimize: set model.gradient_checkpointing=true"
    ]
    assert first(31, "execution.rollout_batch_size=8") == ["decode: set execution.decode_batch_size=7"]
    assert first(20)[0] == "rollout: the weights alone do not fit; take a larger GPU"
    ranks = "execution.processes=8"
    assert first(20, ranks)[0].endswith("set execution.strategy=fsdp and execution.sampling=spread")
    assert first(20, ranks, "execution.strategy=fsdp")[0].endswith("set execution.sampling=spread")
    two = ("execution.processes=2", "execution.rollout_batch_size=1", "execution.decode_batch_size=1")
    assert first(28.5, *two) == ["optimize: set execution.strategy=fsdp"]


#: Models whose blocks are of one kind and of several, with text beside the image and across it; one keeps everything.
TRACED = {
    "sd35_medium": (),
    "flux1_dev": (),
    "flux2_klein": ("model.gradient_checkpointing=false",),
    "qwen_image": (),
    "wan22_a14b": ("model.frames=17",),
}
#: More blocks of each kind than are measured, few enough to trace all of them.
SHORTER = {"num_layers": 7, "num_single_layers": 6, "dual_attention_layers": (0, 1, 2)}


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=() if name == "sd35_medium" else pytest.mark.campaign) for name in TRACED],
)
def test_a_few_blocks_tell_what_all_of_them_take(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "configs" / f"{preset}.yaml", TRACED[preset])
    whole = pipelines()[str(config.model.path)]
    known = inspect.signature(diffusers_class(whole.denoiser)).parameters
    shorter = {name: value for name, value in SHORTER.items() if name in known}
    monkeypatch.setitem(pipelines(), config.model.path, replace(whole, config={**whole.config, **shorter}))
    traced, memory = footprints(config), denoiser_of(config)
    module = meta_denoiser(traced._architecture)
    everything = frozenset((name, place) for name, places in kinds(module, traced._policy.blocks) for place in places)
    assert 6 < len(everything) < 14
    training = config.execution.micro_batch_size * traced._train(everything)
    sampling = config.execution.rollout_batch_size * traced._sample(everything)
    assert memory.optimize_activations == pytest.approx(training, rel=0.3)
    assert memory.optimize == pytest.approx(memory.held + max(training, memory.step), rel=0.05)
    assert memory.rollout == pytest.approx(memory.sampling_weights + memory.decoder + sampling, rel=0.01)


def footprints(config: RunConfig) -> Footprints:
    architecture = architecture_of(str(config.model.path))
    assert architecture is not None
    return footprints_of(
        config, architecture, lora_spec(config, resolve(POLICIES, config.model.policy, label="policy"))
    )


@pytest.mark.parametrize(
    "family",
    [
        *("sd3", "flux1", "qwen_image", "wan21", "wan22_ti2v", "sd15", "sdxl", "sana", "sana_video"),
        *("hunyuan_video15", "flux3", "qwen_image21", "ltx2", "minimax_h3", "cogvideox"),
    ],
)
def test_tensors_without_content_take_what_real_ones_do(tmp_path: Path, family: str) -> None:
    build_tiny(family).save_pretrained(tmp_path)
    extra = ["model.build=null", f"model.path={tmp_path}", "model.lora={rank: 2, alpha: 4}"]
    if family.startswith("qwen_image"):
        # Its table of rotary embeddings counts as moved to the device in every forward: half a megabyte.
        extra += ["model.height=384", "model.width=384"]
    config = load_config(ROOT / "configs" / f"tiny_{family}.yaml", extra)
    traced = footprints(config)
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
        texts = {"qwen_image21": " red" * 54, "minimax_h3": " red" * 64}
        rows = policy.encode([texts.get(family, "as many words as there is room for " * 100)])
    assert int(rows.get("text_length", torch.tensor(0))) in (0, rows["prompt_embeds"].shape[1])
    with PeakMemory() as memory:
        given = Conditioning({k: v.clone() for k, v in rows.items()}, {k: v.clone() for k, v in rows.items()})
        if not uses_guidance(config):
            given = Conditioning(given.positive)
        latents = policy.initial_latents([torch.Generator().manual_seed(0)])
        velocity, before = policy.velocity(latents, torch.tensor([0.5]), given), memory.now
        velocity.square().mean().backward()
    assert traced.training() == pytest.approx(memory.peak, rel=0.1)
    assert traced.keeping() == pytest.approx(before, rel=0.12)
    with PeakMemory() as memory:
        policy.decode(latents)
    # These tiny decoders hold less than the frames do while they are rounded, of which there is a copy more.
    further = 4 * 3 * model.frames * model.height * model.width if family in ("ltx2", "minimax_h3") else 0
    assert traced.decoding() == pytest.approx(memory.peak - further, rel=0.1)
    with PeakMemory() as memory:
        start = torch.zeros_like(latents).requires_grad_()
        torch.autograd.grad(policy.decode_smoothly(start).square().mean(), start)
    # What is done to frames behind the decoder differs by family, and of MiniMax-H3's tiny one they are most of it.
    assert traced.following() == pytest.approx(memory.peak, rel=0.2 if family == "minimax_h3" else 0.15)


def test_adapters_may_be_on_some_kinds_of_blocks_alone() -> None:
    memory = estimate("flux1_dev", "model.lora={rank: 32, alpha: 64, targets: [attn.add_q_proj]}")
    assert memory.trained == 19 * 32 * (3072 + 3072)
    assert memory.optimize_activations > 0


def test_sums_of_weights_and_adapters_count_where_they_are_made() -> None:
    row = Activations(sampling=0, training=0, decoding=0)

    def weights(*overrides: str) -> int:
        config = load_config(ROOT / "configs" / "flux1_dev.yaml", ["model.dtype=float32", *overrides])
        return denoiser_of(config, row).training_weights

    targets = "targets: [attn.add_q_proj, attn.add_k_proj]"
    one, two = (
        weights(f"model.lora={{rank: 1, alpha: 1, {some}}}") for some in ("targets: [attn.add_q_proj]", targets)
    )
    # 19 blocks, each with a matrix of 3072 x 3072 and an adapter of rank 1, float32.
    assert two - one == 4 * 19 * (3072 * 3072 + 2 * 3072)
    half = weights(f"model.lora={{rank: 1, alpha: 1, {targets}}}", "model.dtype=bfloat16")
    assert half == two // 2 - 4 * 19 * 3072 * 3072 + 4 * 19 * 2 * 3072


def test_ranks_that_share_the_weights_hold_less() -> None:
    ranks = "execution.processes=8"
    one, ddp = estimate("flux1_dev"), estimate("flux1_dev", ranks)
    fsdp = estimate("flux1_dev", ranks, "execution.strategy=fsdp")
    offloaded = estimate("flux1_dev", ranks, "execution.strategy=fsdp", "execution.offload=true")
    assert ddp.training_weights == one.training_weights
    assert ddp.step == one.step + 4 * one.trained, "gradients are exchanged as one buffer"
    blocks = fsdp.training_weights - one.training_weights // 8
    assert 0.02 < blocks / one.training_weights < 0.1, "two blocks are whole at a time"
    assert fsdp.training_state == one.training_state // 8
    assert (offloaded.training_weights, offloaded.training_state) == (blocks, 0)
    assert one.sampling_weights < fsdp.sampling_weights < 1.2 * one.sampling_weights
    assert offloaded.sampling_weights == one.sampling_weights
    spread = estimate("flux1_dev", ranks, "execution.strategy=fsdp", "execution.sampling=spread")
    assert spread.sampling_weights == fsdp.training_weights
    groups = estimate("flux1_dev", ranks, "execution.strategy=fsdp", "execution.fsdp_size=4")
    assert groups.training_weights - blocks == one.training_weights // 4, "each group of four holds all"
    assert groups.training_state == one.training_state // 4
    split = estimate("flux1_dev", ranks, "execution.context_parallel=2")
    assert split.optimize_activations == one.optimize_activations // 2


def test_text_encoders_are_counted_where_they_live() -> None:
    memory = estimate("sd35_medium")
    assert memory.encode == pytest.approx(11.2e9, rel=0.02), "CLIP-L, CLIP-G and T5-XXL in bfloat16"
    assert memory.decode > memory.rollout, "an autoencoder at full resolution takes more than the denoiser's forward"


def test_an_unknown_model_has_no_estimate(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "flux1_dev.yaml", ["model.path=someone/else"])
    assert estimate_memory(config, reference=False) is None


def test_check_says_whether_it_fits(flowmill: FlowmillCommand) -> None:
    checked = flowmill("check", "configs/qwen_image.yaml", "--gpu-memory", "51")
    assert checked.returncode == 0, checked.stderr
    assert "20.43 billion parameters" in checked.stdout
    assert "does not fit 51 GB; optimize: set execution.micro_batch_size=1" in checked.stdout
    assert "fits 80 GB per GPU." in flowmill("check", "configs/qwen_image.yaml", "--gpu-memory", "80").stdout


@pytest.mark.campaign
def test_a_backward_pass_through_both_halves_of_guidance_keeps_both() -> None:
    gradients = ("conditional", "both")
    one, two = (estimate("sd35_medium", f"optimize.guidance_gradient={gradient}") for gradient in gradients)
    assert two.optimize_activations == pytest.approx(2 * one.optimize_activations, rel=0.1)
    assert two.rollout_activations == one.rollout_activations
    assert two.training_weights == one.training_weights


NONE = Activations(sampling=0, training=0, decoding=0)
JUDGED = ("rewards=[{name: pickscore, weight: 1.0}, {name: pickscore, label: again, weight: 0.5}]",)


def test_models_of_rewards_have_a_phase_of_their_own() -> None:
    def memory(*overrides: str) -> RunMemory:
        return memory_of(load_config(ROOT / "configs" / "flux1_dev.yaml", overrides), NONE)

    one, eight = memory(*JUDGED), memory(*JUDGED, "execution.processes=8")
    assert list(one.phases) == ["encode", "rollout", "decode", "score", "optimize"]
    assert one.lines["models of rewards"] == {"score": 4 * 986_109_441}, "one model under two labels"
    assert one.lines["policy, while it samples the next"]["score"] == max(one.phases["rollout"], one.phases["decode"])
    assert eight.lines["policy, at rest"]["score"] == eight.between
    config = load_config(ROOT / "configs" / "flux1_dev.yaml", JUDGED)
    assert "flowmill serve-reward" in one.advice(config, one.phases["score"] // 2)[-1]
    assert one.advice(config, one.phases["score"] - 1)[-1] == "score: lower rewards[].batch_size"
    config = load_config(ROOT / "configs" / "flux1_dev.yaml", (*JUDGED, "execution.processes=8"))
    spread = "set 'spread: true' of pickscore, again, let a server on another GPU"
    policy = "score: set execution.strategy=fsdp and execution.sampling=spread"
    assert eight.advice(config, eight.phases["score"] // 2)[-1].startswith(f"{policy}, {spread}")
    assert eight.advice(config, eight.rewards.weights // 2)[-1].startswith(f"score: {spread}")
    config = load_config(
        ROOT / "configs" / "flux1_dev.yaml", (*JUDGED, "execution.processes=8", "rewards.0.spread=true")
    )
    assert "set 'spread: true' of again, let" in eight.advice(config, eight.rewards.weights // 2)[-1]
    server = "rewards=[{name: pickscore, server: {url: 'http://127.0.0.1:8600'}}]"
    assert "score" not in memory(server, "evaluate.judges=[]").phases
    assert "score" in memory("rewards=[{name: jpeg_compressibility}]", "evaluate.judges=[{name: hpsv3}]").phases
    unknown = memory("rewards=[{name: clip_score, options: {model: someone/else}}]", "evaluate.judges=[]")
    assert "the model of reward 'clip_score' is not counted" in unknown.notes[-1]


ROW = Activations(sampling=0, training=10**9, decoding=0, kept=6 * 10**8, following=4 * 10**9)
CLIMB = ("rollout.plan=final", "execution.decode_batch_size=2", "rewards=[{name: pickscore, batch_size: 3}]")
PICKSCORE = transformer_takes("yuvalkirstain/PickScore_v1", "float32")
assert isinstance(PICKSCORE, Takes)


def test_rewards_that_are_followed_back_count_where_that_is_done() -> None:
    def memory(*overrides: str) -> RunMemory:
        config = load_config(ROOT / "configs" / "flux1_dev.yaml", [*CLIMB, "evaluate.judges=[]", *overrides])
        return memory_of(config, ROW)

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


def test_what_helps_where_rewards_that_are_followed_do_not_fit() -> None:
    def advice(algorithm: str, *overrides: str, room: int = 1) -> list[str]:
        config = load_config(
            ROOT / "configs" / "flux1_dev.yaml", [*CLIMB, f"optimize.algorithm={algorithm}", *overrides]
        )
        found = memory_of(config, ROW)
        return found.policy.advice(config, found.policy.phases["gradient" if "g" in algorithm else "optimize"] - room)

    assert advice("reward_gradient") == ["gradient: set execution.decode_batch_size=1"]
    late, one = "rollout.plan=late", "execution.decode_batch_size=1"
    assert advice("refl", late) == ["optimize: set execution.decode_batch_size=1"]
    assert advice("refl", late, one, "execution.micro_batch_size=1", "model.gradient_checkpointing=false") == [
        "optimize: set model.gradient_checkpointing=true"
    ]
    assert advice("refl", late, one) == ["optimize: set execution.micro_batch_size=3"]
    unknown = ("rewards=[{name: dina_lrm, options: {head: x}}]", "optimize.algorithm=reward_gradient")
    config = load_config(ROOT / "configs" / "sd35_medium.yaml", [*CLIMB, *unknown])
    assert "activations of the gradient of reward 'dina_lrm'" in memory_of(config, ROW).notes[0]


def test_what_encoding_takes_grows_with_its_batch() -> None:
    def memory(*overrides: str) -> DenoiserMemory:
        return denoiser_of(load_config(ROOT / "configs" / "flux1_dev.yaml", overrides), NONE)

    few, many = memory("execution.encode_batch_size=1"), memory("execution.encode_batch_size=5")
    assert many.encode_activations == 5 * few.encode_activations
    assert few.encode - few.encode_activations == few.text
    config = load_config(ROOT / "configs" / "flux1_dev.yaml", ["execution.encode_batch_size=5"])
    (change,) = (each for each in many.advice(config, many.encode - 1) if each.startswith("encode"))
    assert change == "encode: set execution.encode_batch_size=4"


def test_host_memory_is_counted() -> None:
    ranks = ("execution.processes=8", "execution.strategy=fsdp")

    def memory(*overrides: str) -> Mapping[str, int]:
        return memory_of(load_config(ROOT / "configs" / "flux1_dev.yaml", (*JUDGED, *overrides)), NONE).host

    one, offloaded = memory(), memory(*ranks, "execution.offload=true")
    assert one["models while they are read"] == pytest.approx(24.1e9, rel=0.01)
    assert one["models of rewards"] == 4 * 986_109_441
    assert {"offloaded", "offloaded, pinned"} & one.keys() == set()
    assert offloaded["models while they are read"] == pytest.approx(9.8e9, rel=0.01), "of text encoders, on each rank"
    assert offloaded["offloaded, pinned"] > 24e9 / 8


def test_parameters_and_moments_are_counted_where_they_lie() -> None:
    whole = ("model.lora=null", "execution.processes=8", "execution.strategy=fsdp")

    def memory(offload: str) -> DenoiserMemory:
        config = load_config(ROOT / "configs" / "flux1_dev.yaml", (*whole, f"execution.offload={offload}"))
        found = memory_of(config, NONE).policy
        assert isinstance(found, DenoiserMemory)
        return found

    off, on, parameters, optimizer = map(memory, ("false", "true", "parameters", "optimizer"))
    share = 4 * off.trained // 8

    def held(found: DenoiserMemory) -> tuple[int, int, int, int]:
        host = (found.host.get(label, 0) for label in ("offloaded, pinned", "offloaded"))
        return found.training_weights, found.training_state, *host

    blocks = held(on)[0]
    assert held(off) == (blocks + share, 4 * share, 0, 0), "a gradient, an average and two moments"
    assert held(on) == (blocks, 0, 2 * share, 3 * share), "weights and gradients are pinned"
    assert held(parameters) == (blocks, 2 * share, 2 * share, share)
    assert held(optimizer) == (blocks + share, 2 * share, 2 * share, 0)
    steps = [found.step for found in (off, on, parameters, optimizer)]
    assert steps == [share, 0, 12 << 27, 12 << 27], "as many numbers as are stepped at a time, and what adds to them"
