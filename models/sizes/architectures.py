"""How large published models are, without their weights: denoisers built on the meta device from their configs.

A local folder has the configs. For models on the hub, the published configs are here, so that a config can be checked
before anything is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from models.libraries import diffusers_class, read_json
from models.policies.folders import whole
from models.weights.stored_weights import on_meta

if TYPE_CHECKING:
    from torch import nn

_DUAL = tuple(range(13))
#: Autoencoders as published, by class; arguments that differ from the class's defaults.
_KL = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_VAES: Mapping[str, Mapping[str, Any]] = {
    "UNet2DConditionModel": {"class": "AutoencoderKL", **_KL, "latent_channels": 4},
    "QwenImageTransformer2DModel": {"class": "AutoencoderKLQwenImage"},
    "WanTransformer3DModel": {"class": "AutoencoderKLWan"},
    "Flux2Transformer2DModel": {"class": "AutoencoderKLFlux2"},
}
_VAE = {"class": "AutoencoderKL", **_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_SD35_MEDIUM = {
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": _DUAL,
    "qk_norm": "rms_norm",
}
_SD35_LARGE = {
    **_SD35_MEDIUM,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "dual_attention_layers": (),
}
_WAN_SMALL = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
_WAN_TI2V = {
    "num_layers": 30,
    "num_attention_heads": 24,
    "ffn_dim": 14336,
    "in_channels": 48,
    "out_channels": 48,
}
_WAN22_VAE = {
    "class": "AutoencoderKLWan",
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "latents_mean": (0.0,) * 48,
    "latents_std": (1.0,) * 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
_KLEIN_4B = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
_KLEIN_9B = {
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
    "guidance_embeds": False,
}
_SD15 = {"sample_size": 64, "cross_attention_dim": 768}
_SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
#: Parameters of text encoders, as their authors state them.
_CLIP_L, _CLIP_G, _T5_XXL, _UMT5_XXL = 123_000_000, 695_000_000, 4_762_000_000, 5_681_000_000
_QWEN3_4B, _QWEN3_8B, _QWEN25_VL_7B, _MISTRAL_24B = 4_022_000_000, 8_191_000_000, 8_292_000_000, 24_011_000_000
#: What a text encoder's config calls its sizes: T5's names, and those of all others.
_TEXT_SIZES = {"width": ("d_model", "hidden_size"), "inner": ("d_ff", "intermediate_size")}
#: Text tokens beside the latents' own by denoiser, where it is not 512 (0: text is attended to across).
_TEXT_TOKENS = {"UNet2DConditionModel": 0, "SD3Transformer2DModel": 333, "WanTransformer3DModel": 0}
_CLIP_TOKENS = 77
#: Components that encode prompts and what comes with them begin so.
_ENCODERS = ("text_encoder", "image_encoder")
#: Pipelines in which the image a prompt starts from stands beside the generated tokens.
_IMAGE_TOKENS = ("FluxKontextPipeline", "QwenImageEditPipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoder:
    """What of a text encoder decides what it computes with."""

    width: int
    """Of its layers."""
    inner: int
    """Of their feed-forwards."""
    heads: int = 0
    """Whose attention scores are computed as such, as T5's are; 0: they are never held."""
    kept: int = 0
    """Layers whose outputs are kept until the last is computed."""

    def row(self, tokens: int, number: int) -> int:
        """Return the bytes that encoding a text of so many tokens takes at most, of numbers of so many bytes."""
        # As of any transformer's feed-forward: what was given, residual, norm and copies; activation, gate and product.
        layer = tokens * (5 * self.width + 3 * self.inner) * number
        # Scores, and their softmax in float32 and back.
        return layer + self.kept * tokens * self.width * number + self.heads * tokens**2 * (2 * number + 4)


