"""A CLIP model for tests: small, random, written as the hub's are."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipProcessor,
)

from flowmill.models.quickstart.text import clip_tokenizer

_WIDTH = 32


def write_clip(folder: Path) -> str:
    """Write model and processor."""
    tokenizer = clip_tokenizer()
    layers = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(
        text_config={**layers, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id},
        vision_config={**layers, "image_size": 30, "patch_size": 6},
        projection_dim=_WIDTH,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    size = {"height": 30, "width": 30}
    processor = CLIPImageProcessor(size={"shortest_edge": 30}, crop_size=size)
    CLIPProcessor(image_processor=processor, tokenizer=tokenizer).save_pretrained(folder)
    return str(folder)


def write_siglip(folder: Path) -> str:
    """Write a SigLIP and its processor."""
    tokenizer = clip_tokenizer()
    layers = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    texts = {**layers, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 16, "projection_size": 32}
    torch.manual_seed(0)
    config = SiglipConfig(text_config=texts, vision_config={**layers, "image_size": 30, "patch_size": 6})
    SiglipModel(config).save_pretrained(folder)
    processor = SiglipImageProcessorPil(size={"height": 30, "width": 30})
    SiglipProcessor(image_processor=processor, tokenizer=tokenizer).save_pretrained(folder)
    return str(folder)


def write_head(file: Path) -> str:
    """Write an aesthetic predictor with the names of the published one."""
    torch.manual_seed(1)
    widths, places = (_WIDTH, 1024, 128, 64, 16, 1), (0, 2, 4, 6, 7)
    tensors = {}
    for place, inputs, outputs in zip(places, widths[:-1], widths[1:], strict=True):
        layer = nn.Linear(inputs, outputs)
        tensors |= {f"layers.{place}.weight": layer.weight.detach(), f"layers.{place}.bias": layer.bias.detach()}
    save_file(tensors, file)
    return str(file)


def write_latent_head(file: Path) -> str:
    """Write two layers on latents (4, 8, 8): a convolution to two channels, and a linear one."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (2, 4, 3, 3), "0.bias": (2,), "1.weight": (1, 128), "1.bias": (1,)}
    save_file({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}, file)
    return str(file)
