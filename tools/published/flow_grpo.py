"""Flow-GRPO's settings, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.common import (
    BOTH,
    CLIP,
    EMA,
    FLOW_GRPO,
    FLUX,
    GRPO_BASE,
    GRPO_BASE_FILE,
    JOINT,
    KL,
    QWEN_IMAGE,
    QWEN_IMAGE21,
    WAN_ATTENTION,
    about,
    groups,
    lora,
    noise,
    plan,
    size,
)
from tools.published.publication import Publication

_QWEN = "https://github.com/zhtmike/flow_grpo/blob/27b6ef886ad63071e9d242e8972d45fd46f406b5"
_GRPO_ALL = {
    "rollout.same_noise": False,
    "optimize.updates_per_epoch": 2,
    "advantage.std": "global",
    "run.epochs": 100000,
    "evaluate.every": 30,
}


def _grpo_files(script: str, scripts: str = f"{FLOW_GRPO}/74db69191de9a0a54869c9c3341ce4b54db7005f") -> dict[str, str]:
    return {
        "base": GRPO_BASE_FILE,
        "config": f"{FLOW_GRPO}/31c71b9dc2c31e684cb547e464c941094140ac19/config/grpo.py",
        "script": f"{scripts}/scripts/{script}",
    }


_PER_RANK = (
    "The public code draws the window of stochastic steps per rank, which mixes windows within a group; here it is "
    "drawn per group."
)


def _wan(title: str, remark: str = "", targets: list[str] = WAN_ATTENTION) -> Publication:
    return Publication(
        title=title,
        paper="2505.05470",
        files={
            **_grpo_files("train_wan2_1.py", f"{FLOW_GRPO}/32b48fd03cdff0c5bce7c3d285a469de8ebf72ef"),
            "readme": "https://github.com/yifan123/flow_grpo/blob/main/README.md",
        },
        remark=f"The number of groups is that of the command in the README, on one GPU; more GPUs make more.{remark}",
        settings={
            "base": GRPO_BASE,
            "config": {
                **_GRPO_ALL,
                **about("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "dataset/ocr", "1 ocr", 4.5),
                **size(240, 416),
                "model.frames": 33,
                "rollout.group_size": 4,
                "rollout.steps": 20,
                **plan("all", last="sde"),
                "advantage.std": "group",
                KL: 0.004,
                CLIP: 1e-3,
                "optimize.learning_rate": 1e-4,
                "evaluate.steps": 50,
            },
            "script": {
                **lora(32, 64, targets),
                **EMA,
                **BOTH,
                "rollout.sampler.name": "wan_sde",
                "optimize.algorithm.options.kl": "gaussian",
                "model.options.max_sequence_length": 512,
            },
            "readme": {"rollout.prompts_per_epoch": 4},
        },
    )


def _sd35(title: str, targets: list[str], remark: str = "") -> Publication:
    return Publication(
        title=title,
        paper="2505.05470",
        files=_grpo_files("train_sd3.py"),
        remark=f"The script of July 2025 (commit ac4c86e) detaches the unconditional half of guidance.{remark}",
        settings={
            "base": GRPO_BASE,
            "config": {
                **_GRPO_ALL,
                **about("stabilityai/stable-diffusion-3.5-medium", "dataset/ocr", "1 ocr", 4.5, "float16"),
                **size(512),
                **groups(48, 24, 10),
                **plan("all", last="sde"),
                **noise("flow_sde", noise_level=0.7),
                KL: 0.04,
                "evaluate.every": 60,
                "evaluate.steps": 40,
                "evaluate.samples": 1018,
            },
            "script": {
                **lora(32, 64, targets),
                **EMA,
                **BOTH,
                "optimize.algorithm.options.kl": "flow_grpo",
                "model.options.max_sequence_length": 128,
            },
        },
    )


PUBLISHED: Mapping[str, Publication] = {
    "sd35_medium": _sd35("Flow-GRPO on Stable Diffusion 3.5 Medium", JOINT),
    "sana_1_6b": _sd35(
        "Flow-GRPO's settings for Stable Diffusion 3.5 Medium on SANA 1.5 1.6B",
        WAN_ATTENTION,
        " For this model none are published; the settings are those of Stable Diffusion 3.5 Medium, and the adapted "
        "layers are the attention that SANA has.",
    ),
    "flux1_dev": Publication(
        title="Flow-GRPO on FLUX.1 dev",
        paper="2505.05470",
        files=_grpo_files("train_flux.py"),
        settings={
            "base": GRPO_BASE,
            "config": {
                **_GRPO_ALL,
                **about("black-forest-labs/FLUX.1-dev", "dataset/pickscore", "1 pickscore", 3.5),
                **size(512),
                **groups(48, 24, 6),
                **plan("all", last="sde"),
                **noise("flow_sde", noise_level=0.9),
                "evaluate.steps": 28,
                "evaluate.samples": 2048,
            },
            "script": {**lora(64, 128, FLUX), **EMA, "model.options.max_sequence_length": 128},
        },
    ),
    "flux1_kontext": Publication(
        title="Flow-GRPO on FLUX.1 Kontext",
        paper="2505.05470",
        files=_grpo_files("train_flux_kontext.py"),
        settings={
            "base": GRPO_BASE,
            "config": {
                **_GRPO_ALL,
                **about(
                    "black-forest-labs/FLUX.1-Kontext-dev",
                    "dataset/counting_edit",
                    "0.5 image_similarity + 0.5 geneval",
                    2.5,
                ),
                **size(512),
                **groups(48, 21, 6),
                **plan("all", last="sde"),
                **noise("flow_sde", noise_level=0.9),
                "evaluate.steps": 28,
            },
            "script": {**lora(64, 128, [*FLUX, "proj_mlp"]), **EMA, "model.options.max_sequence_length": 128},
        },
    ),
    "qwen_image": Publication(
        title="Flow-GRPO on Qwen-Image",
        paper="2505.05470",
        files=_grpo_files("train_qwenimage.py", _QWEN),
        remark=f"{_PER_RANK} The training script was read in a fork of the repository.",
        settings={
            "base": GRPO_BASE,
            "config": {
                **_GRPO_ALL,
                **about("Qwen/Qwen-Image", "dataset/pickscore", "1 pickscore", 4.0),
                **size(512),
                **groups(32, 16, 10),
                **plan("window", size=2, low=0, high=5),
                **noise("flow_sde", noise_level=1.2),
                "optimize.ema": None,
                "evaluate.steps": 50,
                "evaluate.samples": 2048,
            },
            "script": {**lora(64, 128, QWEN_IMAGE), **BOTH, "model.negative_prompt": " "},
        },
    ),
    "qwen_image21": Publication(
        title="Flow-GRPO's settings for Qwen-Image on Qwen-Image 2.1",
        paper="2505.05470",
        files=_grpo_files("train_qwenimage.py", _QWEN),
        remark=f"{_PER_RANK} For this model none are published; the settings are those of Qwen-Image, whose script was "
        "read in a fork of the repository, and the adapted layers are attention and feed-forwards, as there.",
        settings={
            "base": GRPO_BASE,
            "config": {
                **_GRPO_ALL,
                **about("Qwen/Qwen-Image-2.1", "dataset/pickscore", "1 pickscore", 4.0),
                **size(512),
                **groups(32, 16, 10),
                **plan("window", size=2, low=0, high=5),
                **noise("flow_sde", noise_level=1.2),
                "optimize.ema": None,
                "evaluate.steps": 50,
                "evaluate.samples": 2048,
            },
            "script": lora(64, 128, QWEN_IMAGE21),
        },
    ),
    "qwen_image_edit": Publication(
        title="Flow-GRPO on Qwen-Image-Edit",
        paper="2505.05470",
        files=_grpo_files("train_qwenimage.py", _QWEN),
        remark=f"{_PER_RANK} Adapters and gradient are those of the script for Qwen-Image, read in a fork.",
        settings={
            "base": GRPO_BASE,
            "config": {
                **_GRPO_ALL,
                **about("Qwen/Qwen-Image-Edit", "dataset/counting_edit", "0.2 image_similarity + 0.8 geneval", 4.0),
                **size(512),
                **groups(32, 16, 10),
                **plan("window", size=4, low=0, high=5),
                **noise("flow_sde", noise_level=1.5),
                "optimize.ema": None,
                "evaluate.steps": 50,
            },
            "script": {**lora(64, 128, QWEN_IMAGE), **BOTH, "model.negative_prompt": " "},
        },
    ),
    "wan21_1_3b": _wan("Flow-GRPO on Wan 2.1 1.3B"),
    "wan22_ti2v_5b": _wan(
        "Flow-GRPO's settings for Wan 2.1 on Wan 2.2 TI2V-5B",
        " For this model none are published; the settings are those of Wan 2.1 1.3B.",
    ),
    "hunyuan_video15_480p": _wan(
        "Flow-GRPO's settings for Wan 2.1 on HunyuanVideo 1.5",
        " For this model none are published; the settings are those of Wan 2.1 1.3B, and the adapted layers are the "
        "attention that this model has.",
        JOINT,
    ),
    "cogvideox_2b": _wan(
        "Flow-GRPO's settings for Wan 2.1 on CogVideoX 2B",
        " For this model none are published; the settings are those of Wan 2.1 1.3B, and the adapted layers are the "
        "attention that this model has.",
        [f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")],
    ),
    "ltx2": _wan(
        "Flow-GRPO's settings for Wan 2.1 on LTX-2, clips with sound",
        " For this model none are published; the settings are those of Wan 2.1 1.3B, and the adapted layers are all "
        "attention of both streams.",
        ["to_q", "to_k", "to_v", "to_out.0"],
    ),
    "sana_video_2b": _wan(
        "Flow-GRPO's settings for Wan 2.1 on SANA-Video 2B",
        " For this model none are published; the settings are those of Wan 2.1 1.3B.",
    ),
}
