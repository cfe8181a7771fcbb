"""The model family of a local folder, by the class that its index names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowmill.configs.errors import ConfigError

#: Families by the pipeline class of a folder; several where the folder does not decide.
PIPELINES = {
    "StableDiffusionPipeline": ("sd15",),
    "StableDiffusionXLPipeline": ("sdxl",),
    "StableDiffusion3Pipeline": ("sd3",),
    "FluxPipeline": ("flux1",),
    "FluxKontextPipeline": ("flux1_kontext",),
    "Flux2Pipeline": ("flux2",),
    "Flux2KleinPipeline": ("flux2_klein",),
    "Flux3ModularPipeline": ("flux3",),
    "QwenImagePipeline": ("qwen_image",),
    "QwenImageEditPipeline": ("qwen_image_edit",),
    "QwenImageEditPlusPipeline": ("qwen_image_edit_plus",),
    "QwenImage21Pipeline": ("qwen_image21",),
    "WanPipeline": ("wan21", "wan22", "wan22_ti2v"),
    "WanImageToVideoPipeline": ("wan21_i2v", "wan22_i2v", "wan22_ti2v_i2v"),
    "WanVideoToVideoPipeline": ("wan21_v2v",),
    "ZImagePipeline": ("z_image",),
    "SanaPipeline": ("sana",),
    "SanaVideoPipeline": ("sana_video",),
    "HunyuanVideo15Pipeline": ("hunyuan_video15",),
    "HunyuanVideo15ImageToVideoPipeline": ("hunyuan_video15_i2v",),
    "CogVideoXPipeline": ("cogvideox",),
    "LTX2Pipeline": ("ltx2",),
    "LTX2ImageToVideoPipeline": ("ltx2_i2v",),
}
#: Families by the end of the class of a transformers folder, the first that fits.
_ARCHITECTURES = {
    "JanusForConditionalGeneration": "janus",
    "ForConditionalGeneration": "vision_lm",
    "ForCausalLM": "causal_lm",
}


def family_of(path: str) -> str:
    """Return the model family of a local folder.

    Raises:
        ConfigError: the folder names no known class, or one of several families.
    """
    folder = Path(path).expanduser()
    named = _class_of(folder)
    families = PIPELINES.get(named) or tuple(f for end, f in _ARCHITECTURES.items() if named.endswith(end))[:1]
    if len(families) != 1:
        content = f"a {named}" if named else "no index of diffusers and no config.json of transformers"
        choice = f"one of {', '.join(families)}" if families else "its model family"
        raise ConfigError(f"model.path '{path}' holds {content}: set model.policy to {choice}.")
    return families[0]


def _class_of(folder: Path) -> str:
    """Return the class that the index of a pipeline, or else the config of a transformers model, names; '' if none."""
    for name, key in (("model_index.json", "_class_name"), ("modular_model_index.json", "_class_name")):
        if (folder / name).is_file():
            return str(_read(folder / name).get(key, ""))
    classes = _read(folder / "config.json").get("architectures") if (folder / "config.json").is_file() else None
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{file}' cannot be read: {error}. Copy or download the folder again.") from None
    return data if isinstance(data, dict) else {}
