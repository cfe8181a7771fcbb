"""Tiny Qwen-Image pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers as d
import transformers as t

from models.policies.dummy_components import TextProcessor
from models.quickstart.parts import frames_vae, shifting_scheduler
from models.quickstart.text import language, qwen_tokenizer


def qwen_image(*, zero_condition: bool = False) -> Any:
    """Return text to image, or with a transformer for editing."""
    tokenizer, width = qwen_tokenizer(), 32
    number = tokenizer.convert_tokens_to_ids
    config = t.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            "bos_token_id": number("<|endoftext|>"),
            "eos_token_id": number("<|im_end|>"),
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )
    transformer = d.QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=width,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_condition,
    )
    return d.QwenImagePipeline(
        scheduler=_scheduler(),
        vae=frames_vae(d.AutoencoderKLQwenImage),
        text_encoder=t.Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer,
        transformer=transformer,
    )


class EditPipeline:
    """Image editing: the parts of text to image, and a processor."""

    def __init__(self, pipeline: str = "QwenImageEditPipeline", *, zero_condition: bool = False) -> None:
        """Make the parts; ``zero_condition``: tokens of source images are modulated with noise level 0 (2511)."""
        self._parts, self._class = qwen_image(zero_condition=zero_condition), getattr(d, pipeline)

    def save_pretrained(self, folder: Path) -> None:
        """Write a pipeline's folder.

        transformers makes the processor only with torchvision, so its two files are written without it.
        """
        self._class(**self._parts.components, processor=None).save_pretrained(folder)
        processor = Path(folder) / "processor"
        t.Qwen2VLImageProcessorPil().save_pretrained(processor)
        self._parts.tokenizer.save_pretrained(processor)
        index = Path(folder) / "model_index.json"
        about = {**json.loads(index.read_text()), "processor": ["transformers", "Qwen2VLProcessor"]}
        index.write_text(json.dumps(about, indent=2))


class QwenImage21:
    """Qwen-Image 2.1: text of Qwen3-VL, an autoencoder of sixteen pixels per latent with transparency."""

    def __init__(self) -> None:
        """Make the parts."""
        tokenizer = qwen_tokenizer()
        transformer = d.QwenImage21Transformer2DModel(
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            axes_dims_rope=(4, 6, 6),
        )
        vae = d.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=16,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1] * 16,
            latents_std=[1.3] * 16,
        )
        self._parts = {
            "scheduler": _scheduler(),
            "vae": vae.eval(),
            "text_encoder": qwen3_vl(tokenizer, layers=2),
            "processor": TextProcessor(tokenizer),
            "transformer": transformer,
        }

    def save_pretrained(self, folder: Path) -> None:
        """Write a pipeline's folder; see ``EditPipeline`` for its processor."""
        d.QwenImage21Pipeline(**self._parts).save_pretrained(folder)
        t.Qwen2VLImageProcessorPil(patch_size=16).save_pretrained(Path(folder) / "processor")
        index = Path(folder) / "model_index.json"
        about = {**json.loads(index.read_text()), "processor": ["transformers", "Qwen3VLProcessor"]}
        index.write_text(json.dumps(about, indent=2))


def qwen3_vl(tokenizer: Any, *, layers: int) -> Any:
    """Return a Qwen3-VL model for a tokenizer."""
    number = tokenizer.convert_tokens_to_ids
    config = t.Qwen3VLConfig(
        text_config={
            **language(tokenizer, layers=layers),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )
    return t.Qwen3VLForConditionalGeneration(config).eval()


def _scheduler() -> Any:
    return shifting_scheduler(
        max_shift=0.9, max_image_seq_len=8192, shift=1.0, shift_terminal=0.02, time_shift_type="exponential"
    )
