"""A new StableDiffusion3Pipeline of 0.7 million parameters: the same classes as SD3.5, with smaller sizes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from flowmill.models.library_loading import quiet_libraries
from flowmill.models.policies.dummy_components import silent_t5
from flowmill.models.quickstart.corpus import LATENT_CHANNELS, VAE_CHANNELS, VAE_FACTOR, WIDTH
from flowmill.models.weights.pretrained_loading import load_pretrained

MAX_TOKENS = 8
TEXT_WIDTH = 32
_WIDTH = 64
_HEADS = 2
_LAYERS = 4
_PATCH = 4


def tiny_pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """Return a pipeline with random weights; equal seeds give equal weights."""
    quiet_libraries()
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        tokenizer = _character_tokenizer(Path(folder))
        text_encoders = [_text_encoder(len(tokenizer)) for _ in range(2)]
        # Plain diffusers refuses a folder without a T5 unless the missing components are passed by name as None.
        silence, no_tokens = silent_t5(2 * TEXT_WIDTH)
        return StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=_autoencoder(),
            text_encoder=text_encoders[0],
            tokenizer=tokenizer,
            text_encoder_2=text_encoders[1],
            tokenizer_2=tokenizer,
            text_encoder_3=silence,
            tokenizer_3=no_tokens,
        )


def _transformer() -> SD3Transformer2DModel:
    side = WIDTH // VAE_FACTOR
    return SD3Transformer2DModel(
        sample_size=side,
        patch_size=_PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=_LAYERS,
        attention_head_dim=_WIDTH // _HEADS,
        num_attention_heads=_HEADS,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=side // _PATCH,
        qk_norm="rms_norm",
    )


def _autoencoder() -> AutoencoderKL:
    levels = len(VAE_CHANNELS)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=VAE_CHANNELS,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=WIDTH,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def _text_encoder(vocabulary: int) -> CLIPTextModelWithProjection:
    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            projection_dim=TEXT_WIDTH,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )
    # CLIP's own 0.02 is far too small to train from scratch in seconds.
    nn.init.normal_(encoder.text_model.embeddings.token_embedding.weight, std=0.5)
    nn.init.normal_(encoder.text_model.embeddings.position_embedding.weight, std=0.5)
    return encoder


def _character_tokenizer(folder: Path) -> CLIPTokenizer:
    """Return a CLIP tokenizer whose vocabulary consists of printable characters and their end-of-word forms."""
    characters = [chr(code) for code in range(33, 127) if not 65 <= code <= 90]
    tokens = characters + [f"{char}</w>" for char in characters] + ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    # The tokenizer's config repeats these arguments; with others the bytes of base models would change.
    options: dict[str, Any] = {"model_max_length": MAX_TOKENS, "local_files_only": False}
    return load_pretrained(CLIPTokenizer, folder, label="model.build:", **options)
