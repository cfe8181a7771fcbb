"""Tiny HunyuanVideo pipelines."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers as d
import transformers as t

from models.quickstart.parts import flow_scheduler
from models.quickstart.text import qwen_tokenizer, t5_encoder


def hunyuan_video15() -> Any:
    """Return text to video of 1.5, with a tokenizer that knows the words of its template."""
    system = inspect.signature(d.HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
    tokenizer, glyphs = qwen_tokenizer(words=system), t.ByT5Tokenizer()
    config = t.Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformer = d.HunyuanVideo15Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=24,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        task_type="t2v",
    )
    return d.HunyuanVideo15Pipeline(
        text_encoder=t.Qwen2_5_VLTextModel(config).eval(),
        tokenizer=tokenizer,
        transformer=transformer,
        vae=d.AutoencoderKLHunyuanVideo15(block_out_channels=(8, 8, 8, 16, 32), layers_per_block=1).eval(),
        scheduler=flow_scheduler(shift=5.0),
        text_encoder_2=t5_encoder(glyphs, 24),
        tokenizer_2=glyphs,
        guider=d.ClassifierFreeGuidance(guidance_scale=6.0),
    )
