"""Model families: the facts about each that configs, checks and identities need without importing it, and the family
of a local folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from flowmill.configs.errors import ConfigError
from flowmill.configs.user_directories import user_path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLengths:
    """Clips of u n + 1 frames."""

    every: int
    """u, the difference between successive lengths."""

    def __contains__(self, frames: int) -> bool:
        return frames >= 1 and frames % self.every == 1

    def __str__(self) -> str:
        return f"{self.every} n + 1 frames"

    def nearest(self, frames: int) -> str:
        """Return the supported lengths nearest to an unsupported one, as a sentence without its period."""
        below = frames - (frames - 1) % self.every
        return f"The nearest are {below} and {below + self.every}"


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """Facts about a model family. Custom families, which are no entry of ``FAMILIES``, have the defaults."""

    adapter: str
    """Module and class of the policy in ``flowmill.models.policies``; of a custom family its import string."""
    pipeline: str | None = None
    """Class of its pipeline in diffusers."""
    _: KW_ONLY
    kind: Literal["diffusion", "tokens", "image_tokens"] = "diffusion"
    guidance: Literal["pair", "input", "blank"] = "pair"
    """Guidance compares with a negative prompt, is an input of the model (one forward, no negative prompt), or compares
    with a prompt without its tokens."""
    starts_from: Literal["text", "image", "clip"] = "text"
    """Input of prompts besides their text (``prompts.image``)."""
    last_frame: bool = False
    """The second of two images is the last frame of the clip."""
    references: int | None = None
    """Default of the option ``references``, the maximum number of images per prompt; None without the option."""
    images: int | None = None
    """Default of the option ``images`` of vision-language models, the maximum number of images per prompt."""
    clips: ClipLengths | None = None
    """Supported numbers of frames of families that make clips."""
    frame_rate: float | None = None
    """Frames per second of families with sound; the default of the option ``frame_rate`` if they have it."""
    instructed: bool = False
    """An option prepends an instruction to prompts but not to negative prompts."""
    decodes_latents: bool = True
    """Denoised latents suffice for decoding; if not, reward gradients cannot reach them."""
    any_size: bool = False
    """Its denoiser takes latents of any height and width."""
    not_encoded: frozenset[str] = frozenset()
    """``model.options`` that embeddings do not depend on; they depend on all others."""
    text_limit: int | None = None
    """The most text tokens that its pipeline takes, as that of an export; None: any number."""
    steps: int | None = None
    """Default of the option ``steps``, the number of steps; None without the option."""
    steps_divide: int | None = None
    """Number of timesteps that the number of steps must divide."""
    noise_range: tuple[float, float] | None = None
    """First and last noise level of the published model if not 1 and 0; other models may differ."""
    known_levels: tuple[float, float] | None = None
    """First and last level of a published model that was trained on timesteps, not on all levels from 1 to 0."""

    @property
    def denoises(self) -> bool:
        """Whether the model is a denoiser."""
        return self.kind == "diffusion"


#: Facts of several families.
_OF_4, _OF_8 = ClipLengths(every=4), ClipLengths(every=8)
_WAN: dict[str, Any] = {"clips": _OF_4, "not_encoded": frozenset({"guidance_scale_2", "flow_shift"})}
_SD: dict[str, Any] = {
    "any_size": True,
    "not_encoded": frozenset({"steps", "guidance_rescale"}),
    "steps": 50,
    "noise_range": (0.93, 0.0283),
    "known_levels": (0.93, 0.0283),
}
_SANA: dict[str, Any] = {"instructed": True, "not_encoded": frozenset({"flow_shift"})}
_LTX2_OPTIONS = frozenset({"frame_rate", "audio_guidance_scale", "guidance_rescale"})
FAMILIES: Mapping[str, FamilySpec] = {
    "sd15": FamilySpec("sd15:SD15", "StableDiffusionPipeline", **_SD),
    "sdxl": FamilySpec("sdxl:SDXL", "StableDiffusionXLPipeline", **_SD),
    "sd3": FamilySpec(
        "sd3:SD3", "StableDiffusion3Pipeline", any_size=True, not_encoded=frozenset({"schedule"}), text_limit=512
    ),
    "flux1": FamilySpec("flux1:Flux1", "FluxPipeline", guidance="input", text_limit=512),
    "flux1_kontext": FamilySpec(
        "flux1:Flux1Kontext", "FluxKontextPipeline", guidance="input", starts_from="image", text_limit=512
    ),
    "flux2": FamilySpec("flux2:Flux2", "Flux2Pipeline", guidance="input", references=0),
    "flux2_klein": FamilySpec("flux2:Flux2Klein", "Flux2KleinPipeline", references=0),
    "flux3": FamilySpec("flux3:Flux3", "Flux3ModularPipeline", references=0),
    "qwen_image": FamilySpec("qwen_image:QwenImage", "QwenImagePipeline", text_limit=1024),
    "qwen_image_edit": FamilySpec("qwen_image_edit:QwenImageEdit", "QwenImageEditPipeline", starts_from="image"),
    "qwen_image_edit_plus": FamilySpec(
        "qwen_image_edit:QwenImageEditPlus", "QwenImageEditPlusPipeline", starts_from="image", references=1
    ),
    "qwen_image21": FamilySpec("qwen_image21:QwenImage21", "QwenImage21Pipeline", references=0),
    "wan21": FamilySpec("wan:Wan", "WanPipeline", **_WAN),
    "wan22": FamilySpec("wan:Wan22", "WanPipeline", **_WAN),
    "wan22_ti2v": FamilySpec("wan:Wan22TI2V", "WanPipeline", **_WAN),
    "wan21_i2v": FamilySpec(
        "wan_i2v:Wan21ImageToVideo", "WanImageToVideoPipeline", starts_from="image", last_frame=True, **_WAN
    ),
    "wan22_i2v": FamilySpec(
        "wan_i2v:Wan22ImageToVideo", "WanImageToVideoPipeline", starts_from="image", last_frame=True, **_WAN
    ),
    "wan21_v2v": FamilySpec(
        "wan_v2v:WanVideoToVideo",
        "WanVideoToVideoPipeline",
        starts_from="clip",
        **(_WAN | {"not_encoded": frozenset({"guidance_scale_2", "flow_shift", "strength"})}),
    ),
    "wan22_ti2v_i2v": FamilySpec(
        "wan_i2v:Wan22TI2VImage", "WanImageToVideoPipeline", starts_from="image", decodes_latents=False, **_WAN
    ),
    "z_image": FamilySpec("z_image:ZImage", "ZImagePipeline"),
    "sana": FamilySpec("sana:Sana", "SanaPipeline", **_SANA),
    "sana_video": FamilySpec("sana:SanaVideo", "SanaVideoPipeline", clips=_OF_4, **_SANA),
    "hunyuan_video15": FamilySpec("hunyuan_video15:HunyuanVideo15", "HunyuanVideo15Pipeline", clips=_OF_4),
    "hunyuan_video15_i2v": FamilySpec(
        "hunyuan_video15_i2v:HunyuanVideo15ImageToVideo",
        "HunyuanVideo15ImageToVideoPipeline",
        starts_from="image",
        clips=_OF_4,
    ),
    # The levels are those of 2B; 5B ends at 0.0283.
    "cogvideox": FamilySpec(
        "cogvideox:CogVideoX", "CogVideoXPipeline", clips=_OF_8, steps_divide=1000, known_levels=(1.0, 0.0481)
    ),
    "ltx2": FamilySpec("ltx2:LTX2", "LTX2Pipeline", clips=_OF_8, frame_rate=24.0, not_encoded=_LTX2_OPTIONS),
    "ltx2_i2v": FamilySpec(
        "ltx2_i2v:LTX2ImageToVideo",
        "LTX2ImageToVideoPipeline",
        starts_from="image",
        clips=_OF_8,
        frame_rate=24.0,
        decodes_latents=False,
        not_encoded=_LTX2_OPTIONS | {"use_cross_timestep"},
    ),
    "causal_lm": FamilySpec("causal_lm:CausalLM", kind="tokens"),
    "vision_lm": FamilySpec("vision_lm:VisionLM", kind="tokens", images=8),
    "janus": FamilySpec("janus:Janus", kind="image_tokens", guidance="blank"),
}
#: Families by the end of the class of a transformers folder, the first that fits.
_ARCHITECTURES = {
    "JanusForConditionalGeneration": "janus",
    "ForConditionalGeneration": "vision_lm",
    "ForCausalLM": "causal_lm",
}


def spec_of(family: str) -> FamilySpec:
    """Return the facts about a family, or the defaults for the import string of a custom one."""
    return FAMILIES.get(family) or FamilySpec(family)


def families(fact: Callable[[FamilySpec], object]) -> list[str]:
    """Return the sorted names of families for which a fact is true."""
    return sorted(name for name, spec in FAMILIES.items() if fact(spec))


def most_images(family: str, options: Mapping[str, Any]) -> int | None:
    """Return the maximum number of images per prompt under ``model.options``; None for a custom family."""
    if family not in FAMILIES:
        return None
    spec = FAMILIES[family]
    if spec.references is not None:
        return int(options.get("references", spec.references))
    if spec.images is not None:
        most = options.get("images", spec.images)
        return most if isinstance(most, int) and most > 0 else spec.images  # loading refuses other values
    return 2 if spec.last_frame else int(spec.starts_from != "text")


def family_of(path: str) -> str:
    """Return the model family of a local folder.

    Raises:
        ConfigError: there is no such folder, or it names no known class, or one of several families.
    """
    folder = user_path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path '{path}' is no folder here, so its model family is unknown. Correct the path; for a model of "
            "the hub set model.policy to its family."
        )
    named = _class_of(folder)
    possible = [name for name, spec in FAMILIES.items() if named and spec.pipeline == named]
    possible = possible or [family for end, family in _ARCHITECTURES.items() if named.endswith(end)][:1]
    if len(possible) != 1:
        content = f"a {named}" if named else "no index of diffusers and no config.json of transformers"
        choice = f"one of {', '.join(possible)}" if possible else "its model family"
        raise ConfigError(f"model.path '{path}' holds {content}: set model.policy to {choice}.")
    return possible[0]


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
