"""Tiny CogVideoX pipelines."""

from __future__ import annotations

from typing import Any

import diffusers as d

from models.quickstart.text import t5_encoder, t5_tokenizer


def cogvideox(*, rotary: bool = False) -> Any:
    """Return text to video, with additive positions, as in 2B, or rotary ones, as in 5B."""
    tokenizer = t5_tokenizer()
    transformer = d.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        time_embed_dim=16,
        text_embed_dim=32,
        num_layers=2,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        use_rotary_positional_embeddings=rotary,
    )
    vae = d.AutoencoderKLCogVideoX(block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4)
    scheduler = d.CogVideoXDDIMScheduler(
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0 if rotary else 3.0,
        timestep_spacing="trailing",
    )
    return d.CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer, 32),
        vae=vae.eval(),
        transformer=transformer,
        scheduler=scheduler,
    )
