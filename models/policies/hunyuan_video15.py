"""HunyuanVideo 1.5 text to video (HunyuanVideo15Pipeline): Qwen2.5-VL encodes the prompt, ByT5 its quoted parts.

In the pipeline, guidance is a component, not an argument. LoRA files are loaded by the transformer, not the pipeline.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from flowmill.models.library_loading import read_json
from flowmill.models.policies.clips import ClipPolicy
from flowmill.models.policies.diffusion import DiffusionSettings, Images, PipelineCall
from flowmill.models.policies.pipeline import JOINT_ATTENTION, Modules, Rows
from flowmill.models.policies.pipeline_configs import SHIFT_ALONE, Fields, check_guider, check_velocities
from flowmill.models.policies.tokenization import Reader
from flowmill.models.weights.lora_files import save_lora

#: Tokens that the pipeline reads, and tokens of its template, which it drops.
_LENGTH, _TEMPLATE = 1000, 108
_GLYPHS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HunyuanVideo15Options:
    """Options of the family."""

    max_sequence_length: PositiveInt = _LENGTH
    """Qwen tokens; the pipeline itself reads 1000. Padding is computed too, so fewer tokens are faster."""


def _as_message(tokenizer: Any, text: str) -> Any:
    from diffusers import HunyuanVideo15Pipeline
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

    embeds = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
    (messages,) = format_text_input([text], embeds.parameters["system_message"].default)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _quoted(tokenizer: Any, text: str) -> str:
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    return extract_glyph_texts(text) or ""


class HunyuanVideo15(ClipPolicy):
    """Adapter for HunyuanVideo15Pipeline; latents are (B, 32, f, h, w)."""

    pipeline_name = "HunyuanVideo15Pipeline"
    family = "hunyuan_video15"
    options_type = HunyuanVideo15Options
    options: HunyuanVideo15Options
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    readers = (
        Reader(tokenizer="tokenizer", further=_TEMPLATE, written=_as_message),
        Reader(tokenizer="tokenizer_2", limit=_GLYPHS, written=_quoted),
    )
    schedulers: ClassVar[Mapping[str, Fields]] = {"FlowMatchEulerDiscreteScheduler": SHIFT_ALONE}
    missing_arguments: ClassVar[frozenset[str]] = frozenset({"guidance_scale", "max_sequence_length"})
    needs_autoencoder = True
    blocks = ("transformer_blocks",)
    # Attention of both streams.
    lora_targets = JOINT_ATTENTION

    def __init__(self, pipeline: Any, settings: DiffusionSettings, options: Any) -> None:
        super().__init__(pipeline, settings, options)
        if options.max_sequence_length != _LENGTH:
            pipeline.tokenizer_max_length = options.max_sequence_length

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D) and ``glyph_embeds`` (B, M, E), their masks (B, L) and (B, M) int64."""
        values = self.pipeline.encode_prompt(list(prompts), device=self.settings.device, batch_size=len(prompts))
        names = ("prompt_embeds", "mask", "glyph_embeds", "glyph_mask")
        rows: dict[str, Tensor] = dict(zip(names, values, strict=True))
        return {name: row.long() if name.endswith("mask") else row for name, row in rows.items()}

    def sigmas(self, steps: int) -> Tensor:
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1], device=self.settings.device)
        return scheduler.sigmas.clone().float()

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        condition, embeds = self.condition(latents, rows)
        return modules["transformer"](
            hidden_states=torch.cat([latents, condition], dim=1),
            image_embeds=embeds,
            timestep=(sigma * 1000).to(latents.dtype),
            encoder_hidden_states=rows["prompt_embeds"],
            encoder_attention_mask=rows["mask"],
            encoder_hidden_states_2=rows["glyph_embeds"],
            encoder_attention_mask_2=rows["glyph_mask"],
            return_dict=False,
        )[0]

    def condition(self, latents: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the latents and mask of provided frames (B, C + 1, f, h, w), and the embeddings of an image (B, N, D);
        without an image all are zeros."""
        pipeline, (batch, channels, *shape) = self.pipeline, latents.shape
        width = pipeline.transformer.config.image_embed_dim
        embeds = latents.new_zeros(batch, pipeline.vision_num_semantic_tokens, width)
        return latents.new_zeros(batch, channels + 1, *shape), embeds

    def decoded(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return self.run_decoder(vae, latents.to(vae.dtype) / vae.config.scaling_factor)

    def run_decoder(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode one by one: the decoder's attention masks only fit a single row (diffusers 0.42)."""
        return torch.cat([vae.decode(row, return_dict=False)[0] for row in latents.split(1)])

    def encoded(self, media: Tensor) -> Tensor:
        """Return scaled latents, one by one as in ``run_decoder``."""
        latents = torch.cat([self.likeliest(row) for row in media.split(1)])
        return latents * self.pipeline.vae.config.scaling_factor  # type: ignore[no-any-return]

    def save_lora(self, folder: Path) -> None:
        """Write a LoRA file for the transformer's ``load_lora_adapter``, in the format of other pipelines."""
        save_lora("WanPipeline", folder, "transformer", self.pipeline.transformer)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        call = super().pipeline_call(steps, negative_prompt)
        length = self.options.max_sequence_length
        differences = (f"It reads {_LENGTH} tokens of a prompt; the policy reads {length}.",) * (length != _LENGTH)
        return replace(
            call,
            guider={"guidance_scale": max(1.0, self.settings.guidance_scale)},
            loads_adapters=False,
            differences=(*call.differences, *differences),
        )

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        super()._check_scheduler(folder, index)
        check_guider(folder, cls.family, index)
        check_velocities(folder, "use_meanflow")

    @classmethod
    def unit_of(cls, folder: Path) -> int:
        vae, transformer = (read_json(folder / part / "config.json") for part in ("vae", "transformer"))
        return int(vae["spatial_compression_ratio"] * transformer["patch_size"])
