"""The settings of DDPO, TempFlow-GRPO, DanceGRPO, MMDanceGRPO, SRPO and ReFL, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.common import (
    ADAM,
    BOTH,
    CLIP,
    EMA,
    FLUX,
    GRPO_BASE,
    GRPO_BASE_FILE,
    KL,
    QWEN_IMAGE,
    about,
    groups,
    lora,
    noise,
    plan,
    size,
)
from tools.published.publication import Publication

_TEMPFLOW = "https://github.com/Shredded-Pork/TempFlow-GRPO/blob"
_DANCE = "https://github.com/XueZeyue/DanceGRPO/blob/15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344"
_MM = (
    "https://github.com/verl-project/verl-recipe/blob/e477deff97b15d067f8b4e71f75b80ae58ad64c4"
    "/dance_grpo/dance_grpo_mindspeed_mm"
)
_REFL = "https://github.com/THUDM/ImageReward/blob/c1392c6dd0fd6ecd6d416c96959ab744a6d0a8fb"
_SRPO = "https://github.com/Tencent-Hunyuan/SRPO/blob/81e58984740e384cda913c7334c0bdaa53dfb244"
_DDPO = "https://github.com/kvablack/ddpo-pytorch/blob/1958463f020112c9a7bc85768d296daacc2e1b4b"


def _tempflow_files(name: str, script: str) -> dict[str, str]:
    return {
        "base": GRPO_BASE_FILE,
        "config": f"{_TEMPFLOW}/63e4def7159940ba7d60e4e6250eee868342388c/config/dgx.py",
        "script": f"{_TEMPFLOW}/{script}/scripts/train_{name}_pr.py",
        "readme": f"{_TEMPFLOW}/0d6fb4bca5447a3c6edcce15a800deddefc2a5a2/Readme.md",
    }


_SEEDS = (
    "The public code hard-codes the noise level 0.7 with a remark on FLUX's 0.9; the weights 1.73 and 1.53 in its "
    "scripts are those of 0.9 for FLUX and 1.2 for Qwen-Image. One launch on 48 GPUs makes 48 groups of four trunks. "
    "Optimizer settings are Flow-GRPO's, which this code changes."
)


_RANK = "Rank 4 is diffusers' default for the processors the script builds. Nothing is evaluated there."


def _ddpo(title: str, remark: str) -> Publication:
    return Publication(
        title=title,
        paper="2305.13301",
        files={
            "base": f"{_DDPO}/config/base.py",
            "config": f"{_DDPO}/config/dgx.py",
            "script": f"{_DDPO}/scripts/train.py",
            "statistics": f"{_DDPO}/ddpo_pytorch/stat_tracking.py",
        },
        remark=f"{_RANK}{remark}",
        settings={
            "base": {
                **ADAM,
                "optimize.epsilon": 1e-8,
                "optimize.learning_rate": 3e-4,
                "optimize.inner_epochs": 1,
                "model.guidance_scale": 5.0,
                "model.dtype": "float16",
                "rollout.steps": 50,
                **noise("ddim", eta=1.0),
                **plan("all", last="train"),
            },
            "config": {
                "model.path": "CompVis/stable-diffusion-v1-4",
                "prompts.train": "imagenet_animals",
                "rewards": "1 jpeg_compressibility",
                "rollout.prompts_per_epoch": 256,
                "rollout.group_size": 1,
                "optimize.updates_per_epoch": 4,
                "advantage.std": "running",
                "advantage.buffer": 16,
                "advantage.min_count": 16,
                "run.epochs": 100,
            },
            "statistics": {"advantage.epsilon": 1e-6},
            "script": {**lora(4, 4, ["to_q", "to_k", "to_v", "to_out.0"]), **size(512), **BOTH, "optimize.ema": None},
        },
    )


#: Options of the algorithms that SRPO and ReFL are.
_ALIGN = "optimize.algorithm.options"
PUBLISHED: Mapping[str, Publication] = {
    "sd15_ddpo": _ddpo("DDPO on Stable Diffusion 1.x", ""),
    "sdxl_ddpo": _ddpo(
        "DDPO's settings on Stable Diffusion XL",
        " For this model none are published; the settings are those of Stable Diffusion 1.x, but for its size.",
    ),
    "flux1_tempflow": Publication(
        title="TempFlow-GRPO on FLUX.1 dev",
        paper="2508.04324",
        files=_tempflow_files("flux", "28a9b9beb2a8536ece40909509fdf3f0fdfe839c"),
        remark=_SEEDS,
        settings={
            "base": GRPO_BASE,
            "config": {
                **about("black-forest-labs/FLUX.1-dev", "dataset/hpsv2", "1 hpsv3", 3.5),
                **size(1024),
                **groups(48, 4, 10),
                "advantage.std": "group",
                KL: 0.004,
                "evaluate.every": 20,
                "evaluate.steps": 50,
                "run.epochs": 250,
            },
            "script": {
                **lora(32, 64, FLUX),
                **EMA,
                **noise("flow_sde", noise_level=0.9),
                "optimize.algorithm.name": "tempflow",
                "optimize.algorithm.options.kl": "gaussian",
                "optimize.updates_per_epoch": 2,
                "model.options.max_sequence_length": 128,
                "advantage.group": "seed of 6",
            },
            "readme": {**plan("branch", branches=6, steps=None), "rollout.same_noise": False},
        },
    ),
    "qwen_image_tempflow": Publication(
        title="TempFlow-GRPO on Qwen-Image",
        paper="2508.04324",
        files=_tempflow_files("qwenimage", "354fd3887e26b33caedc2baf48bf680f278541fe"),
        remark=_SEEDS,
        settings={
            "base": GRPO_BASE,
            "config": {
                **about("Qwen/Qwen-Image", "dataset/pickscore", "1 pickscore", 4.0),
                **size(512),
                **groups(48, 4, 10),
                "advantage.std": "group",
                "optimize.ema": None,
                "evaluate.every": 20,
                "evaluate.steps": 50,
                "run.epochs": 250,
            },
            "script": {
                **lora(64, 128, QWEN_IMAGE),
                **BOTH,
                **noise("flow_sde", noise_level=1.2),
                "model.negative_prompt": " ",
                "optimize.algorithm.name": "tempflow",
                "optimize.updates_per_epoch": 2,
                "advantage.group": "seed of 6",
            },
            "readme": {**plan("branch", branches=6, steps=None), "rollout.same_noise": False},
        },
    ),
    "sd15_refl": Publication(
        title="ReFL on Stable Diffusion 1.x",
        paper="2304.05977",
        files={
            "launch": f"{_REFL}/scripts/train_refl.sh",
            "script": f"{_REFL}/ImageReward/ReFL.py",
            "readme": f"{_REFL}/README.md",
        },
        remark=(
            "Two prompts on each of 8 GPUs, an update after four of those. Sampling is without guidance, by diffusers' "
            "DDPMScheduler, whose noise is that of DDIM with eta 1. The paper has a pre-training loss too, this code "
            "none. Images are cut to 0..1 there."
        ),
        settings={
            "launch": {
                "model.dtype": "float16",
                **size(512),
                "model.gradient_checkpointing": True,
                "rollout.prompts_per_epoch": 64,
                "optimize.learning_rate": 1e-5,
                "optimize.max_grad_norm": 1.0,
                f"{_ALIGN}.scale": 1e-3,
                "run.epochs": 100,
            },
            "script": {
                "model.lora": None,
                "model.guidance_scale": 1.0,
                "rewards": "1 imagereward",
                "rollout.group_size": 1,
                "rollout.steps": 40,
                "rollout.sampler.name": "ddpm",
                **plan("late", count=1, low=30, high=None),
                "optimize.algorithm.name": "refl",
                f"{_ALIGN}.steps": 1,
                f"{_ALIGN}.margin": 2.0,
                "optimize.betas": [0.9, 0.999],
                "optimize.weight_decay": 1e-2,
                "optimize.epsilon": 1e-8,
                "optimize.updates_per_epoch": 1,
                "optimize.ema.decay": 0.9999,
            },
            "readme": {"model.path": "CompVis/stable-diffusion-v1-4", "prompts.train": "refl_data.json"},
        },
    ),
    "flux1_srpo": Publication(
        title="SRPO on FLUX.1 dev",
        paper="2509.06942",
        files={
            "launch": f"{_SRPO}/scripts/finetune/SRPO_training_hpsv2.sh",
            "script": f"{_SRPO}/fastvideo/SRPO.py",
            "readme": f"{_SRPO}/README.md",
        },
        remark=(
            "A prompt on each of 32 GPUs, its two branches one after the other, from two states that end at one level; "
            "here one state has both. All ranks begin with one noise, which is the known noise too; here each has its "
            "own. Words take turns there and are drawn here. Training ends at step 20, where images are "
            "shown. "
            "Levels are 1000 parts between steps 5 and 25 of 50 at a shift of 3, the step is 101 of them. A script for "
            "PickScore has other levels, 5 to 30, and other factors, 0.1 to 0.5 and 0.6 to 0.01."
        ),
        settings={
            "launch": {
                **about("black-forest-labs/FLUX.1-dev", "videos2caption2.json", "1 hpsv2", 3.5),
                "model.guidance_scale": "1 to sample, 3.5 to train",
                "model.gradient_checkpointing": True,
                "model.options.shift": 3,
                **size(720),
                "rollout.steps": 25,
                "optimize.learning_rate": 5e-6,
                "optimize.weight_decay": 1e-4,
                "optimize.max_grad_norm": 0.1,
                f"{_ALIGN}.denoising": [0.1, 0.25],
                f"{_ALIGN}.inverting": [0.3, 0.01],
                "run.epochs": 19,
            },
            "script": {
                "model.lora": None,
                "optimize.betas": [0.9, 0.999],
                "optimize.epsilon": 1e-8,
                "optimize.ema": None,
                "optimize.updates_per_epoch": 1,
                "rollout.group_size": 1,
                "rollout.sampler.name": "ode",
                "optimize.algorithm.name": "direct_align",
                f"{_ALIGN}.times.low": 0.75,
                f"{_ALIGN}.times.high": 0.9643,
                f"{_ALIGN}.step": 0.0217,
                f"{_ALIGN}.positive": ["Natural-lighting", "Detail", "Detailed", "Real"],
                f"{_ALIGN}.negative": ["Concept art", "Painting", "Anime", "Flat", "Oil"],
                f"{_ALIGN}.margin": 0.7,
                "evaluate.steps": 50,
            },
            "readme": {"rollout.prompts_per_epoch": 32},
        },
    ),
    "flux1_dance": Publication(
        title="DanceGRPO on FLUX.1 dev, adapters",
        paper="2505.07818",
        files={
            "launch": f"{_DANCE}/scripts/finetune/finetune_flux_grpo_8gpus_lora.sh",
            "script": f"{_DANCE}/fastvideo/train_grpo_flux_lora.py",
        },
        remark="Two prompts on each of 8 GPUs, an update every 12 of 24 samples per GPU. Nothing is evaluated there.",
        settings={
            "launch": {
                **ADAM,
                **about("black-forest-labs/FLUX.1-dev", "videos2caption.json", "1 hpsv2", 3.5),
                **size(720),
                **groups(16, 12, 12),
                **noise("dance_sde", eta=0.3),
                "rollout.same_noise": True,
                "model.options.shift": 3,
                "optimize.learning_rate": 3e-4,
                "optimize.updates_per_epoch": 2,
                "advantage.std": "group",
                "run.epochs": 301,
            },
            "script": {
                **lora(128, 256, ["to_q", "to_k", "to_v", "to_out.0"]),
                **plan("fraction", fraction=0.6, last="ode"),
                "optimize.algorithm.name": "grpo",
                "optimize.ema": None,
                KL: 0.0,
                "advantage.aggregation": "sum",
                "advantage.epsilon": 1e-8,
                "advantage.floor": "add",
                "advantage.unbiased": True,
                "model.options.max_sequence_length": 512,
            },
        },
    ),
    "wan22_first_frame": Publication(
        title="MMDanceGRPO on Wan 2.2",
        paper="2505.07818",
        files={
            "launch": f"{_MM}/run_verl_dance.sh",
            "model.json": f"{_MM}/examples/wan2.2/5B/t2v/model.json",
            "worker": f"{_MM}/diffusion_workers.py",
            "step": f"{_MM}/model/modeling_sora_model.py",
        },
        remark=(
            "The code does not read all that its launch script sets: the optimizer is built from get_train_args.sh "
            "(learning rate 1e-5, constant), rollouts take the 50 steps and the shift 5 of model.json, and the KL "
            "coefficient 1.0 has no loss. The table has the launch script's values, the shift that is used, and no KL. "
            "The filter by a group's mean reward is off unless use_group is set."
        ),
        settings={
            "launch": {
                "model.path": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
                "model.lora": None,
                "prompts.train": "train.parquet",
                **groups(64, 8, 10),
                "rollout.same_noise": True,
                **plan("all", last="train"),
                "optimize.learning_rate": 5e-8,
                "optimize.schedule": "cosine, 1000 of 10000 updates warm-up",
                "optimize.weight_decay": 0.01,
                "optimize.max_grad_norm": 1.0,
                "advantage.clip": 10.0,
                CLIP: 1e-4,
                "run.epochs": 200,
            },
            "model.json": {**size(704, 1280), "model.frames": 45, "model.options.flow_shift": 5.0},
            "worker": {
                "rewards": "0.1 hpsv3",
                "rewards.frames": "first",
                "optimize.updates_per_epoch": 1,
                "optimize.ema": None,
                "optimize.algorithm.name": "grpo",
                KL: 0.0,
                "advantage.std": "group",
                "advantage.epsilon": 1e-8,
                "advantage.floor": "add",
                "advantage.unbiased": True,
            },
            "step": {**noise("dance_sde", eta=0.3), "model.guidance_scale": 1.0},
        },
    ),
}
