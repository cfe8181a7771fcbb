"""The settings of supervised fine-tuning and of preferences on given samples, by preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.published.common import SINGLE, lora, size
from tools.published.publication import Publication

_DPO = "https://github.com/SalesforceAIResearch/DiffusionDPO/blob/5233e75919f912f3f631958ee4ebb5b5204382d9"
_DIFFUSERS = "https://github.com/huggingface/diffusers/blob"
_TRL = "https://github.com/huggingface/trl/blob/v1.16.0/trl"
_OPTIONS = "optimize.algorithm.options"
#: Latents are drawn from the autoencoder's distribution.
_DRAWN = {"data.latents": "drawn"}
#: Uniform levels, and the error of velocities.
_UNIFORM = {
    f"{_OPTIONS}.prediction": "velocity",
    f"{_OPTIONS}.times.kind": "stratified",
    f"{_OPTIONS}.times.low": 0.001,
    f"{_OPTIONS}.times.high": 1.0,
}
#: AdamW of these scripts.
_ADAM = {"optimize.betas": [0.9, 0.999], "optimize.epsilon": 1e-8, "optimize.max_grad_norm": 1.0}
_TIMESTEPS = {
    f"{_OPTIONS}.prediction": "epsilon",
    f"{_OPTIONS}.guided": False,
    f"{_OPTIONS}.times.kind": "timesteps",
    f"{_OPTIONS}.times.count": 1,
}


def _diffusion_dpo(model: str, launch: str, path: str, pixels: int, warmup: int, optimizer: str) -> Publication:
    return Publication(
        title=f"Diffusion-DPO on {model}",
        paper="2311.12908",
        files={"launch": f"{_DPO}/launchers/{launch}.sh", "script": f"{_DPO}/train.py"},
        remark=(
            "16 GPUs, a pair on each, an update after 128 of those: 2,048 pairs. The rate is 1e-8 for each of them. "
            "Rows of Pick-a-Pic have two images and which of them was preferred; ties are left out."
        ),
        settings={
            "launch": {
                "model.path": path,
                "data.train": "yuvalkirstain/pickapic_v2",
                "data.groups_per_epoch": 2048,
                "optimize.updates_per_epoch": 1,
                "optimize.learning_rate": 2.048e-5,
                "optimize.schedule.name": "constant",
                "optimize.schedule.warmup_updates": warmup,
                f"{_OPTIONS}.beta": 5000.0,
                "run.epochs": 2000,
            },
            "script": {
                **_ADAM,
                **_TIMESTEPS,
                **_DRAWN,
                **size(pixels),
                "model.dtype": "float16",
                "model.lora": None,
                "model.gradient_checkpointing": optimizer == "adafactor",
                "optimize.algorithm.name": "dpo",
                "optimize.optimizer": optimizer,
                "optimize.weight_decay": 0.01,
                "data.flip": True,
                "data.empty_captions": 0.2,
            },
        },
    )


def _dreambooth(title: str, paper: str, commit: str, readme: str, command: Mapping[str, Any]) -> Publication:
    return Publication(
        title=title,
        paper=paper,
        files={"readme": f"{_DIFFUSERS}/{commit}/examples/dreambooth/{readme}.md"},
        remark=(
            "An image at a time, an update after four. Adapters, levels, loss and crops are the script's defaults. Its "
            "levels are 1,000 values of the density here."
        ),
        settings={
            "readme": {
                **lora(4, 4, SINGLE),
                **_DRAWN,
                "data.crop": "random",
                "data.train": "diffusers/dog-example",
                "optimize.algorithm.name": "sft",
                "optimize.schedule": None,
                "optimize.updates_per_epoch": 500,
                "run.epochs": 1,
                f"{_OPTIONS}.guided": False,
                f"{_OPTIONS}.times.count": 1,
                **_ADAM,
                "optimize.weight_decay": 1e-4,
                "execution.micro_batch_size": 4,
                **command,
            }
        },
    )


def _trl(title: str, paper: str, name: str, settings: Mapping[str, Any]) -> Publication:
    return Publication(
        title=title,
        paper=paper,
        files={"script": f"{_TRL}/scripts/{name}.py"},
        remark="Two rows at a time, an update after eight of those: 16 rows.",
        settings={
            "script": {
                **_ADAM,
                "model.lora": None,
                "optimize.weight_decay": 0.0,
                "optimize.schedule.name": "linear",
                "optimize.schedule.final": 0.0,
                "run.epochs": 1,
                **settings,
            }
        },
    )


#: Common settings of diffusers' examples of fine-tuning from texts to images.
_FINE_TUNED: Mapping[str, Any] = {
    **_ADAM,
    **_TIMESTEPS,
    **_DRAWN,
    **size(512),
    "model.dtype": "float16",
    "model.lora": None,
    "model.gradient_checkpointing": True,
    "data.train": "lambdalabs/pokemon-blip-captions",
    "data.flip": True,
    "data.groups_per_epoch": 400,
    "optimize.algorithm.name": "sft",
    "optimize.schedule": None,
    "optimize.weight_decay": 0.01,
    "optimize.updates_per_epoch": 100,
}
PUBLISHED: Mapping[str, Publication] = {
    "sd15_sft": Publication(
        title="Fine-tuning of Stable Diffusion 1.x with diffusers",
        paper="2112.10752",
        files={
            "readme": f"{_DIFFUSERS}/0356e18b09909d625e4cff5ac8e008719d9cb77c/examples/text_to_image/README.md",
        },
        remark="An image at a time, an update after four, 15,000 updates. Others are the defaults of its script.",
        settings={
            "readme": {
                **_FINE_TUNED,
                "model.path": "CompVis/stable-diffusion-v1-4",
                "optimize.learning_rate": 1e-5,
                "optimize.ema.decay": 0.9999,
                "run.epochs": 150,
            }
        },
    ),
    "sdxl_sft": Publication(
        title="Fine-tuning of Stable Diffusion XL with diffusers",
        paper="2307.01952",
        files={
            "readme": f"{_DIFFUSERS}/09f80e10693bb624dc886938fa37f9e5e7e58b25/examples/text_to_image/README_sdxl.md",
        },
        remark="An image at a time, an update after four, 10,000 updates. Others are the defaults of its script.",
        settings={
            "readme": {
                **_FINE_TUNED,
                "model.path": "stabilityai/stable-diffusion-xl-base-1.0",
                "data.empty_captions": 0.2,
                "optimize.optimizer": "adamw8bit",
                "optimize.learning_rate": 1e-6,
                "optimize.ema": None,
                "run.epochs": 100,
            }
        },
    ),
    "sd15_given_dpo": _diffusion_dpo(
        "Stable Diffusion 1.5", "sd15", "runwayml/stable-diffusion-v1-5", 512, 500, "adamw"
    ),
    "sdxl_given_dpo": _diffusion_dpo(
        "Stable Diffusion XL", "sdxl", "stabilityai/stable-diffusion-xl-base-1.0", 1024, 200, "adafactor"
    ),
    "sd35_sft": _dreambooth(
        "Fine-tuning of adapters of Stable Diffusion 3 with diffusers",
        "2403.03206",
        "02a016943750c477c5635b057abdfcb0f47bbbb7",
        "README_sd3",
        {
            **size(512),
            "model.path": "stabilityai/stable-diffusion-3-medium-diffusers",
            "model.dtype": "float16",
            "model.options.max_sequence_length": 77,
            f"{_OPTIONS}.prediction": "sample",
            f"{_OPTIONS}.times.kind": "logit_normal",
            f"{_OPTIONS}.times.shift": 3.0,
            "optimize.learning_rate": 4e-4,
        },
    ),
    "flux1_sft": _dreambooth(
        "Fine-tuning of adapters of FLUX.1 dev with diffusers",
        "2208.12242",
        "12ea4470d8cc168cfb3bf0c29a849d1ff768169b",
        "README_flux",
        {
            **size(512),
            **_UNIFORM,
            "model.path": "black-forest-labs/FLUX.1-dev",
            "model.dtype": "bfloat16",
            "model.guidance_scale": 1.0,
            "model.options.max_sequence_length": 512,
            "optimize.optimizer": "prodigy",
            "optimize.learning_rate": 1.0,
        },
    ),
    "qwen_image_sft": _dreambooth(
        "Fine-tuning of adapters of Qwen-Image with diffusers",
        "2508.02324",
        "5cbf07e9042f22804f0e70da319b3c2122266f45",
        "README_qwen",
        {
            **size(1024),
            **_UNIFORM,
            "model.path": "Qwen/Qwen-Image",
            "model.options.max_sequence_length": 512,
            "model.dtype": "bfloat16",
            "optimize.optimizer": "adamw8bit",
            "optimize.learning_rate": 2e-4,
        },
    ),
    "qwen_05b_sft": _trl(
        "Fine-tuning of Qwen2-0.5B with TRL",
        "2203.02155",
        "sft",
        {
            "model.path": "Qwen/Qwen2-0.5B",
            "data.train": "trl-lib/Capybara",
            "data.packing": True,
            "optimize.algorithm.name": "sft",
            "optimize.learning_rate": 2e-5,
            "optimize.schedule.total_updates": "the epoch",
        },
    ),
    "qwen_05b_given_dpo": _trl(
        "DPO on Qwen2-0.5B-Instruct with TRL",
        "2305.18290",
        "dpo",
        {
            "model.path": "Qwen/Qwen2-0.5B-Instruct",
            "data.train": "trl-lib/ultrafeedback_binarized",
            "optimize.algorithm.name": "dpo",
            f"{_OPTIONS}.beta": 0.1,
            "optimize.learning_rate": 5e-7,
            "optimize.schedule.total_updates": 1000,
        },
    ),
}
