"""Tiny Wan pipelines."""

from __future__ import annotations

from typing import Any

import diffusers as d
import transformers as t

from models.quickstart.parts import frames_vae, wan_transformer
from models.quickstart.text import t5_encoder, t5_tokenizer


def wan(*, two: bool = False) -> Any:
    """Return text to video, of 2.2 with ``two`` transformers."""
    tokenizer = t5_tokenizer()
    scheduler = d.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return d.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer, 32, multilingual=True),
        vae=frames_vae(d.AutoencoderKLWan),
        scheduler=scheduler,
        transformer=wan_transformer(),
        transformer_2=wan_transformer() if two else None,
        boundary_ratio=0.875 if two else None,
    )


def wan_video_to_video() -> Any:
    """Return video to video, of the parts of text to video."""
    parts = {name: part for name, part in wan().components.items() if name != "transformer_2"}
    return d.WanVideoToVideoPipeline(**parts)


def wan_ti2v(*, image: bool = False) -> Any:
    """Return text or image to video of 2.2 TI2V: timesteps per token, an autoencoder of sixteen pixels per latent."""
    text = wan()
    vae = d.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    return (d.WanImageToVideoPipeline if image else d.WanPipeline)(
        tokenizer=text.tokenizer,
        text_encoder=text.text_encoder,
        vae=vae.eval(),
        scheduler=text.scheduler,
        transformer=wan_transformer(in_channels=48, out_channels=48),
        expand_timesteps=True,
    )


def wan_image_to_video(*, two: bool) -> Any:
    """Return image to video, of 2.2 with ``two`` transformers."""
    text = wan()
    vision = t.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    seen = {} if two else {"image_dim": 32, "added_kv_proj_dim": 24}
    return d.WanImageToVideoPipeline(
        tokenizer=text.tokenizer,
        text_encoder=text.text_encoder,
        vae=text.vae,
        scheduler=text.scheduler,
        image_processor=None if two else t.CLIPImageProcessorPil(size=32, crop_size=32),
        image_encoder=None if two else t.CLIPVisionModel(vision).eval(),
        transformer=wan_transformer(in_channels=36, **seen),
        transformer_2=wan_transformer(in_channels=36) if two else None,
        boundary_ratio=0.875 if two else None,
    )
