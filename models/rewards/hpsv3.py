"""HPSv3 (arXiv 2508.03789): a Qwen2-VL with a head that predicts human preference of an image for a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import nn

from flowmill.configs.path_types import FilePlace, ModelPlace
from flowmill.models.rewards.answer_parsing import TOKEN, Backbone, read_instruction, token_grid
from flowmill.models.rewards.base import Metadata, Needs, Scores
from flowmill.models.rewards.pretrained import Pretrained
from flowmill.models.rewards.weight_files import WeightsFile

_REWARD = "<|Reward|>"
#: Target number of pixels of a scaled image: 256 tokens.
_PIXELS = 256 * TOKEN**2


@dataclass(kw_only=True)
class HpsV3(Pretrained):
    """The mean that HPSv3's head gives at its reward token (``inference.py``: the first of mu and sigma)."""

    name: ClassVar[str] = "hpsv3"
    needs: ClassVar[Needs] = Needs(media="images", accelerated=True, batch_size=8)

    weights: FilePlace
    """``HPSv3.safetensors`` (MizzenAI/HPSv3)."""
    instruction: FilePlace
    """Text file with the instruction of its training, with {text_prompt} for the prompt and its reward token."""
    model: ModelPlace = "Qwen/Qwen2-VL-7B-Instruct"
    """Folder or hub id of its base model, for its sizes, tokenizer and image processor."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights, except for those of the head, which are float32."""

    def __post_init__(self) -> None:
        """Load model and head; raise ConfigError if one cannot be loaded, or the instruction is invalid."""
        device = self.chosen()
        self._instruction = read_instruction(self.name, Path(self.instruction), [_REWARD])
        self._images = self.loaded("AutoImageProcessor")
        file = WeightsFile(reward=self.name, file=self.weights)
        stored = file.read()
        head = {name.removeprefix("rm_head."): stored.pop(name) for name in list(stored) if name.startswith("rm_head.")}
        dtype: torch.dtype = getattr(torch, self.dtype)
        self._reader = Backbone(
            file, stored, model=self.model, revision=self.revision, marks=[_REWARD], device=device, dtype=dtype
        )
        self._head = _make_head(self._reader.width)
        file.fill(self._head, head, lambda name, tensor: {name: tensor.float()})
        self._head.to(device).eval().requires_grad_(False)

    @torch.inference_mode()
    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return one score per (H, W, 3) uint8 image."""
        seen = self._images([_scaled(image) for image in media], return_tensors="pt")
        grid, merged = seen["image_grid_thw"], self._images.merge_size**2
        texts = [
            self._reader.text(self._instruction, prompt, "image", int(size.prod()) // merged)
            for prompt, size in zip(prompts, grid, strict=True)
        ]
        (at_reward,) = self._reader.verdicts(texts, seen["pixel_values"], grid, "image")
        values: np.ndarray = self._head(at_reward)[:, 0].cpu().numpy()
        return Scores(values)


def _make_head(width: int) -> nn.Sequential:
    """Return the published head (``qwen2vl_trainer.py``, 'ranknet'): mu and sigma of a hidden state."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def _scaled(image: np.ndarray) -> Image.Image:
    """Return an image scaled to about 256 tokens, with both sides multiples of a token's side."""
    height, width = token_grid(*image.shape[:2], least=_PIXELS, most=_PIXELS)
    return Image.fromarray(image).resize((width * TOKEN, height * TOKEN), Image.Resampling.BICUBIC)
