"""The settings of RePrompt and EditThinker, of which one model writes prompts and another draws or edits, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.publication import Publication

_REPROMPT = "https://github.com/microsoft/DKI_LLM/blob"
_QWEN = "https://github.com/QwenLM/Qwen-Image/blob/0381469a5e686b09623b4c5bba13c7191aef36f5/src/examples/demo.py"
_FILES = {
    "script": f"{_REPROMPT}/ba38e6525a721c2cb778aad8b18224a3859e93bb/RePrompt/train_reprompt.py",
    "readme": f"{_REPROMPT}/34b3e6d909e52a87c2ad7eddb1966bc16a2b2dd5/RePrompt/README.md",
}
_THINKER = "https://github.com/appletea233/EditThinker/blob/803d1a7980de11db8f39c84cd27f954bd9745d5a"
_SCRIPT = {
    "model.dtype": "bfloat16",
    "optimize.algorithm.name": "grpo",
    "optimize.learning_rate": 2e-6,
    "rollout.group_size": 4,
    "render.images": 1,
    "render.steps": 50,
    "render.answer": ["<answer>", "</answer>"],
    "rewards": "0.25 imagereward + 0.5 gpt-4-vision-preview + 1 format + 1 length",
}
_README = {
    "model.path": "output/Qwen2.5-3B-sft",
    "prompts.train": "generation_prompts_1k_filterd.txt",
}
_ALIKE = (
    "Settings that the script leaves to TRL's trainer (length of a text 256, KL 0.04) have TRL's values of the time; "
    "how many prompts an update has depends on its version, and is 32 here. The instruction is worded differently. A "
    "text without "
    "marks is drawn as 'a photo' there, as an empty prompt here."
)

PUBLISHED: Mapping[str, Publication] = {
    "flux1_enhancer": Publication(
        title="RePrompt with FLUX.1 dev",
        paper="2505.17540",
        files=_FILES,
        remark=_ALIKE,
        settings={
            "script": {
                **_SCRIPT,
                "render.model.dtype": "bfloat16",
                "render.model.height": 512,
                "render.model.width": 512,
                "render.model.guidance_scale": 3.5,
                "render.model.options.max_sequence_length": 512,
            },
            "readme": {**_README, "render.model.path": "black-forest-labs/FLUX.1-dev"},
        },
    ),
    "flux1_kontext_enhancer": Publication(
        title="EditThinker with FLUX.1 Kontext",
        paper="2512.05965",
        files={
            "config": f"{_THINKER}/train/EasyR1/examples/edit_thinker_config.yaml",
            "script": f"{_THINKER}/train/EasyR1/local_scripts/run_edit_thinker_rl.sh",
            "reward": f"{_THINKER}/train/EasyR1/verl/reward_function/edit_thinker_reward.py",
            "api": f"{_THINKER}/inference/server/apis/flux_edit_api.py",
        },
        remark=(
            "There the model sees the source image and an earlier edit, scores the edit, and rewrites its instruction; "
            "here it writes the first one. The configuration file turns the KL off (disable_kl). The instruction is "
            "worded differently."
        ),
        settings={
            "config": {
                "model.options.train_vision": True,
                "rollout.group_size": 8,
                "rollout.tokens.max_prompt": 16384,
                "rollout.tokens.max_new": 4096,
                "rollout.tokens.temperature": 1.0,
                "optimize.algorithm.name": "grpo",
                "optimize.algorithm.options.kl_coef": 0.0,
                "optimize.weight_decay": 0.01,
            },
            "script": {
                "model.path": "an SFT checkpoint of Qwen3-VL-8B",
                "model.dtype": "bfloat16",
                "prompts.train": "rl_train.jsonl",
                "rollout.prompts_per_epoch": 16,
                "optimize.learning_rate": 2e-6,
                "optimize.updates_per_epoch": 2,
            },
            "reward": {
                "rewards": "0.5 format + 0.5 gpt-4.1",
                "render.model.guidance_scale": 2.5,
                "render.model.height": 1024,
                "render.model.width": 1024,
                "render.steps": 28,
                "render.answer": ["<answer>", "</answer>"],
            },
            "api": {"render.model.dtype": "bfloat16"},
        },
    ),
    "qwen_image_enhancer": Publication(
        title="RePrompt with Qwen-Image",
        paper="2505.17540",
        files={**_FILES, "demo": _QWEN},
        remark=f"RePrompt draws with other models; how Qwen-Image draws is its own demo's. {_ALIKE}",
        settings={
            "script": _SCRIPT,
            "readme": _README,
            "demo": {
                "render.model.path": "Qwen/Qwen-Image",
                "render.model.dtype": "bfloat16",
                "render.model.width": 1664,
                "render.model.height": 928,
                "render.model.guidance_scale": 5.0,
                "render.steps": 50,
            },
        },
    ),
}
