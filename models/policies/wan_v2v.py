"""Wan 2.1 video to video (WanVideoToVideoPipeline): chains start from a clip with noise added.

It uses the text-to-video model. A chain takes the last steps of a longer schedule, and the strength is their share: a
higher strength keeps less of the clip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.configs.option_types import PositiveShare
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.maths.transitions import expand
from flowmill.models.policies.diffusion import Images, PipelineCall
from flowmill.models.policies.parts import Part
from flowmill.models.policies.wan import Wan, WanOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class WanVideoOptions(WanOptions):
    """Options of the family."""

    strength: PositiveShare = 0.8
    """Share of the schedule that is used, above 0 and at most 1: more adds more noise, 1 keeps nothing of the clip."""


class WanVideoToVideo(Wan):
    """Adapter for WanVideoToVideoPipeline; latents are (B, 16, f, h, w)."""

    pipeline_name = "WanVideoToVideoPipeline"
    # The published folder names the text-to-video pipeline.
    folders_of: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    family = "wan21_v2v"
    options_type = WanVideoOptions
    options: WanVideoOptions
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    starts_from_clips = True
    denoiser_names = ("transformer",)
    missing_arguments = frozenset({"num_frames", "guidance_scale_2"})

    def encode_images(self, prompts: Sequence[str], images: Images) -> dict[str, Tensor]:
        """Return ``source`` (B, 16, f, h, w) float32, the latents of prompts' clips; raise ConfigError if a clip is too
        short. ``images``: one clip per prompt, (F, H, W, 3) uint8, whose first frames are used; or one image, (H, W,
        3), repeated as a still clip."""
        from diffusers.pipelines.wan.pipeline_wan_video2video import retrieve_latents

        pipeline, settings, sources = self.pipeline, self.settings, []
        for prompt, (pixels,) in zip(prompts, images, strict=True):
            frames = [Image.fromarray(frame) for frame in self._frames(pixels, prompt)]
            film = pipeline.video_processor.preprocess_video(frames, height=settings.height, width=settings.width)
            film = film.to(settings.device, torch.float32).to(pipeline.vae.dtype)
            sources.append(retrieve_latents(pipeline.vae.encode(film), sample_mode="argmax").float())
        joined = torch.cat(sources)
        mean, inverse = self.standards(joined)
        return {"source": (joined - mean) * inverse}

    def _frames(self, pixels: np.ndarray, prompt: str) -> np.ndarray:
        count = self.settings.frames
        film = np.repeat(pixels[None], count, axis=0) if pixels.ndim == 3 else pixels[:count]
        if len(film) < count:
            raise ConfigError(
                f"the clip of prompt {prompt!r} has {len(film)} frames, but model.frames is {count}. Give a longer "
                "one, or lower model.frames."
            )
        return film

    def started(self, noise: Tensor, sigmas: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the clips' latents with noise of the first level, mixed as in ``scale_noise``."""
        level = expand(sigmas[:1].to(noise.device), noise)
        source = conditioning.positive["source"].to(noise.device, torch.float32)
        return level * noise + (1.0 - level) * source

    def sigmas(self, steps: int) -> Tensor:
        whole = self._whole(steps)
        return super().sigmas(whole)[whole - steps :]

    def _whole(self, steps: int) -> int:
        """Return the number N of steps to pass to the pipeline, which uses int(N strength) of them."""
        strength = self.options.strength
        most = int(steps / strength) + 2
        drawn_steps = next((number for number in range(steps, most) if int(number * strength) == steps), None)
        if drawn_steps is None:
            raise ConfigError(
                f"{steps} steps are no share of a schedule that model.options.strength {strength} leaves: with N steps "
                "the pipeline takes int(N strength). Change one of the two."
            )
        return drawn_steps

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        return replace(super().pipeline_call(steps, negative_prompt), clip=self.settings.frames)

    def more_arguments(self, steps: int) -> dict[str, Any]:
        return {
            **super().more_arguments(steps),
            "num_inference_steps": self._whole(steps),
            "strength": self.options.strength,
        }

    @classmethod
    def _check_scheduler(cls, folder: Path, index: Mapping[str, Any]) -> None:
        super()._check_scheduler(folder, index)
        if (index.get("transformer_2") or [None])[0]:
            raise ConfigError(
                f"model.path '{folder}' has two transformers, one per noise range, and the pipeline of video to video "
                "knows one. Use a Wan 2.1 model of text to video."
            )
