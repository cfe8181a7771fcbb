"""The settings of DiffusionNFT, AWM, DGPO, CRD and Diffusion-DPO, which train on final samples, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.common import EMA, JOINT, KL, QWEN_IMAGE, about, groups, lora, size
from tools.published.publication import Publication

_SD35 = "stabilityai/stable-diffusion-3.5-medium"
_NFT = "https://github.com/NVlabs/DiffusionNFT/blob/24af5554898d85e93efa492f42b5e9cdf4156e9b"
_AWM = (
    "https://github.com/scxue/advantage_weighted_matching/blob/be5137232e33a21b449ed65a533211d0deb97ed8"
    "/advantage_weighted_matching"
)
_DGPO = "https://github.com/Luo-Yihong/DGPO/blob/01ceb4b83c0bbc55d96246fe1b6d9a3d4749ebd6"
_FACTORY = "https://github.com/X-GenGroup/Flow-Factory/blob/a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c"
_OMNI = "https://github.com/verl-project/verl-omni/blob/a1139bafffb5b9711f0a6b6edff8ecaa60bfff30"
_OPTIONS = "optimize.algorithm.options"
_LEVELS = f"{_OPTIONS}.times"
_DECAY = f"{_OPTIONS}.decay"
_FINAL = {"rollout.plan.name": "final"}
#: What these configs share with Flow-GRPO's, which they began as.
_BASE = {
    "optimize.betas": [0.9, 0.999],
    "optimize.epsilon": 1e-8,
    "optimize.weight_decay": 1e-4,
    "optimize.learning_rate": 3e-4,
    "optimize.max_grad_norm": 1.0,
    "optimize.inner_epochs": 1,
    "advantage.clip": 5.0,
}
_TRACKER = {"advantage.epsilon": 1e-4, "advantage.floor": "add", "advantage.unbiased": False}


def _factory_files(algorithm: str) -> dict[str, str]:
    return {
        "example": f"{_FACTORY}/examples/{algorithm}/lora/sd3_5/default.yaml",
        "code": f"{_FACTORY}/src/flow_factory/hparams/training_args.py",
        "trainer": f"{_FACTORY}/src/flow_factory/trainers/{algorithm}.py",
        "advantages": f"{_FACTORY}/src/flow_factory/advantage/advantage_processor.py",
        "model": f"{_FACTORY}/src/flow_factory/models/stable_diffusion/sd3_5.py",
    }


_FACTORY_MODEL = {**lora(32, 64, JOINT), "model.options.max_sequence_length": 256}
_MAXIMUM = {"advantage.epsilon": 1e-6, "advantage.floor": "max"}

PUBLISHED: Mapping[str, Publication] = {
    "sd35_nft": Publication(
        title="DiffusionNFT on Stable Diffusion 3.5 Medium",
        paper="2509.16117",
        files={
            "base": f"{_NFT}/config/base.py",
            "config": f"{_NFT}/config/nft.py",
            "script": f"{_NFT}/scripts/train_nft_sd3.py",
            "statistics": f"{_NFT}/flow_grpo/stat_tracking.py",
        },
        remark=(
            "Its decay counts updates, two an epoch: 0 before the 75th, then 0.0075 more with each. For GenEval, "
            "PickScore and HPSv2 beta is 1, an epoch one update and the decay 0.001 an update, up to 0.5."
        ),
        settings={
            "base": {**_BASE, KL: 1e-4, "advantage.std": "global", "run.epochs": 100000, "evaluate.every": 10},
            "config": {
                **about(_SD35, "dataset/ocr", "1 ocr", 1.0, "float16"),
                **size(512),
                **groups(48, 24, 10),
                "rollout.solver": "dpm2",
                f"{_OPTIONS}.beta": 0.1,
                "optimize.updates_per_epoch": 2,
                "evaluate.steps": 40,
                "evaluate.samples": 1018,
            },
            "script": {
                **lora(32, 64, JOINT),
                **_FINAL,
                "model.options.max_sequence_length": 128,
                "optimize.algorithm.name": "nft",
                f"{_OPTIONS}.scale": 5.0,
                f"{_LEVELS}.kind": "grid",
                f"{_LEVELS}.count": 9,
                f"{_DECAY}.flat": 38,
                f"{_DECAY}.start": 0.0075,
                f"{_DECAY}.rate": 0.015,
                f"{_DECAY}.maximum": 0.999,
                "optimize.ema.decay": 0.9,
                "optimize.ema.every": 1,
                "evaluate.solver": "euler",
            },
            "statistics": _TRACKER,
        },
    ),
    "sd35_awm": Publication(
        title="AWM on Stable Diffusion 3.5 Medium",
        paper="2509.25050",
        files={
            "base": f"{_AWM}/config/base_awm.py",
            "config": f"{_AWM}/config/dgx_awm.py",
            "script": f"{_AWM}/scripts/train_sd3_awm.py",
            "statistics": f"{_AWM}/flow_grpo/stat_tracking.py",
            "pipeline": f"{_AWM}/flow_grpo/diffusers_patch/sd3_pipeline_with_logprob.py",
        },
        remark=(
            "With one update an epoch every ratio is 1, and the clip of 1 never acts. The average of the KL follows by "
            "min(0.001 epoch, 0.3) there. Nothing is trained in the first two epochs. For GenEval the KL has weight "
            "0.001, for PickScore 0.0001 and groups are a third as many."
        ),
        settings={
            "base": _BASE,
            "config": {
                **about(_SD35, "dataset/ocr", "1 ocr", 1.0, "float16"),
                **size(512),
                **groups(72, 24, 14),
                KL: 0.003,
                f"{_OPTIONS}.ema_kl_coef": 1,
                f"{_OPTIONS}.weighting": "ghuber",
                f"{_OPTIONS}.power": 0.25,
                f"{_OPTIONS}.clip_range": 1,
                f"{_LEVELS}.kind": "steps 2 to 12 of 14, one of each sixth",
                f"{_LEVELS}.count": 6,
                "advantage.std": "global",
                "optimize.updates_per_epoch": 1,
                "optimize.ema.decay": "0.3 for the KL, 0.99 for evaluation",
                "optimize.ema.every": 1,
                "evaluate.every": 20,
                "evaluate.steps": 40,
                "run.epochs": 100000,
            },
            "script": {
                **lora(32, 64, JOINT),
                **_FINAL,
                "model.options.max_sequence_length": 128,
                "optimize.algorithm.name": "awm",
            },
            "statistics": _TRACKER,
            "pipeline": {"rollout.solver": "SA-Solver, noise 0.4 between levels 0.3 and 0.9"},
        },
    ),
    "sd35_dgpo": Publication(
        title="DGPO on Stable Diffusion 3.5 Medium",
        paper="2510.08425",
        files={
            "base": f"{_DGPO}/config/base.py",
            "config": f"{_DGPO}/config/dgpo.py",
            "script": f"{_DGPO}/scripts/train_sd3_dgpo.py",
            "statistics": f"{_DGPO}/flow_grpo/stat_tracking.py",
        },
        remark=(
            "Groups of 24 and 24 groups are better, says a comment there; the clip of 0.01 is the code's, its README "
            "has 0.001. Up to update 200 rollouts are the policy's own, then those of its average; the clip compares "
            "with that average from the beginning there, here with the rollout policy. Its solver is diffusers' "
            "DPMSolverMultistepScheduler on levels of shift 3 that begin at 0.9997."
        ),
        settings={
            "base": {**_BASE, "model.dtype": "bfloat16"},
            "config": {
                **about(_SD35, "dataset/ocr", "1 ocr", 4.5),
                **size(512),
                **groups(8, 16, 10),
                f"{_OPTIONS}.beta": 100,
                f"{_OPTIONS}.clip_range": 1e-2,
                KL: 0.02,
                f"{_LEVELS}.count": 4,
                f"{_LEVELS}.low": 0.6663,
                f"{_LEVELS}.high": 0.9997,
                "advantage.std": "global",
                "optimize.updates_per_epoch": 1,
                "evaluate.every": 60,
                "evaluate.steps": 14,
            },
            "script": {
                **lora(64, 128, JOINT),
                **EMA,
                **_FINAL,
                "rollout.solver": "dpm2",
                "model.options.max_sequence_length": 128,
                "optimize.algorithm.name": "dgpo",
                f"{_OPTIONS}.guided": False,
                f"{_LEVELS}.kind": "4 of the first 7 of 10 steps",
                f"{_DECAY}.flat": 200,
                f"{_DECAY}.start": 0.2,
                f"{_DECAY}.rate": 0.001,
                f"{_DECAY}.maximum": 0.3,
                "run.epochs": "no end",
            },
            "statistics": _TRACKER,
        },
    ),
    "sd35_crd": Publication(
        title="Flow-Factory's CRD on Stable Diffusion 3.5 Medium",
        paper="2603.14128",
        files=_factory_files("crd"),
        remark=(
            "The example follows the paper's table 3. Decays count updates there, two an epoch. Rewards are centered "
            "over all GPUs' samples there, and within each prompt's group here. Levels are 20 of the ten "
            "of a rollout, each twice here."
        ),
        settings={
            "code": {"optimize.ema.decay": 0.995, "optimize.ema.every": 20, "rollout.latents_dtype": "float16"},
            "example": {
                **_BASE,
                **about(_SD35, "dataset/ocr", "1 ocr", 1.0),
                **size(512),
                **groups(48, 24, 10),
                **_FINAL,
                "optimize.algorithm.name": "crd",
                f"{_OPTIONS}.beta": 1.0,
                f"{_OPTIONS}.distance": "mse",
                f"{_OPTIONS}.adaptive": True,
                f"{_OPTIONS}.temperature": -1.0,
                f"{_LEVELS}.kind": "grid",
                f"{_LEVELS}.count": 20,
                f"{_DECAY}.start": 0.25,
                f"{_DECAY}.rate": 0.01,
                f"{_DECAY}.maximum": 0.999,
                f"{_OPTIONS}.rollout_decay": "0 up to epoch 38, then 0.015 an epoch up to 0.999",
                KL: 0.1,
                f"{_OPTIONS}.kl_guidance": 4.5,
                "advantage.aggregation": "sum",
                "advantage.std": "global",
                "optimize.updates_per_epoch": 2,
                "evaluate.every": 20,
                "evaluate.steps": 40,
            },
            "trainer": {
                f"{_OPTIONS}.scale": 5.0,
                f"{_OPTIONS}.detach_center": True,
                f"{_OPTIONS}.kl_weight": "the preference, 0.001 at least",
                f"{_LEVELS}.shared": False,
            },
            "advantages": _MAXIMUM,
            "model": _FACTORY_MODEL,
        },
    ),
    "sd35_dpo": Publication(
        title="Flow-Factory's Diffusion-DPO on Stable Diffusion 3.5 Medium",
        paper="2311.12908",
        files=_factory_files("dpo"),
        remark=(
            "The paper is of Stable Diffusion 1.5 and XL, and of preferences of people. The example takes over "
            "Flow-GRPO's config/dpo.py, and says where not: groups of 4, a rate of 1e-5, no guidance."
        ),
        settings={
            "code": {"rollout.latents_dtype": "float16"},
            "example": {
                **_BASE,
                **about(_SD35, "dataset/pickscore", "1 pickscore", 1.0),
                **size(512),
                **groups(48, 4, 40),
                **_FINAL,
                "optimize.algorithm.name": "dpo",
                f"{_OPTIONS}.beta": 100,
                f"{_LEVELS}.kind": "logit_normal",
                f"{_LEVELS}.count": 1,
                "advantage.aggregation": "gdpo",
                "advantage.std": "group",
                "optimize.learning_rate": 1e-5,
                "optimize.updates_per_epoch": 1,
                "optimize.ema.decay": 0.99,
                "optimize.ema.every": 4,
                "evaluate.every": 60,
                "evaluate.steps": 40,
            },
            "trainer": {KL: 0.0},
            "advantages": _MAXIMUM,
            "model": _FACTORY_MODEL,
        },
    ),
    "qwen_image_nft": Publication(
        title="DiffusionNFT on Qwen-Image",
        paper="2509.16117",
        files={
            "launch": f"{_OMNI}/examples/diffusionnft_trainer/qwen_image/run_qwen_image_ocr_lora.sh",
            "defaults": f"{_OMNI}/verl_omni/trainer/config/_generated_diffusion_trainer.yaml",
            "loss": f"{_OMNI}/verl_omni/trainer/diffusion/diffusion_algos.py",
            "schedules": f"{_OMNI}/verl_omni/trainer/diffusion/diffusion_trainer_utils.py",
        },
        remark="DiffusionNFT's own code has no Qwen-Image; this is verl-omni's, which publishes a validation curve.",
        settings={
            "defaults": {
                "optimize.betas": [0.9, 0.999],
                "optimize.max_grad_norm": 1.0,
                "optimize.inner_epochs": 1,
                "advantage.std": "global",
                "optimize.ema": None,
            },
            "launch": {
                **about("Qwen/Qwen-Image", "data/ocr/train.parquet", "1 ocr, read by Qwen3-VL-8B-Instruct", 1.0),
                **size(512),
                **groups(24, 16, 10),
                **lora(64, 128, QWEN_IMAGE),
                **_FINAL,
                "model.options.max_sequence_length": 256,
                "optimize.algorithm.name": "nft",
                f"{_OPTIONS}.beta": 0.1,
                f"{_OPTIONS}.scale": 5.0,
                KL: 1e-4,
                f"{_LEVELS}.kind": "grid",
                f"{_LEVELS}.count": 10,
                f"{_DECAY}.every": 2,
                "advantage.clip": 5.0,
                "optimize.learning_rate": 3e-4,
                "optimize.weight_decay": 1e-4,
                "optimize.updates_per_epoch": 2,
                "evaluate.every": 20,
                "evaluate.steps": 40,
                "run.epochs": 300,
            },
            "loss": {"advantage.epsilon": 1e-4, "advantage.floor": "add", "advantage.unbiased": True},
            "schedules": {f"{_DECAY}.flat": 75, f"{_DECAY}.rate": 0.0075, f"{_DECAY}.maximum": 0.999},
        },
    ),
}
