"""Qwen-Image (QwenImagePipeline): guidance by two forwards, rescaled to the norm of the conditional prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowmill.configs.errors import ConfigError
from flowmill.models.maths.guidance import norm_preserving_guided
from flowmill.models.policies.flux1 import Flux1
from flowmill.models.policies.pipeline import JOINT_ATTENTION, Modules, PipelinePolicy, Rows, thousandths
from flowmill.models.policies.tokenization import Reader

#: ``prompt_template_encode`` of QwenImagePipeline, with 34 tokens before the prompt.
_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


class QwenImage(Flux1):
    """Adapter for QwenImagePipeline; latents are packed, (B, tokens, 64)."""

    pipeline_name = "QwenImagePipeline"
    family = "qwen_image"
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    # The pipeline reads at most 1024 tokens of text, and drops those of its template.
    readers: ClassVar[tuple[Reader, ...]] = (
        Reader(tokenizer="tokenizer", most=1024, further=34, written=lambda _, text: _TEMPLATE.format(text)),
    )
    unused_parts = ()
    guidance_argument = "true_cfg_scale"
    image_remedy = ("images", "")
    """Images that are read with the text, and a further remedy for too many tokens, for messages."""
    blocks = ("transformer_blocks",)
    # Flow-GRPO's targets for Qwen-Image: attention and feed-forwards of both streams.
    lora_targets = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")

    encode = PipelinePolicy.encode

    @torch.no_grad()
    def encode_one(self, prompt: str, images: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``mask`` (1, L) int64, both of fixed length. Padding to the longest
        prompt of a batch would change the last bits of the others."""
        return self.masked_text(prompt, max_sequence_length=self.options.max_sequence_length)

    def masked_text(self, prompt: str, **arguments: Any) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (1, L, D) and ``mask`` (1, L) int64 of a prompt, with arguments of the pipeline;
        raise ConfigError if text and images have more tokens than ``max_sequence_length``."""
        length = self.options.max_sequence_length
        embeds, mask = self.pipeline.encode_prompt([prompt], device=self.settings.device, **arguments)
        mask = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        missing = length - embeds.shape[1]
        if missing < 0:
            raise ConfigError(
                f"model.options.max_sequence_length is {length}, but text and {self.image_remedy[0]} of prompt "
                f"{prompt!r} have {embeds.shape[1]} tokens. Raise it{self.image_remedy[1]}."
            )
        return {"prompt_embeds": F.pad(embeds, (0, 0, 0, missing)), "mask": F.pad(mask.long(), (0, missing))}

    def call(self, modules: Modules, latents: Tensor, sigma: Tensor, rows: Rows) -> Tensor:
        extra = self.extra_tokens(rows)
        predicted: Tensor = modules["transformer"](
            hidden_states=latents if extra is None else torch.cat([latents, extra.to(latents.dtype)], dim=1),
            timestep=thousandths(sigma),
            encoder_hidden_states=rows["prompt_embeds"],
            encoder_hidden_states_mask=rows["mask"],
            img_shapes=[self.shapes(rows)] * len(latents),
            return_dict=False,
        )[0]
        return predicted[:, : latents.shape[1]]

    def extra_tokens(self, rows: Rows) -> Tensor | None:
        """Return tokens (B, N, 64) to append to the generated ones, or None."""
        return None

    def shapes(self, rows: Rows) -> list[tuple[int, int, int]]:
        """Return frames, height and width in tokens of every image the model sees."""
        return [(1, *self.grid())]

    def guide(self, negative: Tensor, positive: Tensor, sigma: Tensor, latents: Tensor) -> Tensor:
        """Return the guided prediction; each token has the norm of the conditional prediction."""
        return norm_preserving_guided(negative, positive, self.settings.guidance_scale)

    def decoded(self, latents: Tensor) -> Tensor:
        settings, scale = self.settings, self.pipeline.vae_scale_factor
        spatial = self.pipeline._unpack_latents(latents, settings.height, settings.width, scale)
        return self.decode_standardized(spatial)[:, :, 0]

    def encoded(self, media: Tensor) -> Tensor:
        return self.packed(self.encode_standardized(media[:, :, None])[:, :, 0])
