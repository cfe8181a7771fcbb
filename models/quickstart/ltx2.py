"""A tiny LTX-2 pipeline: clips with sound."""

from __future__ import annotations

from typing import Any

import diffusers as d
import transformers as t
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from torch import nn

from models.quickstart.parts import shifting_scheduler
from models.quickstart.text import gemma_tokenizer, language

#: Width of tokens, of both media: 16 channels of clips, 2 channels of 8 levels of sound.
_WIDTH, _CHANNELS, _LEVELS = 16, 2, 8
_TEXT = 16


def ltx2() -> Any:
    """Return text to clips with sound: 32 pixels, 8 frames or 40 milliseconds per latent; stereo of 16 kHz."""
    tokenizer = gemma_tokenizer()
    text = t.Gemma3TextConfig(
        **language(tokenizer, layers=2), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    vision = t.SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    config = t.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4)
    return d.LTX2Pipeline(
        # As in the published folder.
        scheduler=shifting_scheduler(
            shift=1.0,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
        vae=_clips(),
        audio_vae=_sounds(),
        text_encoder=t.Gemma3ForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        connectors=_connectors(layers=text.num_hidden_layers),
        transformer=_transformer(),
        vocoder=_vocoder(),
    )


def _transformer() -> Any:
    return d.LTX2VideoTransformer3DModel(
        in_channels=_WIDTH,
        out_channels=_WIDTH,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        audio_in_channels=_CHANNELS * _LEVELS,
        audio_out_channels=_CHANNELS * _LEVELS,
        audio_num_attention_heads=2,
        audio_attention_head_dim=6,
        audio_cross_attention_dim=12,
        num_layers=2,
        caption_channels=_TEXT,
        rope_type="split",
    )


def _connectors(*, layers: int) -> Any:
    stream = {"num_attention_heads": 2, "attention_head_dim": _TEXT // 2, "num_layers": 1}
    stream["num_learnable_registers"] = 8
    both = {f"{name}_connector_{key}": value for name in ("video", "audio") for key, value in stream.items()}
    return LTX2TextConnectors(
        caption_channels=_TEXT,
        text_proj_in_factor=layers + 1,
        connector_rope_base_seq_len=32,
        rope_type="split",
        **both,
    ).eval()


def _clips() -> Any:
    return d.AutoencoderKLLTX2Video(
        latent_channels=_WIDTH,
        block_out_channels=(8, 16, 16, 16),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        decoder_causal=False,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    ).eval()


def _sounds() -> Any:
    return d.AutoencoderKLLTX2Audio(
        # The means and stds of latents have this length.
        base_channels=_CHANNELS * _LEVELS,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=32,
        latent_channels=_CHANNELS,
        mel_bins=4 * _LEVELS,
    ).eval()


def _vocoder() -> Any:
    made = LTX2Vocoder(
        in_channels=2 * 4 * _LEVELS,
        hidden_channels=16,
        upsample_kernel_sizes=[20, 32],
        upsample_factors=[10, 16],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        output_sampling_rate=16000,
    ).eval()
    # With the default initial weights it hums for any spectrogram.
    for weights in made.parameters():
        nn.init.zeros_(weights) if weights.ndim == 1 else nn.init.kaiming_normal_(weights, mode="fan_out")
    return made