_T5 = TextEncoder(width=4096, inner=10240, heads=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What of a pipeline decides its memory."""

    denoiser: str
    """diffusers class of the denoiser."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that differ from the class's defaults."""
    denoisers: int = 1
    """How many there are."""
    latents: tuple[int, int, int] = (16, 8, 1)
    """Latent channels, pixels a latent is wide, frames it is long."""
    text_tokens: int = 512
    """Text tokens beside the latents' own, of models that attend to both."""
    further_text: int = 0
    """Of these the ones that no setting changes: CLIP's, before T5's."""
    patch: int = 2
    """Latents a token is wide."""
    image_tokens: bool = False
    """The image a prompt starts from stands beside the generated tokens, as many again."""
    text_parameters: int = 0
    """Of all text encoders, and of image encoders where prompts come with images."""
    text: TextEncoder = _T5
    """The largest text encoder."""
    vae: Mapping[str, Any] | None = None
    """Class and arguments of a folder's own autoencoder; None: the published one of the denoiser's class."""

    def tokens(self, *, height: int, width: int, frames: int, references: int = 0) -> int:
        """Return the tokens of one row, text aside; ``references``: pixels of the images that stand beside it."""
        _, pixels, times = self.latents
        unit = pixels * self.patch
        made = ((frames - 1) // times + 1) * (height // unit) * (width // unit)
        return made * (2 if self.image_tokens else 1) + references // unit**2


PUBLISHED: Mapping[str, Architecture] = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": Architecture(
        denoiser="UNet2DConditionModel",
        config=_SD15,
        latents=(4, 8, 1),
        text_tokens=0,
        patch=1,
        text_parameters=_CLIP_L,
        text=TextEncoder(width=768, inner=3072),
    ),
    "stabilityai/stable-diffusion-xl-base-1.0": Architecture(
        denoiser="UNet2DConditionModel",
        config=_SDXL,
        latents=(4, 8, 1),
        text_tokens=0,
        patch=1,
        text_parameters=_CLIP_L + _CLIP_G,
        text=TextEncoder(width=1280, inner=5120, kept=32),
    ),
    "stabilityai/stable-diffusion-3.5-medium": Architecture(
        denoiser="SD3Transformer2DModel",
        config=_SD35_MEDIUM,
        text_tokens=333,
        further_text=_CLIP_TOKENS,
        text_parameters=_CLIP_L + _CLIP_G + _T5_XXL,
    ),
    "stabilityai/stable-diffusion-3.5-large": Architecture(
        denoiser="SD3Transformer2DModel",
        config=_SD35_LARGE,
        text_tokens=333,
        further_text=_CLIP_TOKENS,
        text_parameters=_CLIP_L + _CLIP_G + _T5_XXL,
    ),
    "black-forest-labs/FLUX.1-dev": Architecture(
        denoiser="FluxTransformer2DModel",
        config={"guidance_embeds": True},
        text_parameters=_CLIP_L + _T5_XXL,
    ),
    "black-forest-labs/FLUX.1-Kontext-dev": Architecture(
        denoiser="FluxTransformer2DModel",
        config={"guidance_embeds": True},
        image_tokens=True,
        text_parameters=_CLIP_L + _T5_XXL,
    ),
    "black-forest-labs/FLUX.2-dev": Architecture(
        denoiser="Flux2Transformer2DModel",
        latents=(32, 8, 1),
        text_parameters=_MISTRAL_24B,
        text=TextEncoder(width=5120, inner=32768, kept=40),
    ),
    "black-forest-labs/FLUX.2-klein-4B": Architecture(
        denoiser="Flux2Transformer2DModel",
        config=_KLEIN_4B,
        latents=(32, 8, 1),
        text_parameters=_QWEN3_4B,
        text=TextEncoder(width=2560, inner=9728, kept=36),
    ),
    "black-forest-labs/FLUX.2-klein-9B": Architecture(
        denoiser="Flux2Transformer2DModel",
        config=_KLEIN_9B,
        latents=(32, 8, 1),
        text_parameters=_QWEN3_8B,
        text=TextEncoder(width=4096, inner=12288, kept=36),
    ),
    "Qwen/Qwen-Image": Architecture(
        denoiser="QwenImageTransformer2DModel",
        text_parameters=_QWEN25_VL_7B,
        text=TextEncoder(width=3584, inner=18944, kept=28),
    ),
    "Qwen/Qwen-Image-Edit": Architecture(
        denoiser="QwenImageTransformer2DModel",
        text_tokens=1024,
        image_tokens=True,
        text_parameters=_QWEN25_VL_7B,
        text=TextEncoder(width=3584, inner=18944, kept=28),
    ),
    "Qwen/Qwen-Image-Edit-2509": Architecture(
        denoiser="QwenImageTransformer2DModel",
        text_tokens=1024,
        text_parameters=_QWEN25_VL_7B,
        text=TextEncoder(width=3584, inner=18944, kept=28),
    ),
    "Qwen/Qwen-Image-Edit-2511": Architecture(
        denoiser="QwenImageTransformer2DModel",
        config={"zero_cond_t": True},
        text_tokens=1024,
        text_parameters=_QWEN25_VL_7B,
        text=TextEncoder(width=3584, inner=18944, kept=28),
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Architecture(
        denoiser="WanTransformer3DModel",
        config=_WAN_SMALL,
        latents=(16, 8, 4),
        text_tokens=0,
        text_parameters=_UMT5_XXL,
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Architecture(
        denoiser="WanTransformer3DModel",
        denoisers=2,
        latents=(16, 8, 4),
        text_tokens=0,
        text_parameters=_UMT5_XXL,
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Architecture(
        denoiser="WanTransformer3DModel",
        config=_WAN_TI2V,
        latents=(48, 16, 4),
        text_tokens=0,
        text_parameters=_UMT5_XXL,
        vae=_WAN22_VAE,
    ),
    "Tongyi-MAI/Z-Image-Turbo": Architecture(
        denoiser="ZImageTransformer2DModel",
        text_parameters=_QWEN3_4B,
        text=TextEncoder(width=2560, inner=9728, kept=36),
    ),
}


def architecture_of(path: str) -> Architecture | None:
    """Return the architecture of a pipeline folder or a published model, None of one that is not known.

    Raises:
        ConfigError: a file of the folder is missing or cannot be read.
    """
    folder = Path(path).expanduser()
    if not (folder / "model_index.json").is_file():
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
    about = dict(architecture.vae or _VAES.get(architecture.denoiser, _VAE))
    made = diffusers_class(about.pop("class"))
    return on_meta(lambda: made(**about))


def parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _local(folder: Path) -> Architecture | None:
    index = read_json(folder / "model_index.json")
    names = [name for name in ("transformer", "transformer_2", "unet") if index.get(name, [None])[0]]
    vae = folder / "vae" / "config.json"
    if not names or not vae.is_file():
        return None
    config, about = read_json(folder / names[0] / "config.json"), read_json(vae)
    return Architecture(
        denoiser=index[names[0]][1],
        config={key: value for key, value in config.items() if not key.startswith("_")},
        denoisers=len(names),
        latents=latent_shape(about),
        text_tokens=_TEXT_TOKENS.get(index[names[0]][1], 512),
        further_text=_CLIP_TOKENS if index[names[0]][1] == "SD3Transformer2DModel" else 0,
        # Other families write 1 where they pack two by two latents into a token themselves.
        patch={"unet": 1}.get(names[0], config.get("patch_size", 2) if "pos_embed_max_size" in config else 2),
        image_tokens=index["_class_name"] in _IMAGE_TOKENS,
        text_parameters=sum(stored_numbers(folder / name) for name in index if name.startswith(_ENCODERS)),
        text=_text_encoder([read_json(path) for path in sorted(folder.glob("text_encoder*/config.json"))]),
        vae={"class": index["vae"][1], **{key: value for key, value in about.items() if not key.startswith("_")}},
    )


def _text_encoder(configs: Sequence[Mapping[str, Any]]) -> TextEncoder:
    """Return the largest of a folder's text encoders."""
    found = []
    for config in configs:
        about = config.get("text_config") or config
        sizes = {name: next((about[key] for key in keys if key in about), 0) for name, keys in _TEXT_SIZES.items()}
        # T5 computes scores as such; what speaks keeps the outputs of all layers.
        more = {"heads": about["num_heads"]} if "d_model" in about else {"kept": about.get("num_hidden_layers", 0)}
        found.append(TextEncoder(**sizes, **more))
    return max(found, key=lambda encoder: encoder.width * encoder.inner, default=TextEncoder(width=0, inner=0))


def stored_numbers(folder: Path) -> int:
    """Return how many numbers the safetensors files of a component hold, from their headers."""
    found = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as opened:
                found += sum(math.prod(opened.get_slice(key).get_shape()) for key in opened.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"'{file}' is no safetensors file ({error})") from None
    return found


def latent_shape(about: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return latent channels, and how many pixels and frames a latent is wide, from an autoencoder's config."""
    if "z_dim" in about:
        halvings = about.get("temperal_downsample", (False, True, True))
        patch = about.get("patch_size") or 1
        return about["z_dim"], patch * 2 ** len(halvings), 2 ** sum(halvings)
    return about["latent_channels"], 2 ** (len(about["block_out_channels"]) - 1), 1
