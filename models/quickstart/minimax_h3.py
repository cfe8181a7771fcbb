"""Tiny MiniMax-H3: clips with sound, of the pipeline's minimum length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers as d
import transformers as t

from models.library_loading import read_json
from models.policies.minimax_h3 import MiniMaxH3 as Family
from models.policies.pipeline_index import MODULAR, component_entry, in_folder, portable_index
from models.quickstart.qwen import qwen3_vl
from models.quickstart.text import qwen_tokenizer

#: Channels of latents, of clips and of sounds.
_CLIP, _SOUND = 4, 8


class MiniMaxH3:
    """The components of text to clips with sound: 16 pixels per latent, 40 latents of stereo per second."""

    def __init__(self) -> None:
        """Make the parts."""
        tokenizer = qwen_tokenizer()
        self._tokenizer = tokenizer
        self._parts = {
            # The pipeline reads hidden state 50, which must not be the last.
            "text_encoder": qwen3_vl(tokenizer, layers=51),
            "tokenizer": tokenizer,
            # As in the published folder.
            "scheduler": d.MiniMaxH3Scheduler(shift=12.0),
            "audio_scheduler": d.MiniMaxH3Scheduler(shift=3.0),
            "transformer": _transformer(),
            "vae": _clips(),
            "audio_vae": _sounds(),
        }

    def save_pretrained(self, folder: Path) -> None:
        """Write a modular repository, whose index does not contain its path."""
        pipeline = Family.pipeline_blocks().init_pipeline()
        pipeline.update_components(**self._parts)
        pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
        # transformers makes the processor only with torchvision, so its files are written without it.
        t.Qwen2VLImageProcessorPil(patch_size=16).save_pretrained(Path(folder) / "processor")
        self._tokenizer.save_pretrained(Path(folder) / "processor")
        path = Path(folder) / MODULAR
        index = portable_index(read_json(path), in_folder(path.parent))
        index["processor"] = component_entry(MODULAR, "processor", "transformers", "Qwen3VLProcessor")
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _transformer() -> Any:
    return d.MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=_CLIP,
        audio_in_channels=_SOUND,
        text_dim=16,
        freq_dim=16,
        time_embed_hidden_dim=24,
        time_embed_dim=12,
        rope_freq_dim=2,
    )


def _clips() -> Any:
    return d.AutoencoderKLMiniMaxH3(
        latent_channels=_CLIP,
        block_out_channels=(4, 4, 4, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        decoder_num_register_tokens=1,
        decoder_ffn_mult=2,
        latents_mean=(0.1,) * _CLIP,
        latents_std=(1.3,) * _CLIP,
    ).eval()


def _sounds() -> Any:
    made = d.AutoencoderKLMiniMaxH3Audio(
        encoder_dim=2,
        encoder_rates=(20, 40),
        latent_dim=16,
        latent_channels=_SOUND,
        num_attention_heads=2,
        decoder_dim=4,
        decoder_rates=(40, 20),
        decoder_kernel_sizes=(80, 40),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
        latents_mean=[0.1] * _SOUND,
        latents_std=[1.3] * _SOUND,
    ).eval()
    # With the default initial weights it only hums for any latents.
    for name, weights in made.decoder.named_parameters():
        if name.endswith("weight_g"):
            weights.data.mul_(2)
    return made
