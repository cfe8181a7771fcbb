"""Flow-Factory's settings, by preset."""

from __future__ import annotations

from collections.abc import Mapping

from tools.published.common import (
    ADAM,
    BOTH,
    EMA,
    JOINT,
    KL,
    QWEN_IMAGE,
    SINGLE,
    WAN_ATTENTION,
    about,
    groups,
    lora,
    noise,
    plan,
    size,
)
from tools.published.publication import Publication

_BLOB = "https://github.com/X-GenGroup/Flow-Factory/blob/"
_FACTORY = f"{_BLOB}a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c"
_FLUX2 = [*JOINT, "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"]
_Z_IMAGE = [f"attention.{n}" for n in ("to_q", "to_k", "to_v", "to_out.0")] + [f"feed_forward.w{n}" for n in (1, 2, 3)]
_FACTORY_ALL = {
    **ADAM,
    **EMA,
    "optimize.epsilon": 1e-8,
    "optimize.learning_rate": 3e-4,
    "optimize.updates_per_epoch": 2,
    "optimize.algorithm.name": "grpo",
    KL: 0.0,
    "advantage.aggregation": "gdpo",
    "advantage.std": "group",
    "evaluate.every": 20,
    **plan("subset", count=1, candidates=[1, 2, 3]),
}
_FACTORY_CODE = {"advantage.epsilon": 1e-6, "advantage.floor": "max", "rollout.latents_dtype": "float16"}


def _factory_files(example: str, model: str) -> dict[str, str]:
    return {
        "example": f"{_FACTORY}/examples/grpo/lora/{example}",
        "code": f"{_FACTORY}/src/flow_factory/hparams/training_args.py",
        "model": f"{_FACTORY}/src/flow_factory/models/{model}",
    }


_ONE_SUBSET = (
    "The public code draws the stochastic step once per epoch; here it is drawn per group. Its guidance of 0 "
    "is 1 here, and its moving average every four epochs is one every eight updates."
)

_EDITS = "dataset/sharegpt4o_image_mini"
#: What the example for FLUX.2 klein says, whether images are edited or made of text.
_KLEIN = {
    **_FACTORY_ALL,
    **about("black-forest-labs/FLUX.2-klein-9B", _EDITS, "1 pickscore", 1.0),
    **size(384),
    **groups(48, 16, 4),
    **plan("subset", count=1, candidates=[1, 2]),
    **noise("flow_sde", noise_level=0.5),
    "prompts.image": "image",
    "evaluate.steps": 10,
    "evaluate.height": 1024,
    "evaluate.width": 1024,
    **lora(64, 128, [*_FLUX2, "attn.to_qkv_mlp_proj"]),
}

