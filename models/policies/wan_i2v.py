"""Wan 2.1 and 2.2 image to video (WanImageToVideoPipeline): extra latent channels hold the first frame.

They can also hold the last frame, the second image of a prompt. Wan 2.1 models take either the first frame alone or
both (FLF2V), Wan 2.2 takes one or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from configs.errors import PromptError
from configs.extras import require_extra
from models.library_loading import read_json
from models.policies.clips import clip_noise, frames_at_ends
from models.policies.diffusion import Images, PipelineCall
from models.policies.parts import Part
from models.policies.pipeline import Rows
from models.policies.wan import ATTENTION_AND_FFN, Wan

if TYPE_CHECKING:
    from torch import Tensor, nn


class Wan21ImageToVideo(Wan):
    """Adapter for WanImageToVideoPipeline; Wan 2.1 also takes the image's CLIP embeddings."""

    pipeline_name = "WanImageToVideoPipeline"
    family = "wan21_i2v"
    text_parts = ("text_encoder", "tokenizer", "image_encoder", "image_processor")
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    lora_targets = ATTENTION_AND_FFN

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return ``prompt_embeds``, ``condition`` (B, 20, f, h, w) and for Wan 2.1 ``image_embeds`` (B, N, D).

        With a last frame its N tokens follow those of the first, (B, 2 N, D).

        Raises:
            ConfigError: the package this pipeline cleans prompts with is not installed.
            PromptError: a prompt comes with more or fewer frames than the model takes.
        """
        require_extra("video", "ftfy", label=f"model.policy '{self.family}'")
        pipeline, device = self.pipeline, self.settings.device
        started = [[Image.fromarray(pixels) for pixels in ends] for ends in images or ()]
        for prompt, ends in zip(prompts, started, strict=True):
            _check_ends(pipeline.transformer.config, len(ends), prompt, self.settings.frames)
        found = {**super().encode(prompts), "condition": frames_at_ends(pipeline, self.settings, started)}
        if self._sees_image:
            # A row is a clip, with the tokens of both frames in sequence.
            seen = [pipeline.encode_image(ends, device).flatten(0, 1) for ends in started]
            found["image_embeds"] = torch.stack(seen)
        return found

    @classmethod
    def check_ends(cls, folder: Path, images: int, prompt: str, frames: int) -> None:
        """Check that the transformer takes this number of images per clip; raise PromptError.

        Args:
            folder: folder of the pipeline.
            images: number of images of the prompt.
            prompt: text of the prompt.
            frames: frames of the clip.
        """
        _check_ends(read_json(folder / "transformer" / "config.json"), images, prompt, frames)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; a second image is the last frame."""
        return replace(super().pipeline_call(steps, negative_prompt), last_frame=True)

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, 16, f, h, w) float32 noise."""
        return clip_noise(self.pipeline, self.settings, generators)

    @property
    def _sees_image(self) -> bool:
        return getattr(self.pipeline.transformer.config, "image_dim", None) is not None

    def _one(self, module: nn.Module, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        seen = rows.get("image_embeds")
        if seen is not None and _sees_both(self.pipeline.transformer.config):
            # The transformer expects a clip's two frames as two rows, and joins them.
            seen = seen.unflatten(1, (2, -1)).flatten(0, 1)
        return module(  # type: ignore[no-any-return]
            hidden_states=torch.cat([latents, rows["condition"].to(latents.dtype)], dim=1),
            timestep=sigma * 1000,
            encoder_hidden_states=rows["prompt_embeds"],
            encoder_hidden_states_image=seen,
            return_dict=False,
        )[0]


class Wan22ImageToVideo(Wan21ImageToVideo):
    """Wan 2.2: two transformers, which take the image as latents only."""

    family = "wan22_i2v"


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
