"""Published sizes of pipelines: configs of denoisers and autoencoders, sizes of text encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.memory.architecture_shapes import Architecture, TextEncoder

_DUAL = tuple(range(13))
#: Autoencoders as published, by class; arguments that differ from the class's defaults.
_KL = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_DEEP = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
VAES: Mapping[str, Mapping[str, Any]] = {
    "UNet2DConditionModel": {"class": "AutoencoderKL", **_KL, "latent_channels": 4},
    "QwenImageTransformer2DModel": {"class": "AutoencoderKLQwenImage"},
    "WanTransformer3DModel": {"class": "AutoencoderKLWan"},
    "Flux2Transformer2DModel": {"class": "AutoencoderKLFlux2"},
    "SanaTransformer2DModel": {
        "class": "AutoencoderDC",
        "encoder_block_types": _DEEP,
        "decoder_block_types": _DEEP,
        "downsample_block_type": "conv",
        "upsample_block_type": "interpolate",
    },
    "SanaVideoTransformer3DModel": {"class": "AutoencoderKLWan"},
    "QwenImage21Transformer2DModel": {"class": "AutoencoderKLQwenImage21"},
    "Flux3Transformer2DModel": {"class": "AutoencoderKLFlux2"},
    "HunyuanVideo15Transformer3DModel": {"class": "AutoencoderKLHunyuanVideo15"},
    "LTX2VideoTransformer3DModel": {
        "class": "AutoencoderKLLTX2Video",
        "decoder_causal": False,
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
    },
    "MiniMaxH3Transformer3DModel": {"class": "AutoencoderKLMiniMaxH3"},
    "CogVideoXTransformer3DModel": {"class": "AutoencoderKLCogVideoX"},
}
VAE = {"class": "AutoencoderKL", **_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
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
_SANA_SMALL = {
    "num_layers": 28,
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
_SANA15 = {"qk_norm": "rms_norm_across_heads"}
_SANA_VIDEO = {"mlp_ratio": 3.0}
#: Parameters of text encoders, as their authors state them.
_CLIP_L, _CLIP_G, _T5_XXL, _UMT5_XXL = 123_000_000, 695_000_000, 4_762_000_000, 5_681_000_000
_QWEN3_4B, _QWEN3_8B, _QWEN25_VL_7B, _MISTRAL_24B = 4_022_000_000, 8_191_000_000, 8_292_000_000, 24_011_000_000
_QWEN3_VL_4B, _QWEN3_VL_8B, _QWEN3_VL_32B = 4_438_000_000, 8_767_000_000, 33_357_000_000
_GEMMA2_2B, _GEMMA3_12B = 2_614_000_000, 12_187_000_000
_BYT5_SMALL, _QWEN25_VL_7B_TEXT = 219_000_000, 7_070_000_000
CLIP_TOKENS = 77
#: Tokens of ByT5 and of an image in HunyuanVideo 1.5.
HUNYUAN15_FURTHER = 256 + 729


_GEMMA2 = TextEncoder(width=2304, inner=9216)


def _sana(config: Mapping[str, Any]) -> Architecture:
    """Return a SANA of images."""
    return Architecture(
        denoiser="SanaTransformer2DModel",
        config=config,
        latents=(32, 32, 1),
        text_tokens=0,
        patch=1,
        text_parameters=_GEMMA2_2B,
        text=_GEMMA2,
    )


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
        further_text=CLIP_TOKENS,
        text_parameters=_CLIP_L + _CLIP_G + _T5_XXL,
    ),
    "stabilityai/stable-diffusion-3.5-large": Architecture(
        denoiser="SD3Transformer2DModel",
        config=_SD35_LARGE,
        text_tokens=333,
        further_text=CLIP_TOKENS,
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
    "black-forest-labs/flux-3-image-klein-base": Architecture(
        denoiser="Flux3Transformer2DModel",
        latents=(32, 8, 1),
        text_tokens=480,
        text_parameters=_QWEN3_VL_4B,
        text=TextEncoder(width=2560, inner=9728, kept=36),
    ),
    "Qwen/Qwen-Image-2.1": Architecture(
        denoiser="QwenImage21Transformer2DModel",
        latents=(64, 16, 1),
        patch=1,
        text_parameters=_QWEN3_VL_8B,
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
    "Efficient-Large-Model/Sana_600M_1024px_diffusers": _sana(_SANA_SMALL),
    "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers": _sana({}),
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": _sana(_SANA15),
    "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers": _sana({**_SANA15, "num_layers": 60}),
    "Efficient-Large-Model/SANA-Video_2B_480p_diffusers": Architecture(
        denoiser="SanaVideoTransformer3DModel",
        config=_SANA_VIDEO,
        latents=(16, 8, 4),
        text_tokens=0,
        text_parameters=_GEMMA2_2B,
        text=_GEMMA2,
    ),
    "zai-org/CogVideoX-2b": Architecture(
        denoiser="CogVideoXTransformer3DModel",
        latents=(16, 8, 4),
        text_tokens=226,
        text_parameters=_T5_XXL,
    ),
    "zai-org/CogVideoX-5b": Architecture(
        denoiser="CogVideoXTransformer3DModel",
        config={"num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True},
        latents=(16, 8, 4),
        text_tokens=226,
        text_parameters=_T5_XXL,
    ),
    "Lightricks/LTX-2": Architecture(
        denoiser="LTX2VideoTransformer3DModel",
        config={"rope_type": "split"},
        latents=(128, 32, 8),
        text_tokens=0,
        patch=1,
        text_parameters=_GEMMA3_12B,
        # The hidden states of all layers are read.
        text=TextEncoder(width=3840, inner=15360, kept=49),
    ),
    "MiniMaxAI/MiniMax-H3": Architecture(
        denoiser="MiniMaxH3Transformer3DModel",
        latents=(24, 16, 4),
        chunk=(17, 5, 2),
        # The Qwen3-VL of width 5120; only 50 of its layers are read.
        text_parameters=_QWEN3_VL_32B,
        text=TextEncoder(width=5120, inner=25600, kept=64),
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": Architecture(
        denoiser="HunyuanVideo15Transformer3DModel",
        config={"target_size": 640, "task_type": "t2v"},
        latents=(32, 16, 4),
        text_tokens=1000 + HUNYUAN15_FURTHER,
        further_text=HUNYUAN15_FURTHER,
        patch=1,
        text_parameters=_QWEN25_VL_7B_TEXT + _BYT5_SMALL,
        text=TextEncoder(width=3584, inner=18944, kept=28),
    ),
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": Architecture(
        denoiser="HunyuanVideo15Transformer3DModel",
        config={"target_size": 960, "task_type": "t2v"},
        latents=(32, 16, 4),
        text_tokens=1000 + HUNYUAN15_FURTHER,
        further_text=HUNYUAN15_FURTHER,
        patch=1,
        text_parameters=_QWEN25_VL_7B_TEXT + _BYT5_SMALL,
        text=TextEncoder(width=3584, inner=18944, kept=28),
    ),
}
