"""The settings of RePrompt, of which one model writes prompts and another draws them, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.publication import Publication

_REPROMPT = "https://github.com/microsoft/DKI_LLM/blob"
_QWEN = "https://github.com/QwenLM/Qwen-Image/blob/0381469a5e686b09623b4c5bba13c7191aef36f5/src/examples/demo.py"
_FILES = {
    "script": f"{_REPROMPT}/ba38e6525a721c2cb778aad8b18224a3859e93bb/RePrompt/train_reprompt.py",
    "readme": f"{_REPROMPT}/34b3e6d909e52a87c2ad7eddb1966bc16a2b2dd5/RePrompt/README.md",
}
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