PUBLISHED: Mapping[str, Publication] = {
    "flux2_dev": Publication(
        title="Flow-Factory on FLUX.2 dev",
        paper=None,
        files=_factory_files("flux2/t2i.yaml", "flux/flux2.py"),
        remark=_ONE_SUBSET,
        settings={
            "code": _FACTORY_CODE,
            "example": {
                **_FACTORY_ALL,
                **about("black-forest-labs/FLUX.2-dev", "dataset/t2is", "1 clip_score + 0.5 pickscore", 4.0),
                **size(512),
                **groups(48, 16, 8),
                **noise("flow_sde", noise_level=1.0),
                "evaluate.steps": 28,
                "evaluate.height": 1024,
                "evaluate.width": 1024,
                **lora(64, 128, [*_FLUX2, "attn.to_qkv_mlp_proj"]),
            },
        },
    ),
    "flux3_klein": Publication(
        title="Flow-Factory's settings for FLUX.2 dev on FLUX.3 Image Klein Base",
        paper=None,
        files=_factory_files("flux2/t2i.yaml", "flux/flux2.py"),
        remark=f"{_ONE_SUBSET} For this model none are published; the settings are those of FLUX.2 dev, whose guidance "
        "is an input of the model, and the adapted layers are attention and feed-forwards, as there.",
        settings={
            "code": _FACTORY_CODE,
            "example": {
                **_FACTORY_ALL,
                **about(
                    "black-forest-labs/flux-3-image-klein-base", "dataset/t2is", "1 clip_score + 0.5 pickscore", 4.0
                ),
                "model.options.max_sequence_length": 512,
                **size(512),
                **groups(48, 16, 8),
                **noise("flow_sde", noise_level=1.0),
                "evaluate.steps": 28,
                "evaluate.height": 1024,
                **lora(64, 128, [*SINGLE, "ff.linear_in", "ff.linear_out"]),
            },
        },
    ),
    "flux2_klein": Publication(
        title="Flow-Factory on FLUX.2 klein 9B",
        paper=None,
        files=_factory_files("flux2_klein/default.yaml", "flux/flux2_klein.py"),
        remark=_ONE_SUBSET,
        settings={
            "code": _FACTORY_CODE,
            "example": _KLEIN,
        },
    ),
    "flux2_klein_edit": Publication(
        title="Flow-Factory on FLUX.2 klein 9B, editing",
        paper=None,
        files=_factory_files("flux2_klein/default.yaml", "flux/flux2_klein.py"),
        remark=_ONE_SUBSET,
        settings={
            "code": _FACTORY_CODE,
            "example": {**_KLEIN, "model.options.reference_area": 384 * 384},
        },
    ),
    "qwen_image_edit_plus": Publication(
        title="Flow-Factory on Qwen-Image-Edit-2509",
        paper=None,
        files=_factory_files("qwen_image_edit_plus/default.yaml", "qwen_image/qwen_image_edit_plus.py"),
        remark=f"{_ONE_SUBSET} Generated images have the shape of the image to edit; here it is square.",
        settings={
            "code": {**_FACTORY_CODE, **BOTH},
            "example": {
                **_FACTORY_ALL,
                **about("Qwen/Qwen-Image-Edit-2509", _EDITS, "1 pickscore", 4.0),
                **size(384),
                **groups(48, 16, 10),
                **noise("flow_sde", noise_level=1.0),
                "prompts.image": "image",
                "model.options.reference_area": 384 * 384,
                "evaluate.steps": 40,
                "evaluate.height": 1024,
                "evaluate.width": 1024,
            },
            "model": lora(64, 128, QWEN_IMAGE),
        },
    ),
    "ltx2_i2v": Publication(
        title="Flow-Factory on LTX-2, image to clips with sound",
        paper=None,
        files={
            **_factory_files("", ""),
            "example": f"{_BLOB}5f6cda1a3e6be3c971643beb8d1e92e7be4a9638/examples/grpo/lora/ltx2/i2av.yaml",
            "model": f"{_BLOB}ce23789471ab1eafb134d473489810c7a80a3148/src/flow_factory/models/ltx2/ltx2_i2av.py",
        },
        remark=f"{_ONE_SUBSET} Its evaluations have a guidance of 4; here they have that of rollouts.",
        settings={
            "code": _FACTORY_CODE,
            "example": {
                **_FACTORY_ALL,
                **about("Lightricks/LTX-2", _EDITS, "1 clap + 1 imagebind", 1.0),
                **size(512, 768),
                "model.frames": 121,
                **groups(16, 16, 30),
                **noise("flow_sde", noise_level=0.7),
                "prompts.image": "image",
                "optimize.learning_rate": 1e-4,
                "evaluate.every": 60,
                "evaluate.steps": 50,
                "model.lora.rank": 64,
                "model.lora.alpha": 128,
            },
        },
    ),
    "z_image_turbo": Publication(
        title="Flow-Factory on Z-Image Turbo",
        paper=None,
        files=_factory_files("z_image_turbo/default.yaml", "z_image/z_image.py"),
        remark=_ONE_SUBSET,
        settings={
            "code": _FACTORY_CODE,
            "example": {
                **_FACTORY_ALL,
                **about("Tongyi-MAI/Z-Image-Turbo", "dataset/pickscore", "1 pickscore", 1.0),
                **size(512),
                **groups(48, 16, 6),
                **noise("flow_sde", noise_level=0.7),
                "evaluate.every": 40,
                "evaluate.steps": 10,
                **lora(64, 128, _Z_IMAGE),
            },
        },
    ),
    "wan22_a14b": Publication(
        title="Flow-Factory on Wan 2.2 A14B",
        paper=None,
        files=_factory_files("wan22/t2v.yaml", "wan/wan2_t2v.py"),
        remark=f"{_ONE_SUBSET} Its UniPC schedule is the Euler grid of the same shift here.",
        settings={
            "code": _FACTORY_CODE,
            "example": {
                **_FACTORY_ALL,
                **about("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "dataset/pickscore", "1 pickscore", 4.0),
                "model.options.guidance_scale_2": 3.0,
                **size(480),
                "model.frames": 5,
                **groups(48, 16, 10),
                **noise("flow_sde", noise_level=0.9),
                "optimize.learning_rate": 1e-4,
                "evaluate.steps": 28,
                "evaluate.height": 720,
                "evaluate.width": 720,
                "evaluate.frames": 21,
                **lora(64, 128, [*WAN_ATTENTION, "ffn.net.0.proj", "ffn.net.2"]),
            },
            "model": BOTH,
        },
    ),
}
