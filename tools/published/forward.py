"""The settings of the algorithms that train on final samples, noised anew, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.common import JOINT, KL, about, groups, lora, size
from tools.published.publication import Publication

_SD35 = "stabilityai/stable-diffusion-3.5-medium"
_RAM = "https://github.com/Duanyll/flow-control/blob/95eca367e8518d62e9db16ae1e47154685ad1973"
_V_GRPO = "https://github.com/guoriyue/VisualRL/blob/708d402ad235366e003ed546216f3eb3020c53f0"
_SDPO = "https://github.com/AIDC-AI/Diffusion-SDPO/blob/84fb241c1b89705a247da8b0d6047798ca49830d"
_FLOWBP = "https://github.com/RuoyuWang-2077/FlowBP/blob/93b220ad48782357efd55bfdf5e0a987f9b035f2"
_OPTIONS = "optimize.algorithm.options"
_LEVELS = f"{_OPTIONS}.times"

PUBLISHED: Mapping[str, Publication] = {
    "sd35_ram": Publication(
        title="RAM on Stable Diffusion 3.5 Medium",
        paper="2605.10759",
        files={
            "example": f"{_RAM}/examples/ram/ocr_sd35/train.ram.jsonc",
            "trainer": f"{_RAM}/flow_control/training/ram.py",
            "statistics": f"{_RAM}/flow_control/training/advantage.py",
            "model": f"{_RAM}/flow_control/adapters/sd3/base.py",
            "encoders": f"{_RAM}/flow_control/processors/presets.py",
        },
        remark=(
            "Neither the official code nor the paper's appendix could be had. The example is a third party's and cites "
            "the official configs/ocr_sd3.yaml for steps, guidance, samples per prompt, levels, multiplier and the "
            "lack of clips; that its other values are the official ones is not known."
        ),
        settings={
            "example": {
                "model.guidance_scale": 2.0,
                "prompts.train": "data/ocr_sd35",
                "rewards": "1 ocr",
                **size(512),
                **groups(48, 24, 20),
                **lora(32, 64, JOINT),
                "rollout.plan.name": "final",
                "optimize.updates_per_epoch": 1,
                "optimize.inner_epochs": 1,
                f"{_OPTIONS}.multiplier": 100,
                f"{_LEVELS}.kind": "power",
                f"{_LEVELS}.power": 1,
                f"{_LEVELS}.count": 8,
                f"{_OPTIONS}.decay.rate": 0.01,
                f"{_OPTIONS}.decay.maximum": 0.9,
                "optimize.ema.decay": 0.9,
                "optimize.ema.every": 1,
                "optimize.learning_rate": 3e-4,
                "optimize.weight_decay": 1e-4,
                "optimize.betas": [0.9, 0.99],
                "optimize.max_grad_norm": "off",
                "advantage.clip": "off",
                "advantage.std": "global",
                "evaluate.every": 10,
                "evaluate.steps": 40,
                "evaluate.guidance_scale": 4.5,
                "run.epochs": 500,
            },
            "trainer": {
                "optimize.algorithm.name": "ram",
                f"{_OPTIONS}.guided": False,
                KL: 0.0,
                f"{_LEVELS}.low": 0,
                f"{_LEVELS}.high": 1,
            },
            "statistics": {"advantage.epsilon": 1e-4, "advantage.floor": "add", "advantage.unbiased": False},
            "model": {"model.path": _SD35, "model.dtype": "bfloat16"},
            "encoders": {"model.options.max_sequence_length": 256},
        },
    ),
    "sd35_v_grpo": Publication(
        title="V-GRPO on Stable Diffusion 3.5 Medium, its first stage",
        paper="2604.23380",
        files={
            "copy": f"{_V_GRPO}/docs/sprints/SPRINT_v_grpo_sd35_pickscore.md",
            "trainer": "https://github.com/guoriyue/VRL/blob/26932b6e0910e19f404fc01dd652e50800768b41/vrl/algorithms/v_grpo.py",
        },
        remark=(
            "The paper's table stands here as section 3 of another project's plan copies it; neither it nor the "
            "official code could be had. Settings that it leaves out (normalization, weights of the rewards, "
            "moving average, "
            "optimizer, evaluation) is as in sd35_medium. Four further stages, of GenEval and OCR, follow there."
        ),
        settings={
            "copy": {
                "model.path": _SD35,
                "model.guidance_scale": 1.0,
                "prompts.train": "Pick-a-Pic",
                "rewards": "hpsv2 + pickscore + clip_score",
                **size(720),
                **groups(48, 24, 40),
                "model.lora.rank": 32,
                "model.lora.alpha": 64,
                "rollout.solver": "dpm2",
                "rollout.plan.name": "final",
                f"{_LEVELS}.kind": "stratified",
                f"{_LEVELS}.count": 4,
                f"{_LEVELS}.shared": True,
                "advantage.soft_clip": 3,
                KL: 0.0,
                "optimize.updates_per_epoch": 1,
                "optimize.learning_rate": 3e-4,
                "run.epochs": 150,
            },
            "trainer": {"optimize.algorithm.name": "v_grpo", f"{_OPTIONS}.weighting": "adaptive"},
        },
    ),
    "sd15_sdpo": Publication(
        title="Diffusion-SDPO on Stable Diffusion 1.5",
        paper="2511.03317",
        files={
            "launch": f"{_SDPO}/scripts/train/sd15_diffusion_dpo.sh",
            "script": f"{_SDPO}/train.py",
            "evaluation": f"{_SDPO}/scripts/eval/test_sd15.sh",
        },
        remark=(
            "The rate of the launch script is multiplied by the pairs of an update; 2048 are those of the paper, as a "
            "comment there says, on 8 GPUs. An epoch here is one of its 2000 updates. Guidance and steps are those of "
            "its evaluation, as nothing is sampled while it trains. The share of a worse sample's gradient is one per "
            "batch there and one per pair here. SDXL is trained with Adafactor there, which is not had here."
        ),
        settings={
            "launch": {
                "model.path": "stable-diffusion-v1-5/stable-diffusion-v1-5",
                "model.dtype": "bfloat16",
                "prompts.train": "pickapic_v2",
                "rewards": "preferences of people",
                "rollout.prompts_per_epoch": 2048,
                "rollout.group_size": 2,
                "optimize.algorithm.name": "dpo",
                f"{_OPTIONS}.beta": 5000,
                f"{_OPTIONS}.winner_margin": 0.9,
                "optimize.learning_rate": 2.048e-5,
                "optimize.schedule.name": "constant",
                "optimize.schedule.warmup_updates": 500,
                "optimize.updates_per_epoch": 1,
                "run.epochs": 2000,
            },
            "script": {
                **size(512),
                "model.lora": None,
                "prompts.empty": 0.2,
                f"{_OPTIONS}.prediction": "epsilon",
                f"{_OPTIONS}.guided": False,
                f"{_LEVELS}.kind": "timesteps",
                f"{_LEVELS}.count": 1,
                KL: 0.0,
                "optimize.betas": [0.9, 0.999],
                "optimize.weight_decay": 0.01,
                "optimize.epsilon": 1e-8,
                "optimize.max_grad_norm": 1.0,
                "optimize.ema": None,
            },
            "evaluation": {"model.guidance_scale": 7.5, "rollout.steps": 50},
        },
    ),
    "sd35_reward_gradient": Publication(
        title="FlowBP-Sparse on Stable Diffusion 3.5 Medium",
        paper="2606.11075",
        files={
            "config": f"{_FLOWBP}/configs/final/sd35/sd3_5_flowbp_sparse.yaml",
            "trainer": f"{_FLOWBP}/flowbp/trainers/sd35/leapalign.py",
            "embeddings": f"{_FLOWBP}/scripts/preprocess/preprocess_sd35_embeddings.sh",
        },
        remark=(
            "The gradient of the reward with respect to the final latents is theirs, and a row's loss linear in the "
            "velocity as theirs is; theirs is at four of the 25 states of the rollout, ours at new ones that lead to "
            "the same image. Its loss is divided by the scale of guidance. Trained weights are bfloat16 there, float32 "
            "here. 300 updates are 300 epochs of one."
        ),
        settings={
            "config": {
                **about(_SD35, "prompts.txt", "hpsv2, below 0.55", 3.5),
                **size(512),
                **groups(64, 1, 25),
                "monitors": None,
                "evaluate.judges": "clipscore + hpsv2 + hpsv3 + pickscore + imagereward",
                "rollout.plan.name": "final",
                f"{_OPTIONS}.target": "linear",
                f"{_OPTIONS}.strength": 1.0,
                f"{_OPTIONS}.grad_rescale": 0.5,
                f"{_LEVELS}.count": 4,
                f"{_LEVELS}.kind": "steps of the rollout, late ones likelier",
                KL: 0.0,
                "optimize.learning_rate": 1e-5,
                "optimize.weight_decay": 1e-4,
                "optimize.max_grad_norm": 1.0,
                "optimize.ema.decay": 0.995,
                "optimize.updates_per_epoch": 1,
                "evaluate.every": 50,
                "evaluate.steps": 40,
                "run.epochs": 300,
            },
            "trainer": {
                "model.lora": None,
                "optimize.guidance_gradient": "conditional",
                "optimize.betas": [0.9, 0.999],
                "optimize.ema.every": 1,
                "rollout.same_noise": False,
            },
            "embeddings": {"model.options.max_sequence_length": 512},
        },
    ),
}
