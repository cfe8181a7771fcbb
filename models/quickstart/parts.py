"""Denoisers, autoencoders and schedulers shared by tiny pipelines of several families: real classes, random weights."""

from __future__ import annotations

from typing import Any

import diffusers as d

_LEVELS = (8, 8, 16, 16)


def wan_transformer(*, out_channels: int = 16, **options: Any) -> Any:
    """Return one Wan transformer."""
    return d.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=options.pop("in_channels", 16),
        out_channels=out_channels,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
        **options,
    )


def flux2_transformer(*, guidance: bool) -> Any:
    """Return a FLUX.2 transformer, with or without guidance as an input."""
    return d.Flux2Transformer2DModel(
        in_channels=32,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=32,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def kl_vae(channels: int, scaling: float, shift: float | None, *, quantized: bool = False) -> Any:
    """Return an image autoencoder of eight pixels per latent."""
    return d.AutoencoderKL(
        block_out_channels=_LEVELS,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=scaling,
        shift_factor=shift,
        use_quant_conv=quantized,
        use_post_quant_conv=quantized,
        force_upcast=False,
    ).eval()


def flux2_vae() -> Any:
    """Return FLUX.2's autoencoder."""
    return d.AutoencoderKLFlux2(
        block_out_channels=_LEVELS, layers_per_block=1, latent_channels=8, norm_num_groups=4, sample_size=64
    ).eval()


def frames_vae(cls: Any) -> Any:
    """Return an autoencoder of clips, four frames and eight pixels per latent."""
    shape = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return cls(**shape, temperal_downsample=[False, True, True]).eval()


def flow_scheduler(**options: Any) -> Any:
    """Return the Euler scheduler of flow matching."""
    return d.FlowMatchEulerDiscreteScheduler(**options)


def shifting_scheduler(**options: Any) -> Any:
    """Return the same with a shift that depends on the size of the image."""
    base = {"shift": 3.0, "base_shift": 0.5, "base_image_seq_len": 256, "max_image_seq_len": 4096}
    return flow_scheduler(use_dynamic_shifting=True, **{**base, **options})
