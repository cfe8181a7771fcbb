"""Tiny FLUX.3."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers as d
import transformers as t

from models.library_loading import read_json
from models.policies.dummy_components import TextProcessor
from models.policies.flux3 import Flux3 as Family
from models.policies.pipeline_index import MODULAR, component_entry, in_folder, portable_index
from models.quickstart.parts import flux2_vae
from models.quickstart.qwen import qwen3_vl
from models.quickstart.text import qwen_tokenizer


class Flux3:
    """The components of FLUX.3, without its prompt rewriter."""

    def __init__(self) -> None:
        """Make the parts."""
        tokenizer = qwen_tokenizer()
        # The pipeline joins hidden states 4, 8, ..., 32, so the depth cannot shrink.
        self._parts = {"text_encoder": qwen3_vl(tokenizer, layers=33), "vae": flux2_vae()}
        self._parts |= {
            "tokenizer": TextProcessor(tokenizer),
            "transformer": d.Flux3Transformer2DModel(
                in_channels=32,
                cond_in_channels=32,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=8 * 16,
                timestep_channels=32,
                mlp_ratio=2.0,
                axes_dims_rope=(4, 4, 4, 4),
            ),
        }

    def save_pretrained(self, folder: Path) -> None:
        """Write a modular repository, whose index does not contain its path."""
        pipeline = Family.pipeline_blocks().init_pipeline()
        pipeline.update_components(**self._parts)
        pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
        t.Qwen2VLImageProcessorPil(patch_size=16).save_pretrained(Path(folder) / "tokenizer")
        path = Path(folder) / MODULAR
        index = portable_index(read_json(path), in_folder(path.parent))
        index["tokenizer"] = component_entry(MODULAR, "tokenizer", "transformers", "Qwen3VLProcessor")
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
