"""FLUX.1 Kontext (FluxKontextPipeline): edits an image, whose latents are appended to the generated ones as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from models.policies.diffusion import Images, PipelineCall
from models.policies.flux1 import Flux1
from models.policies.parts import Part
from models.policies.pipeline import Rows


class Flux1Kontext(Flux1):
    """Adapter for FluxKontextPipeline; the image to edit is scaled to the generated size."""

    pipeline_name = "FluxKontextPipeline"
    family = "flux1_kontext"
    # Flow-GRPO's targets for Kontext: those for FLUX.1 and the feed-forward input of the single-stream blocks.
    lora_targets = (*Flux1.lora_targets, "proj_mlp")
    takes_images = True
    encoding_parts = frozenset({Part.TEXT, Part.VAE})

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D), ``pooled`` (B, P) and ``image_latents`` (B, tokens, 64)."""
        pipeline, size = self.pipeline, (self.settings.height, self.settings.width)
        packed = []
        for (pixels,) in images or ():
            image = pipeline.image_processor.resize(Image.fromarray(pixels), *size)
            unit = pipeline.image_processor.preprocess(image, *size).to(self.settings.device, pipeline.vae.dtype)
            latents = pipeline._encode_vae_image(unit, None)
            packed.append(pipeline._pack_latents(latents, 1, *latents.shape[1:]))
        return {**super().encode(prompts), "image_latents": torch.cat(packed)}

    def tokens(self, latents: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return generated tokens and those of the image to edit, which differ in the first coordinate."""
        _, ids = super().tokens(latents, rows)
        of_image = ids.clone()
        of_image[..., 0] = 1
        return torch.cat([latents, rows["image_latents"].to(latents.dtype)], dim=1), torch.cat([ids, of_image])

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; by default it would choose its own sizes for both images."""
        call, size = super().pipeline_call(steps, negative_prompt), (self.settings.width, self.settings.height)
        own = {"max_area": size[0] * size[1], "_auto_resize": False}
        return replace(call, arguments={**call.arguments, **own}, image_size=size)
