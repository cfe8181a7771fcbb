"""A CLAP model for tests: small, random, written as the hub's is."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor

from flowmill.models.quickstart.text import clip_tokenizer


def write_clap(folder: Path, *, fused: bool = False) -> str:
    """Write model and processor; it hears a second of 48,000 samples at once; ``fused``: and parts of longer sounds."""
    tokenizer = clip_tokenizer()
    sound = {
        "spec_size": 64,
        "num_mel_bins": 16,
        "patch_embeds_hidden_size": 16,
        "hidden_size": 32,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "window_size": 4,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "num_classes": 5,
        "enable_fusion": fused,
    }
    text = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 80}
    torch.manual_seed(0)
    config = ClapConfig(text_config=text, audio_config=sound, projection_dim=32)
    ClapModel(config).eval().save_pretrained(folder)
    extractor = ClapFeatureExtractor(feature_size=16, max_length_s=1, truncation="fusion" if fused else "rand_trunc")
    ClapProcessor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)
    return str(folder)
