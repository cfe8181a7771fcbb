"""Tiny SANA pipelines."""

from __future__ import annotations

from typing import Any

import diffusers as d

from models.quickstart.parts import frames_vae
from models.quickstart.text import gemma, gemma_tokenizer

_SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "cross_attention_dim": 24,
    "caption_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12,
}


def sana() -> Any:
    """Return text to image, with an autoencoder of 32 pixels per latent."""
    tokenizer = gemma_tokenizer()
    return d.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma(tokenizer),
        vae=_deep_vae(),
        transformer=d.SanaTransformer2DModel(**_SHAPE, in_channels=32, out_channels=32, sample_size=32),
        scheduler=_dpm(shift=3.0),
    )


def sana_video() -> Any:
    """Return text to video, with Wan's autoencoder."""
    tokenizer = gemma_tokenizer()
    transformer = d.SanaVideoTransformer3DModel(**_SHAPE, mlp_ratio=3.0, sample_size=30, rope_max_seq_len=64)
    return d.SanaVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma(tokenizer),
        vae=frames_vae(d.AutoencoderKLWan),
        transformer=transformer,
        scheduler=_dpm(shift=8.0),
    )


def _dpm(*, shift: float) -> Any:
    return d.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def _deep_vae() -> Any:
    blocks = ("ResBlock",) * 4 + ("EfficientViTBlock",) * 2
    multiscales = ((), (), (), (), (5,), (5,))
    return d.AutoencoderDC(
        latent_channels=32,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8, 8, 8, 8, 16, 32),
        decoder_block_out_channels=(8, 8, 8, 8, 16, 32),
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        encoder_qkv_multiscales=multiscales,
        decoder_qkv_multiscales=multiscales,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    ).eval()
