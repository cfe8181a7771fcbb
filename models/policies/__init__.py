"""Policies: one adapter per model family.

A new family is one file here with a class derived from ``pipeline.PipelinePolicy`` (or ``base.Policy``), and one line
in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowmill.configs.registry import Table
from flowmill.models.policies.clip_lengths import ClipLengths

POLICIES = Table(
    {
        "sd15": "flowmill.models.policies.sd15:SD15",
        "sdxl": "flowmill.models.policies.sdxl:SDXL",
        "sd3": "flowmill.models.policies.sd3:SD3",
        "flux1": "flowmill.models.policies.flux1:Flux1",
        "flux1_kontext": "flowmill.models.policies.flux1:Flux1Kontext",
        "flux2": "flowmill.models.policies.flux2:Flux2",
        "flux2_klein": "flowmill.models.policies.flux2:Flux2Klein",
        "flux3": "flowmill.models.policies.flux3:Flux3",
        "qwen_image": "flowmill.models.policies.qwen_image:QwenImage",
        "qwen_image_edit": "flowmill.models.policies.qwen_image_edit:QwenImageEdit",
        "qwen_image_edit_plus": "flowmill.models.policies.qwen_image_edit:QwenImageEditPlus",
        "qwen_image21": "flowmill.models.policies.qwen_image21:QwenImage21",
        "wan21": "flowmill.models.policies.wan:Wan",
        "wan22": "flowmill.models.policies.wan:Wan22",
        "wan22_ti2v": "flowmill.models.policies.wan:Wan22TI2V",
        "wan21_i2v": "flowmill.models.policies.wan_i2v:Wan21ImageToVideo",
        "wan22_i2v": "flowmill.models.policies.wan_i2v:Wan22ImageToVideo",
        "wan21_v2v": "flowmill.models.policies.wan_v2v:WanVideoToVideo",
        "wan22_ti2v_i2v": "flowmill.models.policies.wan_i2v:Wan22TI2VImage",
        "z_image": "flowmill.models.policies.z_image:ZImage",
        "sana": "flowmill.models.policies.sana:Sana",
        "sana_video": "flowmill.models.policies.sana:SanaVideo",
        "hunyuan_video15": "flowmill.models.policies.hunyuan_video15:HunyuanVideo15",
        "hunyuan_video15_i2v": "flowmill.models.policies.hunyuan_video15_i2v:HunyuanVideo15ImageToVideo",
        "cogvideox": "flowmill.models.policies.cogvideox:CogVideoX",
        "ltx2": "flowmill.models.policies.ltx2:LTX2",
        "ltx2_i2v": "flowmill.models.policies.ltx2_i2v:LTX2ImageToVideo",
        "causal_lm": "flowmill.models.policies.causal_lm:CausalLM",
        "vision_lm": "flowmill.models.policies.vision_lm:VisionLM",
        "janus": "flowmill.models.policies.janus:Janus",
    },
    like="flowmill.models.policies.base:Policy",
    removed=dict.fromkeys(("minimax_h3", "minimax_h3_fl2v"), "Clips with sound: choose 'ltx2' or 'ltx2_i2v'."),
)
#: Kinds of families other than denoisers.
FAMILY_KINDS: Mapping[str, str] = {"causal_lm": "tokens", "vision_lm": "tokens", "janus": "image_tokens"}
#: Families whose guidance compares with a prompt without its tokens: there is no negative prompt.
BLANK_GUIDANCE = frozenset({"janus"})
#: Families whose guidance scale is an input of the model: one forward, no negative prompt.
EMBEDDED_GUIDANCE = frozenset({"flux1", "flux1_kontext", "flux2"})
#: Families whose prompts come with an image (``prompts.image``).
IMAGE_CONDITIONED = frozenset(
    (
        "flux1_kontext qwen_image_edit qwen_image_edit_plus wan21_i2v wan22_i2v wan22_ti2v_i2v wan21_v2v "
        "hunyuan_video15_i2v ltx2_i2v"
    ).split()
)
#: Subset whose prompts come with a clip.
CLIP_CONDITIONED = frozenset({"wan21_v2v"})
#: Subset that uses the second of two images as the last frame of the clip.
LAST_FRAME = frozenset({"wan21_i2v", "wan22_i2v"})
#: Families whose option ``references`` is the maximum number of images per prompt, and its default.
REFERENCES: Mapping[str, int] = {
    **dict.fromkeys(("flux2", "flux2_klein", "flux3", "qwen_image21"), 0),
    "qwen_image_edit_plus": 1,
}
#: Maximum images per prompt of vision-language models, the default of their option ``images``.
VISION_IMAGES = 8
#: Families with modular pipelines: diffusers has no device_map for them.
MODULAR = frozenset({"flux3"})
#: Families with an option that prepends an instruction to prompts but not to negative prompts.
INSTRUCTED = frozenset({"sana", "sana_video"})
#: Families whose decoding needs more than the denoised latents, so that reward gradients cannot reach them.
UNFOLLOWED = frozenset({"wan22_ti2v_i2v", "ltx2_i2v"})
#: Families that make clips, and the supported numbers of frames.
VIDEO: Mapping[str, ClipLengths] = {
    **dict.fromkeys(
        (
            "wan21 wan22 wan22_ti2v wan22_ti2v_i2v wan21_i2v wan22_i2v wan21_v2v sana_video hunyuan_video15 "
            "hunyuan_video15_i2v"
        ).split(),
        ClipLengths(every=4),
    ),
    **dict.fromkeys(("cogvideox", "ltx2", "ltx2_i2v"), ClipLengths(every=8)),
}
#: Frames per second of families with sound; the default of the option ``frame_rate`` if they have it.
FRAME_RATE: Mapping[str, float] = dict.fromkeys(("ltx2", "ltx2_i2v"), 24.0)
#: Families whose clips have sound.
HEARD = frozenset(FRAME_RATE)
#: ``model.options`` that embeddings do not depend on; they depend on all others, and on all options of custom families.
NOT_ENCODED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("sd15", "sdxl"), frozenset({"steps", "guidance_rescale"})),
    "sd3": frozenset({"schedule"}),
    **dict.fromkeys(
        "wan21 wan22 wan22_ti2v wan22_ti2v_i2v wan21_i2v wan22_i2v".split(),
        frozenset({"guidance_scale_2", "flow_shift"}),
    ),
    "wan21_v2v": frozenset({"guidance_scale_2", "flow_shift", "strength"}),
    **dict.fromkeys(("sana", "sana_video"), frozenset({"flow_shift"})),
    "ltx2": frozenset({"frame_rate", "audio_guidance_scale", "guidance_rescale"}),
    "ltx2_i2v": frozenset({"frame_rate", "audio_guidance_scale", "guidance_rescale", "use_cross_timestep"}),
}
#: Families whose denoisers take latents of any height and width.
ANY_SIZE = frozenset({"sd15", "sdxl", "sd3"})
#: Families with the number of steps as an option, and its default.
FIXED_STEPS: Mapping[str, int] = {"sd15": 50, "sdxl": 50}
#: Families whose number of steps must divide this number of timesteps.
DIVIDED_STEPS: Mapping[str, int] = {"cogvideox": 1000}
#: First and last noise level of published models of families that do not go from 1 to 0; other models may differ.
NOISE_RANGE: Mapping[str, tuple[float, float]] = {"sd15": (0.93, 0.0283), "sdxl": (0.93, 0.0283)}
#: First and last level of published models of families that were trained on timesteps, not on all levels from 1 to 0.
#: The CogVideoX value is that of 2B; 5B ends at 0.0283.
KNOWN_LEVELS: Mapping[str, tuple[float, float]] = {**NOISE_RANGE, "cogvideox": (1.0, 0.0481)}


def most_images(family: str, options: Mapping[str, Any]) -> int | None:
    """Return the maximum number of images per prompt under ``model.options``; None for a custom family."""
    if family not in POLICIES:
        return None
    if family in REFERENCES:
        return int(options.get("references", REFERENCES[family]))
    if family == "vision_lm":
        most = options.get("images", VISION_IMAGES)
        return most if isinstance(most, int) and most > 0 else VISION_IMAGES  # loading refuses other values
    return 2 if family in LAST_FRAME else int(family in IMAGE_CONDITIONED)
