"""LTX-2 image to audio-video (LTX2ImageToVideoPipeline): the tokens of the first frame are those of the image.

They stay fixed and have time 0, so chains hold the other tokens of the clip, and those of the sound. They are put first
for model calls and decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from flowmill.configs.extras import require_extra
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.policies.diffusion import Images, PipelineCall
from flowmill.models.policies.ltx2 import LTX2, LTX2Options
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LTX2ImageOptions(LTX2Options):
    """Options of the family."""

    image_crf: Annotated[int, Field(ge=0, le=51)] | None = None
    """Quality of the H.264 frame that images are compressed to before they are encoded, as in training; 0: they are
    not; the pipeline's for the model when absent."""
    use_cross_timestep: bool | None = None
    """Attention between clip and sound is modulated by the other's noise level, as in LTX-2.3; when absent, it is if
    the model modulates text by it (cross_attn_mod), which LTX-2 does not."""


class LTX2ImageToVideo(LTX2):
    """Adapter for LTX2ImageToVideoPipeline; latents are (B, S + L, C): S tokens of all frames of latents but the first,
    and L of the sound."""

    pipeline_name = "LTX2ImageToVideoPipeline"
    # The published folder names the pipeline of text.
    folders_of: ClassVar[tuple[str, ...]] = ("LTX2Pipeline",)
    family = "ltx2_i2v"
    options_type = LTX2ImageOptions
    options: LTX2ImageOptions
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    fixed_first = True

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return the rows of the text and ``image_latents`` (B, N, C), the tokens of one image per prompt; raise
        ConfigError if images are to be compressed and PyAV is not installed."""
        from diffusers.pipelines.ltx2.pipeline_ltx2_image2video import retrieve_latents
        from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf

        pipeline, vae, tokens = self.pipeline, self.pipeline.vae, []
        crf = self.options.image_crf
        crf = resolve_default_image_crf(pipeline.text_encoder) if crf is None else crf
        if crf:
            require_extra("video", "av", label=f"model.policy '{self.family}'")
        for (pixels,) in images or ():
            image = Image.fromarray(apply_image_conditioning_crf(np.array(pixels), crf))
            unit = pipeline.video_processor.preprocess(image, self.settings.height, self.settings.width)
            unit = unit.to(self.settings.device, vae.dtype).unsqueeze(2)
            latents = retrieve_latents(vae.encode(unit), sample_mode="argmax").float()
            latents = pipeline._normalize_latents(latents, vae.latents_mean, vae.latents_std)
            tokens.append(pipeline._pack_latents(latents))
        return {**super().encode(prompts), "image_latents": torch.cat(tokens)}

    @property
    def _generated(self) -> int:
        frames, height, width = self._shape()
        return (frames - 1) * height * width

    def encoded(self, media: Tensor) -> Tensor:
        """Return the (B, S, C) tokens of clips, without those of the first frame of latents, the image."""
        return super().encoded(media)[:, -self._generated :]

    def initial_latents(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return (B, S + L, C) float32 noise: drawn for all frames, as in the pipeline, without the first."""
        return super().initial_latents(generators)[:, -(self._generated + self._sound_length()) :].contiguous()

    def finished(self, latents: Tensor, conditioning: Conditioning) -> Tensor:
        """Return (B, N + S + L, C): the image's tokens, followed by those that were generated."""
        return torch.cat([conditioning.positive["image_latents"].to(latents.device, latents.dtype), latents], dim=1)

    def clip_inputs(self, clip: Tensor, time: Tensor, rows: Rows) -> dict[str, Any]:
        """Return the tokens of whole clips, and a time for each."""
        first = rows["image_latents"].to(clip.dtype)
        times = time[:, None].expand(-1, clip.shape[1])
        return {
            "hidden_states": torch.cat([first, clip], dim=1),
            "timestep": torch.cat([torch.zeros_like(times[:, :1]).expand(-1, first.shape[1]), times], dim=1),
            "use_cross_timestep": self._crosses(),
        }

    def _crosses(self) -> bool:
        crosses, config = self.options.use_cross_timestep, self.pipeline.transformer.config
        return bool(config.cross_attn_mod) if crosses is None else crosses

    def more_arguments(self, steps: int) -> dict[str, Any]:
        arguments = {**super().more_arguments(steps), "use_cross_timestep": self._crosses()}
        return arguments if self.options.image_crf is None else {**arguments, "image_crf": self.options.image_crf}

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it rescales predictions by the std of whole clips."""
        call, rescales = super().pipeline_call(steps, negative_prompt), self.options.guidance_rescale > 0
        note = "The run rescales guided predictions by the std of the frames that are made, without the first."
        return replace(call, differences=(*call.differences, *(note,) * rescales))
