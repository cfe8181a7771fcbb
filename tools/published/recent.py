"""The settings of the algorithms of 2026 that train on the steps of a rollout, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.common import (
    BOTH,
    EMA,
    GRPO_BASE,
    JOINT,
    KL,
    WAN_ATTENTION,
    about,
    groups,
    lora,
    noise,
    plan,
    size,
)
from tools.published.publication import Publication

_SD35 = "stabilityai/stable-diffusion-3.5-medium"
_GARDO = "https://github.com/tinnerhrhe/GARDO/blob/1cc77fb341a8f84013cbb51e7685805acbef3425"
_FLASH = "https://github.com/Shredded-Pork/Flash-GRPO/blob/421101378e8811aa7460ada34a3b76ac7b53c9f7"
_OPD = "https://github.com/CostaliyA/Flow-OPD/blob/434ab16911fc580f51e22107151915846222eb6a"
_FDFO = "https://github.com/NVlabs/finite-difference-flow-optimization/blob/740e22f5746c31a0897fbd0a0f160c072685f05c"
_OPTIONS = "optimize.algorithm.options"


def _grpo_files(address: str, config: str, script: str) -> dict[str, str]:
    return {
        "base": f"{address}/config/base.py",
        "config": f"{address}/config/{config}.py",
        "script": f"{address}/scripts/{script}.py",
        "statistics": f"{address}/flow_grpo/stat_tracking.py",
    }


PUBLISHED: Mapping[str, Publication] = {
    "sd35_gardo": Publication(
        title="GARDO on Stable Diffusion 3.5 Medium",
        paper="2512.24138",
        files=_grpo_files(_GARDO, "gardo", "train_sd3_grpo_gardo"),
        remark=(
            "The optimized reward is OCR alone; the weights 0.8, 0.1 and 0.1 of the configuration are of a sum that is "
            "logged. That code's factor of a loss, the noise of its step over the mean of a batch, is 1, as the rows "
            "of a batch are of one step; and it gates the samples that others rank higher, where the paper and the "
            "preset gate those that the reward ranks higher."
        ),
        settings={
            "base": {**GRPO_BASE, **noise("flow_sde", noise_level=0.7)},
            "config": {
                **about(_SD35, "dataset/ocr", "1 ocr", 4.5, "float16"),
                **size(512),
                **groups(48, 24, 10),
                KL: 0.04,
                "optimize.updates_per_epoch": 2,
                "optimize.reference": "reset at a KL of 3e-4, or after 15 epochs",
                "evaluate.every": 60,
                "evaluate.steps": 40,
                "evaluate.samples": 1018,
                "run.epochs": 100000,
            },
            "script": {
                **lora(32, 64, JOINT),
                **EMA,
                **BOTH,
                "rollout.plan.name": "all",
                "rollout.plan.options.size": 8,
                "rollout.same_noise": False,
                "model.options.max_sequence_length": 128,
                "monitors": "aesthetic + imagereward + DINOv3",
                "advantage.kl_gate": "0.1, then 0.02 to 0.2",
            },
            "statistics": {"advantage.std": "none", "advantage.diversity": "nearest by DINOv3"},
        },
    ),
    "wan21_flash": Publication(
        title="Flash-GRPO on Wan 2.1",
        paper="2605.15980",
        files={
            **_grpo_files(_FLASH, "dgx", "train_wanx2_1_flash"),
            "launch": f"{_FLASH}/scripts/multi_node/train_wanx2_1_flash.sh",
        },
        remark=(
            "96 GPUs draw 24 prompts twice an epoch, each on four of them, which make two clips: 48 groups of eight. "
            "Nothing is trained in the first two of the 300 epochs. The rectification is ten numbers for the noise "
            "levels of 20 steps there, and computed here. The script for 8 GPUs is not published."
        ),
        settings={
            "base": GRPO_BASE,
            "config": {
                **about("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "dataset/video", "1 videohpsv3", 4.5),
                **size(480, 832),
                "model.frames": 81,
                "rollout.steps": 20,
                "advantage.std": "global",
                f"{_OPTIONS}.clip_range": 1e-3,
                "optimize.learning_rate": 1e-4,
                "evaluate.every": 20,
                "evaluate.steps": 50,
                "run.epochs": 300,
            },
            "script": {
                **lora(16, 32, WAN_ATTENTION),
                **EMA,
                **BOTH,
                **plan("subset", count=1, candidates=list(range(10))),
                "rollout.sampler.name": "wan_sde",
                "optimize.algorithm.name": "flash_grpo",
                "optimize.updates_per_epoch": 2,
                "model.options.max_sequence_length": 512,
            },
            "launch": {"rollout.prompts_per_epoch": 48, "rollout.group_size": 8},
        },
    ),
    "sd35_opd": Publication(
        title="Flow-OPD on Stable Diffusion 3.5 Medium",
        paper="2605.08063",
        files={
            **_grpo_files(_OPD, "grpo", "train_sd3_opd_mix"),
            "readme": f"{_OPD}/README.md",
        },
        remark=(
            "Teachers are adapters there: jieliu/SD3.5M-FlowGRPO-Text for the first, and for the second one of two the "
            "README names. A start from merged adapters and an anchor of its own for the KL are options there, and off."
        ),
        settings={
            "base": {
                "model.dtype": "float16",
                **noise("flow_sde", noise_level=0.7),
                "optimize.betas": [0.9, 0.999],
                "optimize.epsilon": 1e-8,
                "optimize.weight_decay": 1e-4,
                "optimize.max_grad_norm": 1.0,
                "optimize.inner_epochs": 1,
            },
            "config": {
                "model.path": _SD35,
                "model.guidance_scale": 4.5,
                "prompts.sources": "1 dataset/ocr + 3 dataset/geneval, epochs in turns",
                "rewards": "1 ocr + 1 geneval",
                **size(512),
                **groups(16, 16, 10),
                "rollout.same_noise": False,
                "optimize.algorithm.name": "kl_only",
                f"{_OPTIONS}.teachers.ocr": "SD3.5M-FlowGRPO-Text",
                f"{_OPTIONS}.teachers.geneval": "SD3.5M-FlowGRPO-GenEval",
                KL: 0.04,
                "optimize.learning_rate": 1e-4,
                "optimize.updates_per_epoch": 2,
                "evaluate.every": 60,
                "evaluate.steps": 40,
                "run.epochs": 100000,
            },
            "script": {
                **lora(32, 64, JOINT),
                **EMA,
                **BOTH,
                **plan("all", last="sde"),
                f"{_OPTIONS}.kl": "flow_grpo",
                "model.options.max_sequence_length": 128,
            },
        },
    ),
    "sd35_fdfo": Publication(
        title="FDFO on Stable Diffusion 3.5 Medium",
        paper="2603.12893",
        files={"config": f"{_FDFO}/fdfo/config.py", "loop": f"{_FDFO}/fdfo/train_loop.py"},
        remark=(
            "With --reward-preset pickscore; the default adds 0.1 times an answer of Qwen2.5-VL-7B. Noise levels are "
            "the churn 0.0025 in the terms of cps. Results are reasonably good around 100 of the 1000 epochs, says its "
            "README. Its license allows no commercial use; it was read for its settings alone."
        ),
        settings={
            "config": {
                **about(_SD35, "pickscore_train.txt", "1 pickscore", 1.0),
                **size(512),
                **groups(432, 2, 40),
                **noise("cps", noise_level=0.04497),
                **plan("all", last="ode, trained"),
                "model.lora.rank": 32,
                "model.lora.alpha": 64,
                "rollout.own_noise": 0.04497,
                f"{_OPTIONS}.clip_range": 0.03,
                KL: 0.0,
                "optimize.learning_rate": 3e-5,
                "optimize.betas": [0.9, 0.999],
                "optimize.weight_decay": 1e-4,
                "optimize.epsilon": 1e-8,
                "optimize.max_grad_norm": 1.0,
                "optimize.updates_per_epoch": 4,
                "run.epochs": 1000,
            },
            "loop": {
                "model.dtype": "bfloat16",
                "model.lora.targets": sorted(JOINT),
                "model.options.max_sequence_length": 128,
                "rollout.same_noise": True,
                "optimize.algorithm.name": "fdfo",
                "optimize.inner_epochs": 1,
                "optimize.ema": None,
                "advantage.std": "none",
                "advantage.clip": "off",
            },
        },
    ),
}
