"""HunyuanVideo 1.5 image to video (HunyuanVideo15ImageToVideoPipeline): the image is the first frame, as latents in
further channels, and SigLIP's embeddings of it are tokens next to the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from flowmill.models.policies.diffusion import Images, PipelineCall
from flowmill.models.policies.hunyuan_video15 import HunyuanVideo15
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import Rows


class HunyuanVideo15ImageToVideo(HunyuanVideo15):
    """Adapter for HunyuanVideo15ImageToVideoPipeline; latents are (B, 32, f, h, w)."""

    pipeline_name = "HunyuanVideo15ImageToVideoPipeline"
    family = "hunyuan_video15_i2v"
    text_parts = (*HunyuanVideo15.text_parts, "image_encoder", "feature_extractor")
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    missing_arguments = HunyuanVideo15.missing_arguments | {"height", "width"}

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Images | None = None) -> dict[str, Tensor]:
        """Return the rows of the text, ``image_latents`` (B, 32, 1, h, w) and ``image_embeds`` (B, N, D): latents and
        embeddings of one image per prompt, which is scaled and cropped to the clip's size as in the pipeline."""
        pipeline, settings = self.pipeline, self.settings
        size, latents, embeds = (settings.height, settings.width), [], []
        for (pixels,) in images or ():
            image = pipeline.video_processor.resize(Image.fromarray(pixels), *size, resize_mode="crop")
            parts = (pipeline.vae, pipeline.video_processor, image, *size, settings.device)
            latents.append(pipeline._get_image_latents(*parts).float())
            embeds.append(pipeline.encode_image(image, 1, settings.device, settings.dtype))
        return {**super().encode(prompts), "image_latents": torch.cat(latents), "image_embeds": torch.cat(embeds)}

    def condition(self, latents: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        first = rows["image_latents"].to(latents.dtype)
        frame = torch.cat([first, torch.ones_like(first[:, :1])], dim=1)
        # All frames but the first are unknown.
        return F.pad(frame, (0, 0, 0, 0, 0, latents.shape[2] - 1)), rows["image_embeds"].to(latents.dtype)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it sets the size of a clip by the shape of its image."""
        call, settings = super().pipeline_call(steps, negative_prompt), self.settings
        note = (
            f"The run crops images to {settings.width} x {settings.height} pixels; {self.pipeline_name} takes the size "
            "among its own that is nearest to the image's shape."
        )
        return replace(call, differences=(*call.differences, note))
