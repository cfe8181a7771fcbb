"""MiniMax-H3 with a first frame, or a first and a last one (the workflow ``fl2va`` of MiniMaxH3ModularPipeline).

Given frames are shown to the text encoder, and are further tokens of the transformer, which stay at the level 0.001:
the pipeline mixes that much noise in, from the generator of a sample; here it is drawn once for a prompt, as frames are
encoded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from models.policies.diffusion import PipelineCall
from models.policies.minimax_h3 import MiniMaxH3
from models.policies.parts import Part
from models.policies.pipeline import Rows, padded_text

if TYPE_CHECKING:
    from torch import Tensor

#: The first and the last frame.
_FRAMES = 2


class MiniMaxH3Frames(MiniMaxH3):
    """Adapter for MiniMaxH3ModularPipeline with given frames; latents are those of ``MiniMaxH3``."""

    workflow = "fl2va"
    family = "minimax_h3_fl2v"
    encoding_parts = frozenset({Part.TEXT, Part.VAE})
    required_parts = (*MiniMaxH3.required_parts, "processor")

    @classmethod
    def components(cls, folder: Path, parts: frozenset[Part]) -> Mapping[str, Any]:
        from models.policies.dummy_components import TextImageProcessor

        return {"processor": TextImageProcessor.load(folder / "processor") if Part.TEXT in parts else None}

    @classmethod
    def check_ends(cls, folder: Path, images: int, prompt: str, frames: int) -> None:
        """Do nothing: the model takes one image or two."""

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``text_length`` (1,) int64, the tokens of text and frames;
        ``image_begin_1`` to ``image_end_2``, (1,) int64 each, where frames are among them, 0 for none; and
        ``image_latents`` (1, 2, h, w, C) float32, a little noise included. Raises ConfigError as for text alone."""
        from diffusers.modular_pipelines.modular_pipeline import PipelineState
        from diffusers.utils.torch_utils import randn_tensor

        pipeline, state = self.pipeline, PipelineState()
        ends = dict(zip(("image", "last_image"), map(Image.fromarray, images), strict=False))
        for name, value in {"prompt": prompt, **ends, **self._canvas()}.items():
            state.set(name, value)
        for name in ("before_encode", "text_encoder", "vae_encoder"):
            _, state = self.step(name)(pipeline, state)
        embeds, shown = state.get("prompt_embeds"), state.get("text_token_tags") == pipeline.video_tag
        words = len(pipeline.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        self.check_length(prompt, embeds.shape[1], words=words)
        generator, latents = torch.Generator().manual_seed(pipeline.keyframe_encode_seed), []
        for clean in state.get("condition_latents"):
            noise = randn_tensor(clean.shape, generator=generator, dtype=torch.float32)
            latents.append(pipeline.scheduler.scale_noise(clean, pipeline.keyframe_noise_aug, noise))
        latents += [torch.zeros_like(latents[0])] * (_FRAMES - len(latents))
        # Where text and frames take turns.
        turns = [0, *(torch.diff(shown.long()).nonzero()[:, 0] + 1).tolist()][not shown[0] :]
        turns = (turns + [0] * 2 * _FRAMES)[: 2 * _FRAMES]
        names = [f"image_{edge}_{number}" for number in range(1, _FRAMES + 1) for edge in ("begin", "end")]
        found = padded_text(embeds, self.options.max_sequence_length)
        found |= {name: torch.tensor([turn], device=embeds.device) for name, turn in zip(names, turns, strict=True)}
        return {**found, "image_latents": torch.cat(latents, dim=2).permute(0, 2, 3, 4, 1).to(embeds.device)}

    def _canvas(self) -> dict[str, int]:
        return {"height": self.settings.height, "width": self.settings.width}

    def given_frames(self, rows: Rows) -> tuple[tuple[tuple[int, int], ...], Tensor | None]:
        edges = [(int(rows[f"image_begin_{n}"]), int(rows[f"image_end_{n}"])) for n in range(1, _FRAMES + 1)]
        blocks = tuple((begin, end) for begin, end in edges if end)
        return blocks, rows["image_latents"][0, : len(blocks)].permute(0, 3, 1, 2)

    def pipeline_call(self, steps: int, negative_prompt: str | None) -> PipelineCall:
        """Return the pipeline's arguments; it draws the noise in given frames first, from the same generator."""
        call = super().pipeline_call(steps, negative_prompt)
        note = "It draws noise for given frames from the generator, before that of the clip, so its samples differ."
        return replace(call, last_frame=True, differences=(*call.differences, note))
