"""Sizes of published models, without their weights: denoisers built on the meta device from their configs.

A local folder has the configs. For models on the hub, the published ones are in ``models.memory.published``, so that a
config can be checked before a download.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from models.library_loading import diffusers_class, read_json
from models.memory.architecture_shapes import Architecture, TextEncoder
from models.memory.published import CLIP_TOKENS, HUNYUAN15_FURTHER, PUBLISHED, VAE, VAES
from models.policies.pipeline_configs import whole
from models.policies.pipeline_index import index_file, read_index_file
from models.weights.stored_weights import on_meta

if TYPE_CHECKING:
    from torch import nn

#: Names of sizes in a text encoder's config: T5's names, and those of all others.
_TEXT_SIZES = {"width": ("d_model", "hidden_size"), "inner": ("d_ff", "intermediate_size")}
#: Text tokens in the denoiser's sequence, where it is not 512 (0: text is used by cross-attention only).
_TEXT_TOKENS = {
    "UNet2DConditionModel": 0,
    "SD3Transformer2DModel": 333,
    "WanTransformer3DModel": 0,
    "SanaTransformer2DModel": 0,
    "SanaVideoTransformer3DModel": 0,
    "Flux3Transformer2DModel": 480,
    "LTX2VideoTransformer3DModel": 0,
    "CogVideoXTransformer3DModel": 226,
    # Qwen's and ByT5's tokens, and those of an image, which are there without an image too.
    "HunyuanVideo15Transformer3DModel": 1000 + HUNYUAN15_FURTHER,
}
#: The text tokens among these that no setting changes.
_FURTHER_TEXT = {"SD3Transformer2DModel": CLIP_TOKENS, "HunyuanVideo15Transformer3DModel": HUNYUAN15_FURTHER}
#: Denoisers whose patch size is the latents per side of a token; others have 1, and their pipelines pack latents.
_PATCHED = frozenset(
    {
        *("SD3Transformer2DModel", "SanaTransformer2DModel", "HunyuanVideo15Transformer3DModel"),
        "QwenImage21Transformer2DModel",
        "LTX2VideoTransformer3DModel",
    }
)
#: Prefixes of components that encode prompts and their images.
_ENCODERS = ("text_encoder", "image_encoder", "connectors")
#: Pipelines in which the prompt's source image is appended to the generated tokens.
_IMAGE_TOKENS = ("FluxKontextPipeline", "QwenImageEditPipeline")


def architecture_of(path: str) -> Architecture | None:
    """Return the architecture of a pipeline folder or a published model, or None if it is not known.

    Raises:
        ConfigError: a file of the folder is missing or cannot be read.
    """
    folder = Path(path).expanduser()
    if not index_file(folder).is_file():
        return PUBLISHED.get(path)
    try:
        with whole(folder):
            return _local(folder)
    except (LookupError, TypeError, AttributeError):
        return None  # a pipeline of another kind


def meta_denoiser(architecture: Architecture) -> nn.Module:
    """Return the denoiser without weights."""
    return on_meta(lambda: diffusers_class(architecture.denoiser)(**architecture.config))


def meta_decoder(architecture: Architecture) -> nn.Module:
    """Return the autoencoder without weights."""
    about = dict(architecture.vae or VAES.get(architecture.denoiser, VAE))
    made = diffusers_class(about.pop("class"))
    return on_meta(lambda: made(**about))


def parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _local(folder: Path) -> Architecture | None:
    index = read_index_file(index_file(folder))
    names = [name for name in ("transformer", "transformer_2", "unet") if index.get(name, [None])[0]]
    vae = folder / "vae" / "config.json"
    if not names or not vae.is_file():
        return None
    config, about, made = read_json(folder / names[0] / "config.json"), read_json(vae), index[names[0]][1]
    return Architecture(
        denoiser=made,
        config={key: value for key, value in config.items() if not key.startswith("_")},
        denoisers=len(names),
        latents=latent_shape(about),
        chunk=chunk_of(about),
        text_tokens=_TEXT_TOKENS.get(made, 512),
        further_text=_FURTHER_TEXT.get(made, 0),
        patch={"unet": 1}.get(names[0], config.get("patch_size", 2) if made in _PATCHED else 2),
        image_tokens=index["_class_name"] in _IMAGE_TOKENS,
        text_parameters=sum(
            sum(stored_numbers(folder / name).values()) for name in index if name.startswith(_ENCODERS)
        ),
        text=_text_encoder([read_json(path) for path in sorted(folder.glob("text_encoder*/config.json"))]),
        vae={"class": index["vae"][1], **{key: value for key, value in about.items() if not key.startswith("_")}},
    )


def _text_encoder(configs: Sequence[Mapping[str, Any]]) -> TextEncoder:
    """Return the largest of a folder's text encoders."""
    found = []
    for config in configs:
        about = config.get("text_config") or config
        sizes = {name: next((about[key] for key in keys if key in about), 0) for name, keys in _TEXT_SIZES.items()}
        # T5 materializes attention scores; language models keep the outputs of all layers.
        more = {"heads": about["num_heads"]} if "d_model" in about else {"kept": about.get("num_hidden_layers", 0)}
        found.append(TextEncoder(**sizes, **more))
    return max(found, key=lambda encoder: encoder.width * encoder.inner, default=TextEncoder(width=0, inner=0))


def stored_numbers(folder: Path) -> dict[str, int]:
    """Return the number of elements of each tensor in the safetensors files of a component, from their headers."""
    found: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {key: math.prod(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"'{file}' is no safetensors file ({error})") from None
    return found


def latent_shape(about: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return latent channels, and pixels per side and frames of a latent, from an autoencoder's config."""
    if "z_dim" in about:
        halvings = about.get("temperal_downsample", (False, True, True))
        patch = about.get("patch_size") or 1
        return about["z_dim"], patch * 2 ** len(halvings), 2 ** sum(halvings)
    if "clip_length" in about:
        sides = (math.prod(about[f"{name}_downsample_factors"]) for name in ("spatial", "temporal"))
        return (about["latent_channels"], *sides)
    if "spatial_compression_ratio" in about:
        return about["latent_channels"], about["spatial_compression_ratio"], about["temporal_compression_ratio"]
    levels = about.get("block_out_channels") or about["encoder_block_out_channels"]
    return about["latent_channels"], 2 ** (len(levels) - 1), int(about.get("temporal_compression_ratio", 1))


def chunk_of(about: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return ``Architecture.chunk``, from an autoencoder's config."""
    if "clip_length" not in about:
        return None
    kept = -(-about["clip_length"] // math.prod(about["temporal_downsample_factors"]))
    return about["clip_length"], kept, -about["token_drop"] % kept
