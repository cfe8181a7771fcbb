"""FLUX.1 dev (FluxPipeline), whose guidance is an input of the model, so that no second forward runs, and FLUX.1
Kontext (FluxKontextPipeline), which edits an image: its latents are appended to the generated ones as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from flowmill.models.policies.diffusion import Images, PipelineCall
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import JOINT_ATTENTION, Modules, PipelinePolicy, Rows, TextOptions, thousandths
from flowmill.models.policies.tokenization import CLIP_LIMIT, Reader


class Flux1(PipelinePolicy):
    """Adapter for FluxPipeline; latents are packed, (B, tokens, 64)."""

    pipeline_name = "FluxPipeline"
    family = "flux1"
    options_type: ClassVar[type[Any]] = TextOptions
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    unused_parts: ClassVar[tuple[str, ...]] = ("image_encoder", "feature_extractor")
    readers: ClassVar[tuple[Reader, ...]] = (
        Reader(tokenizer="tokenizer", limit=CLIP_LIMIT),
        Reader(tokenizer="tokenizer_2"),
    )
    blocks: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")
    # Flow-GRPO's targets for FLUX.1: attention of both streams and their feed-forwards.
    lora_targets: ClassVar[tuple[str, ...]] = (
        *JOINT_ATTENTION,
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (B, L, D) and ``pooled`` (B, P)."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            list(prompts), None, device=self.settings.device, max_sequence_length=self.options.max_sequence_length
        )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        tokens, ids = self.tokens(latents, rows)
        predicted: Tensor = modules["transformer"](
            hidden_states=tokens,
            timestep=thousandths(sigma),
            guidance=self.embedded_guidance(latents),
            encoder_hidden_states=rows["prompt_embeds"],
            img_ids=ids,
            **self.text_inputs(rows),
            return_dict=False,
        )[0]
        return predicted[:, : latents.shape[1]]

    def text_inputs(self, rows: Rows) -> dict[str, Tensor]:
        """Return the transformer's inputs of the text other than its embeddings."""
        embeds = rows["prompt_embeds"]
        ids = torch.zeros(embeds.shape[1], 3, device=embeds.device, dtype=embeds.dtype)
        return {"pooled_projections": rows["pooled"], "txt_ids": ids}

    def tokens(self, latents: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the image tokens (B, N, 64) and their positions (N, 3)."""
        return latents, self.table(latents.device, self._image_ids, *self.grid(), rows["prompt_embeds"].dtype)

    def _image_ids(self, height: int, width: int, dtype: torch.dtype) -> Tensor:
        return self.pipeline._prepare_latent_image_ids(1, height, width, torch.device("cpu"), dtype)

    def embedded_guidance(self, latents: Tensor) -> Tensor | None:
        """Return the guidance scale as an input of the model, (B,), if it takes one."""
        if not self.pipeline.transformer.config.guidance_embeds:
            return None
        return torch.full((len(latents),), self.settings.guidance_scale, device=latents.device)

    def decoded(self, latents: Tensor) -> Tensor:
        settings, scale = self.settings, self.pipeline.vae_scale_factor
        return self.decode_scaled(self.pipeline._unpack_latents(latents, settings.height, settings.width, scale))

    def encoded(self, media: Tensor) -> Tensor:
        return self.packed(self.encode_scaled(media))

    def packed(self, latents: Tensor) -> Tensor:
        """Return (B, N, 4 C) tokens of (B, C, h, w) latents."""
        tokens: Tensor = self.pipeline._pack_latents(latents, *latents.shape)
        return tokens

    def noise_channels(self) -> int:
        """Return the channels of latents before they are packed as tokens."""
        return super().noise_channels() // 4


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
