"""The settings of language models, by preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.published.publication import Publication

_QUICK = (
    "https://github.com/zysNLP/quickllm/blob/f7996e9559846ca8c17b5838d79936dea2d14a97"
    "/learnings/llm_related-main/ppo_from_scratch"
)
_EASY = "https://github.com/hiyouga/EasyR1/blob"
_VERL = "https://github.com/volcengine/verl/blob"
_GRPO = "optimize.algorithm.options"
_ESTIMATOR = "advantage.estimator"


def _verl(*, path: str, new: int, learning_rate: float) -> dict[str, Any]:
    """Return what both scripts of verl state, and where they differ."""
    return {
        "model.path": path,
        "prompts.train": "gsm8k/train.parquet",
        "rewards": "1 gsm8k",
        "rollout.prompts_per_epoch": 1024,
        "rollout.group_size": 5,
        "rollout.tokens.max_prompt": 512,
        "rollout.tokens.max_new": new,
        "optimize.algorithm.name": "grpo",
        f"{_GRPO}.kl_coef": 0.001,
        "optimize.learning_rate": learning_rate,
        "optimize.updates_per_epoch": 4,
    }


_GCPO = "https://github.com/zghhui/GCPO/blob/3c1167ec78fbbbad63f9077dbb32611d8412b0a9/janus/src"

PUBLISHED: Mapping[str, Publication] = {
    "janus_pro_1b_grpo": Publication(
        title="GRPO on Janus-Pro-1B with the settings of GCPO's run for HPS",
        paper="2509.22485",
        files={
            "trainer": f"{_GCPO}/gcpo/src/open_r1/trainer/gcpo_trainer.py",
            "script": f"{_GCPO}/scripts/run_gcpo_hps.sh",
        },
        remark="Two prompts on each of four GPUs are an update. Its log-probs are those of the conditional branch.",
        settings={
            "trainer": {
                f"{_GRPO}.log_probs": "conditional",
                f"{_GRPO}.kl": "k3",
                f"{_GRPO}.normalization": "token_mean",
            },
            "script": {
                "model.path": "deepseek-ai/Janus-Pro-1B",
                "model.dtype": "bfloat16",
                "model.guidance_scale": 5.0,
                "prompts.train": "hps_train_metadata.json",
                "rewards": "1 hpsv2",
                "rollout.prompts_per_epoch": 8,
                "rollout.group_size": 4,
                "rollout.tokens.max_prompt": 512,
                "rollout.tokens.max_new": 576,
                "rollout.tokens.temperature": 1.0,
                "optimize.algorithm.name": "gcpo",
                f"{_GRPO}.kl_coef": 0.01,
                "optimize.learning_rate": 1e-6,
                "optimize.updates_per_epoch": 1,
                "run.epochs": 1600,
            },
        },
    ),
    "qwen_05b_ppo": Publication(
        title="PPO from scratch on Qwen2.5-0.5B",
        paper=None,
        files={"guide": f"{_QUICK}/README.md", "script": f"{_QUICK}/ppo_train.py"},
        remark=(
            "Its critic is made of the actor's own backbone, which two optimizers then move; here it is a copy. The "
            "reward of a text that ends is masked out there, as it lies on the end token, which is no action."
        ),
        settings={
            "script": {
                "model.dtype": "float32",
                "model.lora": None,
                "rollout.tokens.temperature": 0.7,
                "rollout.tokens.top_p": 0.8,
                "rollout.tokens.top_k": 20,
                "rollout.tokens.end": "no action",
                "rewards.reads": "prompt and text as one",
                f"{_ESTIMATOR}.options.whiten": False,
                "critic.loss": "squared error",
                "critic.alone_epochs": 0,
                "optimize.schedule": None,
                "optimize.betas": [0.9, 0.999],
                "optimize.weight_decay": 0.0,
                "optimize.max_grad_norm": None,
                "optimize.updates_per_epoch": 8,
                "run.epochs": 3,
            },
            "guide": {
                "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
                "prompts.train": "prompt_list",
                "rewards": "1 sequence_classification",
                "rewards.clip": 0.2,
                "rollout.prompts_per_epoch": 8,
                "rollout.group_size": 2,
                "rollout.tokens.max_prompt": 256,
                "rollout.tokens.max_new": 50,
                "rollout.tokens.on_overlong": "cut_right",
                f"{_ESTIMATOR}.name": "gae",
                f"{_ESTIMATOR}.options.kl_coef": 0.1,
                f"{_ESTIMATOR}.options.kl": "k1",
                f"{_ESTIMATOR}.options.discount": 0.1,
                f"{_ESTIMATOR}.options.decay": 0.2,
                "optimize.algorithm.name": "ppo",
                f"{_GRPO}.clip_low": 0.2,
                f"{_GRPO}.clip_high": 0.2,
                f"{_GRPO}.value_clip": None,
                f"{_GRPO}.normalization": "sequence_mean",
                "optimize.learning_rate": 5e-5,
                "critic.learning_rate": 5e-5,
                "optimize.inner_epochs": 5,
            },
        },
    ),
    "qwen_05b_grpo": Publication(
        title="GRPO on Qwen2.5 with the settings of verl's GSM8K example",
        paper="2402.03300",
        files={
            "script": f"{_VERL}/0061a224aaae04981b1d4b79ee0abeaa4f132cc5"
            "/examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh"
        },
        remark="256 of 1024 prompts an update. The script names no rank, without which verl trains all weights.",
        settings={
            "script": {
                **_verl(path="Qwen/Qwen2.5-3B-Instruct", new=1024, learning_rate=3e-6),
                f"{_GRPO}.kl": "k3",
                "evaluate.every": 5,
            }
        },
    ),
    "qwen_7b_grpo": Publication(
        title="GRPO on Qwen2.5-7B with the settings of verl's example",
        paper="2402.03300",
        files={
            "script": f"{_VERL}/03aefba409c618c7e8a032dfbbde37fb8dc740c7/examples/grpo_trainer/run_qwen2-7b.sh",
        },
        remark="256 of 1024 prompts an update. Its name of the KL's weight is that of an older verl.",
        settings={"script": _verl(path="Qwen/Qwen2-7B-Instruct", new=512, learning_rate=1e-6)},
    ),
    "qwen25_vl_3b_grpo": Publication(
        title="GRPO on Qwen2.5-VL-3B with the settings of EasyR1's geometry example",
        paper="2402.03300",
        files={
            "config": f"{_EASY}/0243608d3a1617c6ab33aaf8828c9025356da7b8/examples/config.yaml",
            "script": f"{_EASY}/4f003f7c7feb95338f005a874007c30b3bff4ee3/examples/qwen2_5_vl_3b_geo3k_grpo.sh",
        },
        remark="The script overrules the model and the prompts of the configuration file.",
        settings={
            "config": {
                "rewards": "1 math",
                "model.options.train_vision": True,
                "rollout.prompts_per_epoch": 512,
                "rollout.group_size": 5,
                "rollout.tokens.max_prompt": 2048,
                "rollout.tokens.max_new": 2048,
                "rollout.tokens.temperature": 1.0,
                "rollout.tokens.top_p": 0.99,
                "optimize.algorithm.name": "grpo",
                f"{_GRPO}.kl_coef": 0.01,
                f"{_GRPO}.kl": "k3",
                "optimize.learning_rate": 1e-6,
                "optimize.weight_decay": 0.01,
                "optimize.updates_per_epoch": 4,
                "evaluate.every": 5,
            },
            "script": {"model.path": "Qwen/Qwen2.5-VL-3B-Instruct", "prompts.train": "hiyouga/geometry3k"},
        },
    ),
}
