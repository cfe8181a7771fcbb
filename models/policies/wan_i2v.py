"""Wan 2.1 and 2.2 image to video (WanImageToVideoPipeline): extra latent channels hold the first frame.

They can also hold the last frame, the second image of a prompt. Wan 2.1 models take either the first frame alone or
both (FLF2V), Wan 2.2 takes one or both.

In Wan 2.2 TI2V-5B, the first latent frame is that of the image and stays fixed: its tokens have time 0, all others the
time of the step. Chains hold only the other frames, so that noise, log-probs, KL and losses are means over the
generated frames; the first frame would only add terms that do not depend on the weights. It is prepended for model
calls and decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from flowmill.configs.errors import PromptError
from flowmill.models.library_loading import read_json
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies.diffusion import Images, PipelineCall
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import Rows
from flowmill.models.policies.wan import ATTENTION_AND_FFN, Wan, Wan22TI2V


class _ImageToVideo(Wan):
    """Adapter for WanImageToVideoPipeline."""

    pipeline_name = "WanImageToVideoPipeline"
    text_parts = ("text_encoder", "tokenizer", "image_encoder", "image_processor")
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    lora_targets = ATTENTION_AND_FFN

    def encode_images(self, prompts: Sequence[str], images: Images) -> dict[str, Tensor]:
        """Return ``condition`` (B, ...) float32, which the pipeline computes from first frames and optional last ones.
        ``images``: the first frame of each of B clips, or the first and the last."""
        pipeline, settings, conditions = self.pipeline, self.settings, []
        size = (settings.height, settings.width)
        for _, ends in zip(prompts, images, strict=True):
            units = [pipeline.video_processor.preprocess(Image.fromarray(each), *size) for each in ends]
            first, *last = (unit.to(settings.device, torch.float32) for unit in units)
            # The returned latents are unused; a separate generator keeps the global one unchanged.
            _, condition, *_ = pipeline.prepare_latents(
                first,
                *(1, pipeline.vae.config.z_dim, *size, settings.frames, torch.float32, settings.device),
                torch.Generator(),
                last_image=last[0] if last else None,
            )
            conditions.append(condition)
        return {"condition": torch.cat(conditions)}


class Wan21ImageToVideo(_ImageToVideo):
    """Adapter for WanImageToVideoPipeline; Wan 2.1 also takes the image's CLIP embeddings."""

    family = "wan21_i2v"

    def encode_images(self, prompts: Sequence[str], images: Images) -> dict[str, Tensor]:
        """Return ``condition`` (B, 20, f, h, w) and for Wan 2.1 ``image_embeds`` (B, N, D). With a last frame its N
        tokens follow those of the first, (B, 2 N, D). Raises PromptError if a prompt comes with more or fewer frames
        than the model takes."""
        pipeline = self.pipeline
        for prompt, ends in zip(prompts, images, strict=True):
            _check_ends(pipeline.transformer.config, len(ends), prompt, self.settings.frames)
        rows = super().encode_images(prompts, images)
        if getattr(pipeline.transformer.config, "image_dim", None) is not None:
            # A row is a clip, with the tokens of both frames in sequence.
            pictures = [list(map(Image.fromarray, ends)) for ends in images]
            seen = [pipeline.encode_image(ends, self.settings.device).flatten(0, 1) for ends in pictures]
            rows["image_embeds"] = torch.stack(seen)
        return rows

    @classmethod
    def check_ends(cls, folder: Path, images: int, prompt: str, frames: int) -> None:
        """Check that the transformer takes this number of images per clip; raise PromptError."""
        _check_ends(read_json(folder / "transformer" / "config.json"), images, prompt, frames)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        return replace(super().pipeline_call(steps, negative_prompt), last_frame=True)

    def inputs(self, latents: Tensor, sigma: Tensor, rows: Rows) -> dict[str, Any]:
        """Return latents with those of provided frames, their time, and the embeddings of images."""
        seen = rows.get("image_embeds")
        if seen is not None and _sees_both(self.pipeline.transformer.config):
            # The transformer expects a clip's two frames as two rows, and joins them.
            seen = seen.unflatten(1, (2, -1)).flatten(0, 1)
        both = torch.cat([latents, rows["condition"].to(latents.dtype)], dim=1)
        return {**super().inputs(both, sigma, rows), "encoder_hidden_states_image": seen}


class Wan22ImageToVideo(Wan21ImageToVideo):
    """Wan 2.2: two transformers, which take the image as latents only."""

    family = "wan22_i2v"


class Wan22TI2VImage(_ImageToVideo, Wan22TI2V):
    """Adapter for WanImageToVideoPipeline with a time input per token; latents are (B, 48, f - 1, h, w)."""

    # The published folder names the text-to-video pipeline.
    folders_of: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    family = "wan22_ti2v_i2v"
    fixed_first = True

    def encode_images(self, prompts: Sequence[str], images: Images) -> dict[str, Tensor]:
        """Return ``condition`` (B, 48, 1, h, w), the latents of one image per prompt."""
        return super().encode_images(prompts, [[first] for (first,) in images])

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, 48, f - 1, h, w) float32 noise: drawn for all frames, as in the pipeline, without the first."""
        return super().initial_latents(generators)[:, :, 1:].contiguous()

    def finished(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Return (B, 48, f, h, w): the image's latents, followed by those of the generated frames."""
        first = conditioning.positive["condition"].to(latents.device, latents.dtype)
        return torch.cat([first, latents], dim=2)

    def encoded(self, media: Tensor) -> Tensor:
        """Return (B, 48, f - 1, h, w) latents of clips, without those of the first frame, the image."""
        return super().encoded(media)[:, :, 1:]

    def inputs(self, latents: Tensor, sigma: Tensor, rows: Rows) -> dict[str, Any]:
        times = super().inputs(latents, sigma, rows)["timestep"]
        still = times.new_zeros(len(times), times.shape[1] // latents.shape[2])
        clip = torch.cat([rows["condition"].to(latents.dtype), latents], dim=2)
        return {"hidden_states": clip, "timestep": torch.cat([still, times], dim=1)}

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        return super()._one(module, latents, sigma, rows)[:, :, 1:]


def _sees_both(config: Mapping[str, Any]) -> bool:
    return config.get("pos_embed_seq_len") is not None


def _check_ends(config: Mapping[str, Any], images: int, prompt: str, frames: int) -> None:
    """Check that the transformer, by its config, takes this number of images per clip."""
    both, reason = _sees_both(config), None
    if config.get("image_dim") is not None and both != (images == 2):
        only, other = ("both its ends", "one of the first alone") if both else ("the first alone", "Wan 2.1 FLF2V")
        reason = (
            f"this model sees {only} (pos_embed_seq_len of its transformer). Name the frames it takes, or use {other}"
        )
    elif images == 2 and frames == 1:
        reason = "model.frames is 1, which is the first alone. Raise it, or name one image"
    if reason is not None:
        named = "image, the first frame" if images == 1 else "images, the first and the last frame"
        raise PromptError(f"prompts.image: prompt {prompt!r} comes with {images} {named}, but {reason}.")
