"""The settings of GRPO-Guard, Flow-DPPO and MixGRPO on Stable Diffusion 3.5 Medium, by preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.published.common import (
    BOTH,
    EMA,
    GRPO_BASE,
    GRPO_BASE_FILE,
    JOINT,
    KL,
    about,
    groups,
    lora,
    noise,
    plan,
    size,
)
from tools.published.publication import Publication

_SD35 = "stabilityai/stable-diffusion-3.5-medium"
_FORK = "https://github.com/zhtmike/flow_grpo/blob/2e2f712e9feb19246fa0db9527878e2766b5353f"
_UNIRL = "https://github.com/Tencent-Hunyuan/UniRL/blob/1a7b501e8fe8517b432a130220d2ff462f9b5afa"
_OPTIONS = "optimize.algorithm.options"


def _unirl(
    name: str, paper: str, example: str, *, remark: str, own: Mapping[str, Any], steps: Mapping[str, Any]
) -> Publication:
    """Return what UniRL's examples for this model share, and what one has of its own."""
    return Publication(
        title=f"{name} on Stable Diffusion 3.5 Medium",
        paper=paper,
        files={
            "example": f"{_UNIRL}/examples/diffusion/{example}.yaml",
            "advantages": f"{_UNIRL}/unirl/types/rollout_resp.py",
            "encoders": f"{_UNIRL}/unirl/models/sd3/text_embed.py",
            "steps": f"{_UNIRL}/unirl/utils/scheduler_utils.py",
        },
        remark=f"The rewards' standard deviation is that of the whole epoch. Nothing is evaluated there. {remark}",
        settings={
            "example": {
                **about(_SD35, "datasets/pickscore/train.txt", "1 pickscore", 1.0),
                **size(512),
                **groups(48, 16, 10),
                **lora(32, 64, JOINT),
                **noise("flow_sde", noise_level=0.7),
                "rollout.latents_dtype": "bfloat16",
                "advantage.std": "global",
                KL: 0.0,
                "optimize.learning_rate": 3e-4,
                "optimize.betas": [0.9, 0.999],
                "optimize.epsilon": 1e-8,
                "optimize.max_grad_norm": 1.0,
                "optimize.updates_per_epoch": 2,
                "optimize.ema": None,
                "run.epochs": 10000,
                **own,
            },
            "advantages": {"advantage.epsilon": 1e-8, "advantage.floor": "add", "advantage.unbiased": True},
            "encoders": {"model.options.max_sequence_length": 256},
            "steps": steps,
        },
    )


PUBLISHED: Mapping[str, Publication] = {
    "sd35_guard": Publication(
        title="GRPO-Guard on Stable Diffusion 3.5 Medium",
        paper="2510.22319",
        files={
            "base": GRPO_BASE_FILE,
            "config": f"{_FORK}/config/grpo_guard.py",
            "script": f"{_FORK}/scripts/train_sd3_GRPO_Guard.py",
        },
        remark=(
            "It is part of Flow-GRPO's repository, and was read in a fork. That code's scale of a step is the mean of "
            "a batch, here each row's own. For PickScore the clip is 4e-6."
        ),
        settings={
            "base": {**GRPO_BASE, **noise("flow_sde", noise_level=0.7)},
            "config": {
                **about(_SD35, "dataset/ocr", "1 ocr", 4.5, "float16"),
                **size(512),
                **groups(48, 24, 10),
                "rollout.same_noise": False,
                f"{_OPTIONS}.clip_range": 2e-6,
                KL: 0.0,
                "optimize.learning_rate": 1e-4,
                "optimize.updates_per_epoch": 2,
                "advantage.std": "group",
                "evaluate.every": 30,
                "evaluate.steps": 40,
                "evaluate.samples": 1018,
            },
            "script": {
                **lora(32, 64, JOINT),
                **EMA,
                **BOTH,
                **plan("all", last="sde"),
                "optimize.algorithm.name": "grpo_guard",
                f"{_OPTIONS}.divide_by_dt": True,
                "model.options.max_sequence_length": 128,
                "run.epochs": "no end",
            },
        },
    ),
    "sd35_dppo": _unirl(
        "Flow-DPPO",
        "2606.11025",
        "sd3_flowdppo",
        remark="The three steps are drawn once per epoch there, and per group here.",
        own={
            "optimize.algorithm.name": "flow_dppo",
            f"{_OPTIONS}.threshold": 1e-5,
            "optimize.weight_decay": 0.0,
            "rollout.same_noise": False,
        },
        steps=plan("subset", count=3, candidates=[0, 1, 2, 3, 4]),
    ),
    "sd35_mixgrpo": _unirl(
        "MixGRPO",
        "2507.21802",
        "sd3_mixgrpo",
        remark=(
            "MixGRPO's own code trains FLUX.1 dev; this is UniRL's, of the same company. Its window begins at steps 0, "
            "3 and 6 in turns; here 2, 5, 1 and 4 come before 0 again."
        ),
        own={
            "optimize.algorithm.name": "grpo",
            f"{_OPTIONS}.clip_range": 1e-4,
            "optimize.weight_decay": 1e-4,
            "rollout.same_noise": True,
        },
        steps=plan("window", size=4, low=0, high=10, mode="progressive", stride=3, epochs_per_shift=25),
    ),
}
