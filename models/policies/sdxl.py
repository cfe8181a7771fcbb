"""Stable Diffusion XL (StableDiffusionXLPipeline with DDIM): two text encoders; pooled text and image size are added to
the time embedding.

Without a negative prompt, the pipeline guides away from zeros if its config has ``force_zeros_for_empty_prompt``, as in
training; an empty text is encoded as zeros here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowmill.models.policies.ddim import UNetPolicy
from flowmill.models.policies.diffusion import Images, PipelineCall
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import Rows
from flowmill.models.policies.pipeline_configs import DISCRETE, Fields
from flowmill.models.policies.tokenization import CLIP_LIMIT, Reader

_DDIM = DISCRETE["DDIMScheduler"]
#: This pipeline clips if its scheduler's config says so.
_UNCLIPPED = replace(_DDIM, moot=_DDIM.moot - {"clip_sample"}, allowed={**_DDIM.allowed, "clip_sample": (False,)})


class SDXL(UNetPolicy):
    """Adapter for StableDiffusionXLPipeline; latents are (B, 4, h, w)."""

    pipeline_name = "StableDiffusionXLPipeline"
    family = "sdxl"
    text_parts = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    unused_parts = ("image_encoder", "feature_extractor")
    readers = (Reader(tokenizer="tokenizer", limit=CLIP_LIMIT), Reader(tokenizer="tokenizer_2", limit=CLIP_LIMIT))
    schedulers: ClassVar[Mapping[str, Fields]] = {**DISCRETE, "DDIMScheduler": _UNCLIPPED}
    settings_read = Fields(followed=frozenset({"force_zeros_for_empty_prompt"}), moot=frozenset({"add_watermarker"}))

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, 77, D) and ``pooled`` (B, P) in the model's dtype."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            list(prompts), device=self.settings.device, do_classifier_free_guidance=False
        )
        if self.pipeline.config.force_zeros_for_empty_prompt:
            filled = torch.tensor([prompt != "" for prompt in prompts], device=embeds.device)
            embeds, pooled = embeds * filled[:, None, None], pooled * filled[:, None]
        return {"prompt_embeds": embeds, "pooled": pooled}

    def conditions(self, rows: Rows, noisy: Tensor) -> dict[str, Any]:
        """Return text, pooled text and the size: the image's own size, without a crop."""
        text, pooled = rows["prompt_embeds"], rows["pooled"]
        height, width = (side * self.pipeline.vae_scale_factor for side in noisy.shape[-2:])
        numbers = self.table(text.device, _time_ids, height, width, text.dtype)
        added = {"text_embeds": pooled, "time_ids": numbers.expand(len(pooled), -1)}
        return {"encoder_hidden_states": text, "added_cond_kwargs": added}

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; an empty negative prompt is left out, as the pipeline would encode it."""
        zeros = not negative_prompt and self.pipeline.config.force_zeros_for_empty_prompt
        return super().pipeline_call(steps, None if zeros else negative_prompt)

    def decode_scaled(self, latents: Tensor) -> Tensor:
        """Return decoded (B, C, h, w) latents; some models have a mean and a std per channel."""
        vae = self.pipeline.vae
        if not self._has_moments:
            return super().decode_scaled(latents)
        mean, std = self._moments(latents)
        spread = latents * std / vae.config.scaling_factor + mean
        return vae.decode(spread.to(vae.dtype), return_dict=False)[0]

    def encode_scaled(self, media: Tensor) -> Tensor:
        """Return scaled latents, with the mean and std of their channels removed."""
        if not self._has_moments:
            return super().encode_scaled(media)
        latents = self.likeliest(media)
        mean, std = self._moments(latents)
        return (latents - mean) * self.pipeline.vae.config.scaling_factor / std

    @property
    def _has_moments(self) -> bool:
        config = self.pipeline.vae.config
        return config.get("latents_mean") is not None and config.get("latents_std") is not None

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std of the latents' channels, (1, C, 1, 1) each."""
        config = self.pipeline.vae.config
        moments = (
            self.table(like.device, torch.tensor, tuple(each)) for each in (config.latents_mean, config.latents_std)
        )
        mean, std = (each.view(1, -1, 1, 1).to(like) for each in moments)
        return mean, std

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        """Turn off the watermark, which the pipeline adds if a package is installed."""
        return {"add_watermarker": False}


def _time_ids(height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return (6,) original size, crop corner, and target size."""
    return torch.tensor([height, width, 0, 0, height, width], dtype=dtype)
